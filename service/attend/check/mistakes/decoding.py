"""Mistakes of a candidate that decodes with a cache of keys and values."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attend.check.changes import Change, at_steps, impossible, only_if, replace_steps
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


class Calls:
    """The call of each row, of a sequence that is decoded in chunks or computed whole: [n]."""

    def __init__(self, c: Computation) -> None:
        rows = np.asarray(c.case.chunks or c.case.query.shape[1:2])
        self.rows = np.repeat(rows, rows)  # how many it has
        self.end = np.repeat(np.cumsum(rows), rows)
        self.start = self.end - self.rows
        self.start_before = np.repeat([0, *(np.cumsum(rows) - rows)[:-1]], rows)  # of the call before it, 0 in the first one
        self.number = np.repeat(np.arange(len(rows)), rows)
        self.row = np.arange(len(self.rows))

    def with_cache(self, cached: Array, otherwise: Array) -> Array:
        """The numbers `cached` in calls with a cache, and others in those without."""
        return np.where(self.start > 0, cached, otherwise)


Rows = Callable[[Computation, Calls], Array]  # for each row, a row of the keys


def see(last: Rows, first: Rows = lambda c, calls: 0 * calls.row, *, alone: bool = True, whole: bool = False) -> Change:
    """Lets each row see the keys from row `first` to row `last`.

    Not `alone`: a call of one row sees all. Not `whole`: impossible unless it is decoded.
    """

    def change(c: Computation) -> Computation:
        calls, keys = Calls(c), np.arange(c.case.visible.shape[2])
        ends = np.where(alone | (calls.rows > 1), last(c, calls), calls.row)[:, None]
        visible = c.case.mask & (keys >= first(c, calls)[:, None]) & (keys <= ends)
        return impossible() if np.array_equal(visible, c.case.visible) else replace(c, case=replace(c.case, visible=visible))

    return only_if(lambda c: c.case.causal if whole else c.case.chunks, change)


def _after(length: Callable[[Computation], int]) -> Rows:
    """The row's own key, if the causal mask of calls with a cache begins after so many keys."""
    return lambda c, calls: calls.with_cache(calls.row - calls.start + length(c), calls.row)


def _at_last(keys: Callable[[Computation], int]) -> Rows:
    """The row's own key, if the last row of the call is at the last of so many keys."""
    return lambda c, calls: calls.row + keys(c) - calls.end


def restart_positions(names: tuple[str, ...], length: Callable[[Computation], int] = lambda c: 0) -> Change:
    """RoPE counts the positions of each chunk from a wrong length of the cache, which is empty in the first."""

    def change(c: Computation) -> Computation:
        calls = Calls(c)
        shift = calls.with_cache(length(c) - calls.start, 0 * calls.start)

        steps = [f"rotate_{name}" for name in names]
        return at_steps(steps, lambda compute, x, positions, *others: compute(x, positions + shift, *others))(c)

    return only_if(lambda c: c.case.chunks and c.spec.rope, change)


def rotate_again(times: Callable[[Array], Array]) -> Change:
    """RoPE rotates cached keys, which are rotated already: so many times, as a function of how many calls ago they were cached."""

    def change(c: Computation) -> Computation:
        call = Calls(c).number
        more = times(np.maximum(call[:, None] - call, 0))

        def raw_scores(layer: Layer, q: Array, k: Array) -> Array:
            scores = c.layer.raw_scores(layer, q, k)
            for n in range(1, more.max() + 1):
                k = layer.again("rotate_key", k)
                scores = np.where(more == n, c.layer.raw_scores(layer, q, k), scores)
            return scores

        return replace_steps(raw_scores=raw_scores)(c)

    return only_if(lambda c: c.case.chunks and c.spec.rope, change)


def keep_rolled_back(c: Computation) -> Computation:
    """Rows that were rolled back stay among the keys, before those that took their place. Impossible if positions matter."""
    rows = c.case.rolled_back
    if rows is None or c.spec.positional:
        impossible()
    start, count = rows.first_row, rows.query.shape[1]
    key, value = (
        np.concatenate([old[:, :start], extra, old[:, start:]], axis=1)
        for old, extra in ((c.case.key, rows.key), (c.case.value, rows.value))
    )
    visible = np.insert(c.case.visible, [start] * count, False, axis=2)
    visible[:, start:, start : start + count] = True
    return replace(c, case=replace(c.case, key=key, value=value, visible=visible))


