"""Which words each head links most strongly: attention weights [h, q, k] and tokens -> a table."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from service.tensors import Array

SPECIAL = {"[CLS]", "[SEP]"}
SHOWN = 3


def links_table(weights: Array, tokens: Sequence[str]) -> Table:
    """One row per head, a link being query → key. Special tokens have no links; what the words give them on average has a column."""
    names = labels(tokens)
    words = _words(tokens)
    table = Table("head", "strongest link", "second", "third", *([] if words.all() else ["special"]), box=SIMPLE, padding=(0, 1, 0, 0))
    for head, (rows, places) in enumerate(zip(weights, linked(weights, tokens), strict=True)):
        links = [f"{names[q]}→{names[k]} {rows[q, k]:.2f}" for q, k in places]
        special = [] if words.all() else [f"{rows[words][:, ~words].sum(-1).mean():.2f}"]
        table.add_row(str(head), *links, *[""] * (SHOWN - len(links)), *special)
    if not words.all():
        table.caption = f"special: what a word gives on average to {' and '.join(sorted(SPECIAL & {*tokens}))}"
    return table


def linked(weights: Array, tokens: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Of each head the places (query, key) of its strongest links between words."""
    return [strongest(rows, _words(tokens)) for rows in weights]


def _words(tokens: Sequence[str]) -> Array:
    return np.array([token not in SPECIAL for token in tokens])


def strongest(rows: Array, words: Array) -> list[tuple[int, int]]:
    """The places (query, key) of the largest weights in [q, k] among those between words; ties in order of place."""
    among = np.where(words[:, None] & words[None, :], rows, -1.0)
    first = np.argsort(-among, axis=None, kind="stable")[: min(SHOWN, int(words.sum()) ** 2)]
    return [(int(place) // rows.shape[1], int(place) % rows.shape[1]) for place in first]


def labels(tokens: Sequence[str]) -> list[str]:
    """The tokens, those that occur more than once numbered: the(1), cat, the(2)."""
    total, seen = Counter(tokens), Counter[str]()
    named = []
    for token in tokens:
        seen[token] += 1
        named.append(f"{token}({seen[token]})" if total[token] > 1 else token)
    return named
