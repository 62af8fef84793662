"""Mistakes of a candidate that decodes with a cache of keys and values."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from attend.check.cases import CheckCase
from attend.check.changes import Change, Impossible, at_heads, only_if, replace_steps
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


def _rows_of_calls(case: CheckCase) -> Array:
    """How many rows each call has: those of the chunks, or all."""
    return np.asarray(case.chunks or case.query.shape[1:2])


def _starts(case: CheckCase) -> Array:
    """The first row of the call of each row: [n]."""
    return np.asarray(_ends(case) - np.repeat(_rows_of_calls(case), _rows_of_calls(case)))


def _ends(case: CheckCase) -> Array:
    """The row after the call of each row: [n]."""
    return np.repeat(np.cumsum(_rows_of_calls(case)), _rows_of_calls(case))


def _starts_before(case: CheckCase) -> Array:
    """The first row of the chunk before that of each row, 0 in the first chunk: [n]."""
    starts = np.cumsum(case.chunks) - case.chunks
    return np.repeat(np.concatenate([[0], starts[:-1]]), case.chunks)


def _aligned_at_first_key_in_chunks(case: CheckCase, i: Array, j: Array) -> Array:
    """Whether row j is visible to query i, if calls of one row have no mask, and the mask of others is aligned at the first key."""
    alone = _ends(case) - _starts(case) == 1
    return np.asarray(j <= i - np.where(alone, 0, _starts(case))[:, None])


def _after_length(length: int, case: CheckCase, i: Array, j: Array) -> Array:
    """Whether row j is visible to query i, if the causal mask of calls with a cache begins after so many keys."""
    starts = _starts(case)[:, None]
    return np.asarray(j <= np.where(starts > 0, i - starts + length, i))


def _after_length_in_chunks(length: int, case: CheckCase, i: Array, j: Array) -> Array:
    """As `_after_length`, if calls of one row have no mask."""
    alone = (_ends(case) - _starts(case) == 1)[:, None]
    return np.asarray(np.where(alone, j <= i, _after_length(length, case, i, j)))


def _rows_of_places(case: CheckCase) -> Array:
    """The row at each place of the keys, for each query, if each call puts its rows before the cache: [n, n]."""
    n, starts, ends = case.query.shape[1], _starts(case), _ends(case)
    places = ends[:, None] - ends[None] + np.arange(n)[None] - starts[None]  # of row j, for query i
    rows = np.tile(np.arange(n), (n, 1))
    for i in range(n):
        rows[i, places[i, : ends[i]]] = np.arange(ends[i])
    return rows


def put_first(roles: tuple[str, ...]) -> Change:
    """Each call puts its rows of the keys or values before the cache. Query i sees the first i + 1 places. Impossible with chunks of 1."""

    def change(c: Computation) -> Computation:
        if not c.case.chunks:
            raise Impossible
        rows = _rows_of_places(c.case)[None, None]

        def raw_scores(layer: Layer, q: Array, k: Array) -> Array:
            scores = c.layer.raw_scores(layer, q, k)
            return np.take_along_axis(scores, np.broadcast_to(rows, scores.shape), -1) if "key" in roles else scores

        def apply_weights(layer: Layer, weights: Array, values: Array) -> Array:
            of_rows = np.zeros(weights.shape)
            np.put_along_axis(of_rows, np.broadcast_to(rows, weights.shape), weights, -1)
            return c.layer.apply_weights(layer, of_rows if "value" in roles else weights, values)

        return replace_steps(raw_scores=raw_scores, apply_weights=apply_weights)(c)

    return change


def cache_rows_of(sources: Mapping[str, str]) -> Change:
    """In calls with a cache, rows of another projection are appended to it: role -> source."""

    def change(c: Computation) -> Computation:
        if not c.case.chunks:
            raise Impossible
        first = c.case.chunks[0]

        def appended(layer: Layer, heads: Mapping[str, Array]) -> Mapping[str, Array]:
            return {role: np.concatenate([heads[role][:, :, :first], heads[x][:, :, first:]], axis=2) for role, x in sources.items()}

        return at_heads("projected", appended)(c)

    return change


def read_cache_of(sources: Mapping[str, str]) -> Change:
    """The cached rows of keys or values are those of the other: role -> source."""

    def change(c: Computation) -> Computation:
        if not c.case.chunks or c.spec.num_softmaxes > 1:
            raise Impossible
        cached, heads = np.arange(c.case.query.shape[1]) < _starts(c.case)[:, None], dict[str, Array]()

        def project_heads(layer: Layer, name: str, x: Array) -> Array:
            heads[name] = c.layer.project_heads(layer, name, x)
            return heads[name]

        def raw_scores(layer: Layer, q: Array, k: Array) -> Array:
            scores, heads["key"] = c.layer.raw_scores(layer, q, k), k
            if "key" not in sources:
                return scores
            return np.where(cached, c.layer.raw_scores(layer, q, layer.repeat_kv_heads(heads["value"])), scores)

        def apply_weights(layer: Layer, weights: Array, values: Array) -> Array:
            if "value" not in sources:
                return c.layer.apply_weights(layer, weights, values)
            return np.asarray(np.where(cached, weights, 0.0) @ heads["key"] + np.where(cached, 0.0, weights) @ values)

        return replace_steps(project_heads=project_heads, raw_scores=raw_scores, apply_weights=apply_weights)(c)

    return change


def see(visible: Callable[[CheckCase, Array, Array], Array]) -> Change:
    """Lets query i see key j where this function of the case, i [n, 1] and j [1, n] is true. Impossible unless it is decoded."""

    def change(c: Computation) -> Computation:
        if not c.case.chunks:
            raise Impossible
        rows = np.arange(c.case.query.shape[1])
        chosen = np.broadcast_to(visible(c.case, rows[:, None], rows[None]), c.case.visible.shape)
        if np.array_equal(chosen, c.case.visible):
            raise Impossible
        return replace(c, case=replace(c.case, visible=chosen))

    return change


def see_with_length(length: Callable[[Computation], int], visible: Callable[[int, CheckCase, Array, Array], Array]) -> Change:
    """As `see`, by a function whose first argument is a wrong length of the cache."""
    return lambda c: see(partial(visible, length(c)))(c)


def align_by(keys: Callable[[Computation], int], *, alone: bool) -> Change:
    """Aligns the causal mask at the last key by a wrong number of keys; not `alone`: a call of one row has no mask."""

    def change(c: Computation) -> Computation:
        if not c.case.causal:
            raise Impossible
        i, j = (np.arange(n) for n in c.case.visible.shape[1:])
        ends = _ends(c.case)
        last = np.where(alone | (ends - _starts(c.case) > 1), i + keys(c) - ends, i)
        visible = c.case.mask & (j <= last[:, None])
        if np.array_equal(visible, c.case.visible):
            raise Impossible
        return replace(c, case=replace(c.case, visible=visible))

    return change


def restart_positions(names: tuple[str, ...], length: Callable[[Computation], int] = lambda c: 0) -> Change:
    """RoPE counts the positions of each chunk from a wrong length of the cache, which is empty in the first."""

    def change(c: Computation) -> Computation:
        starts = _starts(c.case)
        shift = np.where(starts > 0, length(c), 0) - starts

        def rotate(layer: Layer, x: Array, name: str, positions: Array) -> Array:
            return c.layer.rotate(layer, x, name, positions + shift if name in names else positions)

        return replace_steps(rotate=rotate)(c)

    return only_if(lambda c: c.case.chunks and c.spec.rope, change)


def rotate_again(times: Callable[[Array], Array]) -> Change:
    """RoPE rotates cached keys, which are rotated already: so many times, as a function of how many calls ago they were cached."""

    def change(c: Computation) -> Computation:
        call = np.repeat(np.arange(len(c.case.chunks)), c.case.chunks)
        more = times(np.maximum(call[:, None] - call, 0))

        def raw_scores(layer: Layer, q: Array, k: Array) -> Array:
            scores = c.layer.raw_scores(layer, q, k)
            for n in range(1, more.max() + 1):
                k = layer.rotate(k, "key", layer.values["key_coordinates"])
                scores = np.where(more == n, c.layer.raw_scores(layer, q, k), scores)
            return scores

        return replace_steps(raw_scores=raw_scores)(c)

    return only_if(lambda c: c.case.chunks and c.spec.rope, change)


def keep_rolled_back(c: Computation) -> Computation:
    """Rows that were rolled back stay among the keys, before those that took their place. Impossible if positions matter."""
    rows = c.case.rolled_back
    if rows is None or c.spec.positional:
        raise Impossible
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
MISTAKES: dict[str, dict[str, Mistake]] = {
    "cache": computing(
        "query i sees the keys j ≤ i, cached or of its call",
        {
            "the cache is not used: each call sees its own rows alone": (
                "query i sees the keys of its call, j ≤ i",
                see(lambda case, i, j: (j <= i) & (j >= _starts(case)[:, None])),
            ),
            "in a call with a cache, the causal mask is aligned at the first key: query i of the call sees the first i + 1 keys": (
                "query i sees the keys j ≤ i - (length of the cache)",
                see(lambda case, i, j: j <= i - _starts(case)[:, None]),
            ),
            "in a call of several rows with a cache, the causal mask is aligned at the first key: query i sees the first i + 1 keys": (
                "query i sees j ≤ i - (length of the cache), a single row all keys",
                see(_aligned_at_first_key_in_chunks),
            ),
            "in a call with a cache, queries see later rows of the call": (
                "query i sees the keys of the cache and of its whole call",
                see(lambda case, i, j: np.where(_starts(case)[:, None] > 0, j < _ends(case)[:, None], j <= i)),
            ),
            "in a call with a cache, also if it is empty, queries see later rows of the call": (
                "query i sees the keys of the cache and of its whole call",
                see(lambda case, i, j: j < _ends(case)[:, None]),
            ),
            "the rows of a call are not seen, but the cache alone": (
                "query i sees the keys of the cache",
                see(lambda case, i, j: j < _starts(case)[:, None]),
            ),
            **{
                f"in {call} with a cache, {size} is taken for the length of the cache in the causal mask": (
                    f"query i of the call sees j ≤ i + {symbol}{others}",
                    see_with_length(length, visible),
                )
                for size, (symbol, length) in LENGTHS.items()
                for call, others, visible in (
                    ("a call", "", _after_length),
                    ("a call of several rows", "; a single row all keys", _after_length_in_chunks),
                )
            },
            **{
                f"{call}{size} is taken for the number of keys in the causal mask": (
                    f"query i of q sees the keys j ≤ i + {symbol} - q{others}",
                    align_by(number, alone=not call),
                )
                for size, (symbol, number) in SIZES.items()
                for call, others in (("", ""), ("in a call of several rows, ", "; a single row all keys"))
            },
            "the cache has the rows of the call before alone": (
                "query i sees the keys j ≤ i of its call and of the one before",
                see(lambda case, i, j: (j <= i) & (j >= _starts_before(case)[:, None])),
            ),
        },
    ),
    "cached rows": computing(
        "K, V = cat(cache, rows of the call)",
        {
            f"the {words} of a call are put before the cache, and not after": (f"{symbol} = cat(rows of the call, cache)", put_first(roles))
            for words, symbol, roles in (
                ("keys and values", "K, V", ("key", "value")),
                ("keys", "K", ("key",)),
                ("values", "V", ("value",)),
            )
        }
        | {
            f"in a call with a cache, the {source} is appended to it in place of the {role}": (
                f"{role[0].upper()} = cat(cache, {source[0].upper()} of the call)",
                cache_rows_of({role: source}),
            )
            for role in ("key", "value")
            for source in ("query", "key", "value")
            if source != role
        }
        | {
            "the cached keys are read as the cached values, too": ("V = cat(cached K, V of the call)", read_cache_of({"value": "key"})),
            "the cached values are read as the cached keys, too": ("K = cat(cached V, K of the call)", read_cache_of({"key": "value"})),
            "the cached keys and values are exchanged": (
                "K = cat(cached V, K), V = cat(cached K, V)",
                read_cache_of({"key": "value", "value": "key"}),
            ),
        },
    ),
    "rolled back": computing(
        "keys: those of the rows that were not rolled back",
        {"rows that were rolled back stay in the cache": ("keys: also those that were rolled back", keep_rolled_back)},
    ),
    "cached positions": computing(
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