SIZES: dict[str, tuple[str, Callable[[Computation], int]]] = {  # of the other axes of the keys, with a symbol
    "the number of key heads": ("h", lambda c: c.spec.num_kv_heads),
    "the size of the batch": ("b", lambda c: len(c.case.query)),
    "head_dim": ("d", lambda c: c.spec.head_dim),
}
LENGTHS = SIZES | {"len((K, V))": ("2", lambda c: 2)}  # what is read in place of the length of the cache
MISTAKES: dict[str, Mistake] = {
    **computing(
        "query i sees the keys j ≤ i, cached or of its call",
        {
            "the cache is not used: each call sees its own rows alone": (
                "query i sees the keys of its call, j ≤ i",
                see(lambda c, calls: calls.row, lambda c, calls: calls.start),
            ),
            "the cache has the rows of the call before alone": (
                "query i sees the keys j ≤ i of its call and of the one before",
                see(lambda c, calls: calls.row, lambda c, calls: calls.start_before),
            ),
            "the rows of a call are not seen, but the cache alone": (
                "query i sees the keys of the cache",
                see(lambda c, calls: calls.start - 1),
            ),
            "in a call with a cache, queries see later rows of the call": (
                "query i sees the keys of the cache and of its whole call",
                see(lambda c, calls: calls.with_cache(calls.end - 1, calls.row)),
            ),
            "in a call with a cache, also if it is empty, queries see later rows of the call": (
                "query i sees the keys of the cache and of its whole call",
                see(lambda c, calls: calls.end - 1),
            ),
            **{
                f"in {call} with a cache, the causal mask is aligned at the first key: query i {of}sees the first i + 1 keys": (
                    f"query i sees the keys j ≤ i - (length of the cache){others}",
                    see(lambda c, calls: calls.row - calls.start, alone=alone),
                )
                for call, of, others, alone in (
                    ("a call", "of the call ", "", True),
                    ("a call of several rows", "", "; one row all", False),
                )
            },
            **{
                f"in {call} with a cache, {size} is taken for the length of the cache in the causal mask": (
                    f"query i of the call sees j ≤ i + {symbol}{others}",
                    see(_after(length), alone=alone),
                )
                for size, (symbol, length) in LENGTHS.items()
                for call, others, alone in (("a call", "", True), ("a call of several rows", "; a single row all keys", False))
            },
            **{
                f"{call}{size} is taken for the number of keys in the causal mask": (
                    f"query i of q sees the keys j ≤ i + {symbol} - q{others}",
                    see(_at_last(number), alone=alone, whole=True),
                )
                for size, (symbol, number) in SIZES.items()
                for call, others, alone in (("", "", True), ("in a call of several rows, ", "; a single row all keys", False))
            },
        },
    ),
    "rows that were rolled back stay in the cache": Mistake(
        keep_rolled_back, "keys: also those that were rolled back", "keys: those of the rows that were not rolled back"
    ),
    **computing(
        "R(i) q_i · R(j) k_j, i and j from the beginning of the cache",
        {
            "RoPE rotates the cached keys again in each call": (
                "R(i) q_i · R(j) … R(j) k_j, once for each call",
                rotate_again(lambda calls: calls),
            ),
            "RoPE rotates the cached keys once more": ("R(i) q_i · R(j) R(j) k_j", rotate_again(lambda calls: np.minimum(calls, 1))),
            "RoPE counts positions from 0 in each call, and not from the length of the cache": (
                "R(i) q_i · R(j) k_j, i and j from the beginning of the call",
                restart_positions(("query", "key")),
            ),
            **{
                f"RoPE counts the positions of {words} from 0 in each call": (
                    f"R(i) q_i · R(j) k_j, {index} from the beginning of the call",
                    restart_positions((role,)),
                )
                for words, index, role in (("queries", "i", "query"), ("keys", "j", "key"))
            },
            **{
                f"in a call with a cache, {size} is taken for the length of the cache in RoPE's positions{of}": (
                    f"R(i) q_i · R(j) k_j, {indices} from {symbol}",
                    restart_positions(roles, length),
                )
                for size, (symbol, length) in LENGTHS.items()
                for of, indices, roles in (
                    ("", "i and j", ("query", "key")),
                    (" of queries", "i", ("query",)),
                    (" of keys", "j", ("key",)),
                )
            },
        },
    ),
}
