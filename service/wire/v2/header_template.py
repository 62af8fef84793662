"""The JSON part of a V2 request without its numbers: what whoever calls often says again in the same words.

Where the numbers stand is found without parsing. In JSON the quote behind `data` in `"data":` can only end a string, so what follows is
the value of a key; and up to the next quote or brace there is no string and no object, so that a list which begins there holds numbers
alone, and ends before that. Should this be no JSON, either what is left out or what is left is none, and is found out when it is read.
"""

import re
from typing import NamedTuple

LONGEST = 4096  # bytes of a text without its numbers; longer ones are hardly sent twice
DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
NESTED = re.compile(rb"\[\s*\[")


class Frame(NamedTuple):
    """`text` has an empty list in the place of each list of numbers, with one inside where it has lists; `lists` says where they were."""

    text: bytes
    lists: list[slice]


def frame_of(text: bytes) -> Frame | None:
    """The frame of a JSON text, all of it where it holds no numbers; None where it would be long, or is not easily told."""
    pieces: list[bytes] = []
    lists: list[slice] = []
    begin = size = 0
    while found := DATA.search(text, begin, begin + LONGEST):
        start = found.end()
        quote = text.find(b'"', start)
        brace = text.find(b"}", start, quote if quote >= 0 else len(text))
        stop = text.rfind(b"]", start, quote if brace < 0 else brace) + 1  # where neither comes, this is no JSON, and stays none
        size += start - begin
        if not stop or size > LONGEST:
            return None
        pieces += text[begin:start], b"[[]]" if NESTED.match(text, start) else b"[]"
        lists.append(slice(start, stop))
        begin = stop
    if size + len(text) - begin > LONGEST:
        return None
    return Frame(b"".join((*pieces, text[begin:])), lists)
