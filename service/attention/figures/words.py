"""Words as labels: made printable, measured, and cut to a width. A word is data: nothing in it is ever markup, mathematics or a command.

Widths are those of DejaVu Sans, which matplotlib brings along, so that a picture comes out the same wherever it is drawn.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

JOINERS = {"\u200c", "\u200d"}  # shape the letters beside them in Persian, Hindi and emoji
LONGEST = 1000
UNITS = 100  # font size at which widths are taken
ELLIPSIS = "…"


def printable(word: str) -> str:
    """The word with what has no shape of its own written out as in Python: a newline as \\n, a change of direction as \\u202e.

    Of a word longer than LONGEST letters the rest is left out.
    """
    word = word if len(word) <= LONGEST else word[:LONGEST] + ELLIPSIS
    return "".join(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in word)


@cache
def fonts() -> tuple[str, ...]:
    """Files of the fonts that labels in a PNG are drawn with: plain and bold."""
    from matplotlib import get_data_path

    return tuple(f"{get_data_path()}/fonts/ttf/{name}.ttf" for name in ("DejaVuSans", "DejaVuSans-Bold"))


@cache
def _letters(bold: bool = False) -> "tuple[FT2Font, frozenset[int]]":
    from matplotlib.ft2font import FT2Font

    font = FT2Font(fonts()[bold])
    font.set_size(UNITS, 72)
    return font, frozenset(font.get_charmap())


def drawable(text: str) -> str:
    """The text with a box for each letter that the font does not have. An SVG needs no such thing: its reader has fonts of his own."""
    known = _letters()[1]
    return "".join(c if ord(c) in known else "□" for c in text)


@lru_cache(4096)
def _advance(letter: str, bold: bool) -> float:
    font, known = _letters(bold)
    if ord(letter) not in known:
        return 1.0  # most scripts that are missing fill a square
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536 / UNITS


def width(text: str, size: float, bold: bool = False) -> float:
    """How wide the text is at a font size, both in pixels."""
    return size * sum(_advance(letter, bold) for letter in text)


def cut(text: str, size: float, room: float, bold: bool = False) -> str:
    """The text, or its beginning and an ellipsis where it is wider than `room` pixels."""
    if width(text, size, bold) <= room:
        return text
    return text[: _fitting(text, size, room - width(ELLIPSIS, size, bold), bold)].rstrip() + ELLIPSIS


def lines(text: str, size: float, room: float, most: int, bold: bool = False) -> Iterator[str]:
    """The text in lines no wider than `room` pixels, broken at spaces, and a word that is wider than a line within; what is too much for
    `most` of them is cut off.
    """
    words, line = text.split(" "), ""
    while words and most > 1:
        longer = f"{line} {words[0]}".strip()
        if width(longer, size, bold) <= room:
            line = longer
            words.pop(0)
            continue
        if not line:
            kept = max(1, _fitting(words[0], size, room, bold))
            line, words[0] = words[0][:kept], words[0][kept:]
        yield line
        line, most = "", most - 1
    if line or words:
        yield cut(" ".join([line, *words]).strip(), size, room, bold)


def _fitting(text: str, size: float, room: float, bold: bool) -> int:
    """How many of its first letters go into `room` pixels."""
    for kept, letter in enumerate(text):
        room -= size * _advance(letter, bold)
        if room < 0:
            return kept
    return len(text)
