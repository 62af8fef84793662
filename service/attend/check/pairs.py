"""Words for a set of pairs of a query and a key, such as those that get no weight: the relations that hold for exactly these pairs."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from attend.check.cases import CheckCase
from attend.tensors import Array

TILES = (16, 32, 64, 128)  # usual numbers of keys that a kernel reads at once
MOST_LISTED = 3  # pairs, keys or heads that are listed
Relations = Callable[[Array, Array, CheckCase], Iterator[tuple[str, Array]]]


def descriptions(pairs: Array, among: Array, case: CheckCase) -> Iterator[str]:
    """Words for `pairs` [b, h, q, k], from the simplest on; each is true of all of them and of no others `among` these.

    What guesses at the size of a tile comes last, after the pairs themselves: one case alone does not show it.
    """
    pairs = pairs & among
    if pairs.any():
        yield from _that_hold(_relations, pairs, among, case)
        yield first_of(pairs)
        yield from _that_hold(_tiles, pairs, among, case)


def _that_hold(relations: Relations, pairs: Array, among: Array, case: CheckCase) -> Iterator[str]:
    """Words for the relations that hold for exactly these pairs, or do in the items, heads and queries that have some."""
    for where, chosen in _places(pairs, among):
        found = [(words, np.broadcast_to(relation, pairs.shape) & chosen) for words, relation in relations(pairs, among & chosen, case)]
        held = [(words, np.array_equal(relation, pairs)) for words, relation in found if np.array_equal(relation & among, pairs)]
        # What also excludes the keys of which nothing is asked comes first: "keys i + 1 to i + 2" before "keys up to i + 2".
        yield from (words + where for words, _ in sorted(held, key=lambda x: x[0] != "all keys" and not x[1]))


def listed(numbers: Sequence[int], name: str) -> str:
    """Numbers of things: "key 3", "keys 3 to 5", "keys 0, 2, 5 and 8 others"."""
    first, last = min(numbers), max(numbers)
    if len(numbers) == 1:
        return f"{name} {first}"
    several = f"{'queries' if name == 'query' else name + 's'} "
    if len(numbers) == last - first + 1:
        return f"{several}{first} to {last}"
    shown, more = [str(x) for x in sorted(numbers)], len(numbers) - MOST_LISTED
    if more <= 1:
        return f"{several}{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{several}{', '.join(shown[:MOST_LISTED])} and {more} others"


def first_of(pairs: Array) -> str:
    """How many pairs of [b, h, q, k] there are, and the first."""
    found = np.argwhere(pairs)
    shown = (f"item {b}, head {h}, query {i}, key {j}" for b, h, i, j in found[:MOST_LISTED])
    return f"{len(found)} pair{'s' * (len(found) > 1)} of a query and a key (the first: {'; '.join(shown)})"


def _places(pairs: Array, among: Array) -> Iterator[tuple[str, Array]]:
    """Where pairs are, in words, and as a mask: everywhere, or in the items, heads and queries that have some."""
    yield "", np.ones((1, 1, 1, 1), bool)
    names, words, chosen = ("item", "head", "query"), [], np.ones((1, 1, 1, 1), bool)
    for axis in (1, 0, 2):
        others = tuple(x for x in range(4) if x != axis)
        has, may = (np.asarray(x.any(axis=others)) for x in (pairs, among & chosen))
        if has.any() and not has[may].all():
            words.append(listed(np.flatnonzero(has).tolist(), names[axis]))
            chosen = chosen & has.reshape([-1 if x == axis else 1 for x in range(4)])
            yield f" in {', '.join(words)}", chosen


def _relations(pairs: Array, among: Array, case: CheckCase) -> Iterator[tuple[str, Array]]:
    """Relations that may hold, with their words: [b, h, q, k], broadcast."""
    n, rows = pairs.shape[3], pairs.shape[2]
    i, j = np.arange(rows)[:, None], np.arange(n)[None]
    yield "all keys", np.ones((1, 1), bool)
    yield from _of_sequences(case)
    if case.chunks:
        yield from _of_calls(pairs, case)
    if n > rows:
        yield "the keys after as many as there are queries", j >= rows
    yield from _of_columns(*(np.asarray(x.any(axis=(0, 1, 2))) for x in (pairs, among)))
    for offset, aligned in ((case.query_offset, ""), (n - rows, " (the last query is at the last key)")):
        yield from _of_places(j - i - offset, np.asarray(pairs.any(axis=(0, 1))), aligned)
    visible = case.visible
    last = n - 1 - np.argmax(visible[..., ::-1], axis=-1)[..., None]
    yield "the last key that each query may attend to", (j == last)[:, None]
    yield "the key after the last one that each query may attend to", (j == last + 1)[:, None]
    yield "the first key that each query may attend to", (j == np.argmax(visible, axis=-1)[..., None])[:, None]


def _tiles(pairs: Array, among: Array, case: CheckCase) -> Iterator[tuple[str, Array]]:
    """The same with the size of a tile of keys."""
    n, rows = pairs.shape[3], pairs.shape[2]
    i, j = np.arange(rows)[:, None], np.arange(n)[None]
    first = int(pairs.any(axis=(0, 1, 2)).argmax())
    sizes = (size for size in range(n - first + 1, first + 1) if first % size == 0)
    yield from ((f"the keys after the last whole tile of {tile}", j >= n // tile * tile) for tile in (*TILES[::-1], *sizes))
    for tile in TILES:
        if n > tile:
            at = first // tile
            yield f"the keys {at * tile} to {(at + 1) * tile - 1}, which are tile {at} of {tile},", j // tile == at
    for tile in TILES:
        for offset, aligned in ((case.query_offset, ""), (n - rows, " (the last query is at the last key)")):
            own = (i + offset) // tile == j // tile
            yield f"the later keys of each query's own block of {tile}{aligned}", own & (j > i + offset)
            yield f"the keys of each query's own block of {tile}{aligned}", own


def _of_sequences(case: CheckCase) -> Iterator[tuple[str, Array]]:
    """Relations of packed sequences."""
    if case.segments is None or case.kind != "segments":
        return
    own, of_key = case.segments[:, None, :, None], case.segments_of_keys[:, None, None]
    yield "the keys of other sequences", of_key != own
    yield "the keys of earlier sequences", of_key < own
    yield "the keys of later sequences", of_key > own
    yield "the keys of the query's own sequence", of_key == own
    yield "the keys of the first of the packed sequences", of_key == of_key.min(axis=3, keepdims=True)
    yield "the keys of the last of the packed sequences", of_key == of_key.max(axis=3, keepdims=True)


def _of_calls(pairs: Array, case: CheckCase) -> Iterator[tuple[str, Array]]:
    """Relations of rows that are decoded in several calls."""
    i, j = np.arange(pairs.shape[2])[:, None], np.arange(pairs.shape[3])[None]
    ends = np.repeat(np.cumsum(case.chunks), case.chunks)[:, None]
    starts = ends - np.repeat(case.chunks, case.chunks)[:, None]
    yield "the keys of earlier calls, which are in the cache,", j < starts
    yield "the keys of the same call", j >= starts
    yield "the later keys of the same call", (j > i) & (j < ends)
    newest = int(np.min(ends - j, where=pairs.any(axis=(0, 1)), initial=len(i))) - 1
    yield f"the keys older than the newest {newest} of the cache, which includes those of the call,", j < ends - newest


def _of_columns(has: Array, may: Array) -> Iterator[tuple[str, Array]]:
    """Relations of keys alone; `has`: the keys in the pairs, `may`: those of which it is known."""
    n, chosen = len(has), np.flatnonzero(has)
    if not len(chosen):
        return
    first, last, others = chosen[0], chosen[-1], np.flatnonzero(may & ~has)
    begins = int(others[others < first].max(initial=-1)) + 1, int(first)  # whatever is between is not known
    ends = int(last), int(others[others > last].min(initial=n)) - 1
    keys, is_range = np.arange(n), not ((others > first) & (others < last)).any()
    if is_range and begins[0] == 0 and len(chosen) == 1:
        yield "the first key", keys == 0
    if is_range and ends[1] == n - 1 and len(chosen) == 1:
        yield "the last key", keys == n - 1
    for count in range(2, MOST_LISTED + 1):
        if is_range and len(chosen) == count < n and ends[0] == n - 1:
            yield f"the last {count} keys", keys >= n - count
        if is_range and len(chosen) == count < n and first == 0:
            yield f"the first {count} keys", keys < count
    if is_range and ends[0] == n - 1 and first == begins[0]:
        yield "the second half of the keys", keys >= n // 2
        yield "the second half of the keys", keys >= -(-n // 2)
    if is_range and first == 0 and ends[0] == ends[1]:
        yield "the first half of the keys", keys < n // 2
        yield "the first half of the keys", keys < -(-n // 2)
    for size, words in ((2, "every second key"), (3, "every third key"), (4, "every fourth key")):
        if len(chosen) > 2:
            yield f"{words}, from key {first % size} on", keys % size == first % size
    if is_range and ends[1] == n - 1 and begins[0] > 0:
        yield f"the keys from {begins[1]} on", keys >= begins[1]
    if is_range and begins[0] == 0 and ends[1] < n - 1:
        yield f"the keys before {ends[0] + 1}", keys <= ends[0]
    yield listed(chosen.tolist(), "key"), has


def _of_places(distance: Array, has: Array, aligned: str) -> Iterator[tuple[str, Array]]:
    """Relations of the places of query and key: `distance` is that of the key after the query, and `has` the pairs [q, k]."""
    first, last = int(distance.min(where=has, initial=distance.max())), int(distance.max(where=has, initial=distance.min()))
    begin, end = (f"i {'-' if x < 0 else '+'} {abs(x)}" if x else "i" for x in (first, last))
    alone = {0: "each query's own key", -1: "the key before each query's own", 1: "the key after each query's own"}
    later = {0: "each query's own key and those after it", 1: "the keys after each query's own"}
    earlier = {0: "each query's own key and those before it", -1: "the keys before each query's own"}
    if first == last:
        yield alone.get(first, f"key {begin} of each query i") + aligned, distance == first
    yield later.get(first, f"the keys from {begin} on of each query i") + aligned, distance >= first
    yield earlier.get(last, f"the keys up to {end} of each query i") + aligned, distance <= last
    yield f"all keys but each query's own{aligned}", distance != 0
    yield f"the keys {begin} to {end} of each query i{aligned}", (distance >= first) & (distance <= last)


def shortened(words: Sequence[str], most: int = MOST_LISTED) -> str:
    """The first of these, and the number of the others."""
    others = len(words) - most
    return ", ".join(words[:most]) + (f", and {others} other{'s' * (others > 1)}" if others > 0 else "")


def key_in_words(j: int, n: int) -> str:
    """Words for key j of n."""
    return "the last key" if j == n - 1 else "the first key" if j == 0 else f"key {j}"


def verb_after(words: str) -> str:
    """The verb after words for one or several keys."""
    one = words.startswith(("the last key", "the first key", "the key ", "key ", "every ", "each query's own key", "1 pair "))
    return "is" if one and "own key and" not in words else "are"
