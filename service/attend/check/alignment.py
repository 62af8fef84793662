"""Where the queries of a causal call are, if it has more or fewer keys than queries: libraries disagree.

Top-left: query i attends to keys 0 to i, as in torch's scaled_dot_product_attention. Bottom-right: the last query attends to all keys, as
in FlashAttention since version 2.1. A candidate with a parameter for causality is called with q < k and with q > k, and its numbers are
compared with both. Rows that have no key, which only bottom-right has, are left out, since libraries disagree about them too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attend.check.cases import CheckCase, Draw
from attend.check.convention import Alignment

PAIRS = ((5, 11), (11, 5), (65, 193))  # queries and keys; the last are more than tiles of 64 and 128 hold
WORDS: dict[Alignment, str] = {
    "top-left": "top-left (query i attends to keys 0 to i)",
    "bottom-right": "bottom-right (the last query attends to all keys)",
}


def draw_alignments(draw: Draw, name: str, longest: int) -> Iterator[dict[Alignment, CheckCase]]:
    """For each pair of lengths of at most `longest` rows, the call of the parameter `name` as either alignment computes it."""
    pairs = dict.fromkeys((draw.lengths.whole(queries), draw.lengths.whole(keys)) for queries, keys in PAIRS)
    for queries, keys in (pair for pair in pairs if max(pair) <= max(longest, PAIRS[0][1]) and len({*pair}) > 1):
        words = f"{name}=True, {queries} queries, {keys} keys"
        top = draw.case(words, "plain", keys, queries=queries, group="parameters", causal=True, passed={"causal": True}, query_offset=0)
        if queries <= keys:
            bottom = replace(top, query_offset=keys - queries).seeing()
        else:
            rows: dict[str, Any] = {part: getattr(top, part)[:, -keys:] for part in ("query", "mask")}
            bottom = replace(top, whole=top, **rows).seeing()
        yield {"top-left": top, "bottom-right": bottom}
