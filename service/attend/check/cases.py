"""The cases a candidate is called on, in order of difficulty.

Each case is made so that one kind of mistake shows. Inputs are scaled until the largest score is near 3, so that the softmax is neither
flat nor one-hot whatever the weights are; a norm of queries and keys makes scores independent of that. Batch, heads, queries, keys and
widths all differ. The last cases are longer than the tiles of a kernel: their numbers of keys are no multiples of a tile.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from attend.attention.reference.forward import Outputs, attend, value_of
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH, Array

POSITIONAL_QUERIES = 31  # where results depend on positions, so that windows and scaled frequencies show
LONG = (65, 130, 257)  # keys of the long cases: one or two more than tiles of 64 and 128 hold
CROSS = 113  # keys of a long cross-attention: tiles of 16, 32 and 64 leave 1, 17 and 49 of them
LARGEST = 1500.0  # score of the cases with large logits
MOST_ALONE = 5  # queries of an item, for what takes one query
ENOUGH_QUERIES = 64  # of which one has a score that is near the largest
CaseKind = Literal["plain", "mask", "causal", "padding", "segments", "numbers"]
Group = Literal["short", "parameters", "long", "lengths", "widths", "groups", "one row"]
T = TypeVar("T")
ALL = np.ones((), bool)  # the mask of a case without one


@dataclass(frozen=True, slots=True)
class Lengths:
    """The batch, the queries, and the keys of cross-attention of the short cases; all numbers of rows are multiples of a tile's."""

    batch: int = 2
    queries: int = 5
    keys: int = 7
    tile: int = 1

    def whole(self, rows: int) -> int:
        """The rows of as many tiles as hold this many."""
        return -(-rows // self.tile) * self.tile


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One call. `mask` is passed to the candidate; `visible` is the reference's mask, which includes the candidate's own causality."""

    name: str
    kind: CaseKind
    query: Array  # [b, q, d_model]
    key: Array  # [b, k, key_dim]
    value: Array  # [b, k, value_dim]
    mask: Array  # [b, q, k], true = may attend
    visible: Array
    segments: Array | None = None  # [b, q], the sequence of each query, if the candidate may get it
    key_segments: Array | None = None  # [b, k], if they are others
    causal: bool = False  # whether the candidate is causal without a mask
    query_offset: int = 0  # the key at which its first query is
    chunks: tuple[int, ...] = ()  # rows of each call, if the sequence is decoded with a cache
    first_row: int = 0  # of a chunk
    positions: Array | None = None  # [b, n], if they do not count the rows
    rolled_back: "CheckCase | None" = None  # rows that are decoded after the first chunk, and then taken back
    group: Group = "short"
    passed: Mapping[str, Any] = field(default_factory=dict)  # further arguments: role of the parameter -> value
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the layer, as these arguments change it
    beside: Array | None = None  # [b, q, k], true = not padded, if padded keys are passed beside the mask
    numbers: Array | None = None  # [b, q, k], which a mask of numbers adds to the scores
    views: bool = False  # whether query, key and value are views with strides of their own
    is_optional: bool = False  # whether a candidate may refuse the call, since none of its parameters promises it
    undefined: bool = False  # whether libraries disagree about what such a call returns, so that no numbers are wrong
    whole: "CheckCase | None" = None  # the call that is made, if only its last queries, which this case has, are compared
    relative: float = 0.0  # an error of the scores, relative to the largest, that rounding explains besides the usual one

    @property
    def is_cross(self) -> bool:
        return len(self.key[0]) != len(self.query[0])

    @property
    def segments_of_keys(self) -> Array:
        """The sequence of each key: that of the query of its row, or the first."""
        if self.key_segments is not None:
            return self.key_segments
        return np.ones(self.key.shape[:2]) if self.segments is None or self.is_cross else self.segments

    @property
    def call(self) -> "CheckCase":
        """What the candidate gets."""
        return self.whole or self

    @property
    def may_raise(self) -> bool:
        """Whether an exception is no disagreement: a candidate may refuse an argument, other keys, or more rows."""
        return self.group != "short" or self.is_cross

    @property
    def parts(self) -> "Iterator[CheckCase]":
        """The calls that decode the sequence, each with the rows of one chunk."""
        ends = np.cumsum(self.chunks)
        for start, stop in zip(ends - self.chunks, ends, strict=True):
            rows: dict[str, Any] = {name: getattr(self, name)[:, start:stop] for name in ("query", "key", "value")}
            rows["mask"] = self.mask[:, start:stop, 0 if self.kind == "padding" else start : stop]  # padding is that of cached keys, too
            yield replace(self, chunks=(), first_row=int(start), rolled_back=None, segments=None, **rows)

    @property
    def exists(self) -> Array:
        """The keys that there are when each query of a decoded sequence is computed, those of its call included: [q, k]."""
        more = self.key.shape[1] - self.query.shape[1]  # rows that were rolled back after the first chunk, and stay
        ends = np.repeat(np.cumsum(self.chunks), self.chunks)
        return np.asarray(np.arange(self.key.shape[1]) < (ends + np.where(ends > self.chunks[0], more, 0))[:, None])

    @property
    def own(self) -> Array:
        """The keys that the candidate's own causality leaves visible, whatever mask is passed: [b, q, k]."""
        return np.tril(np.ones_like(self.mask), self.query_offset) if self.causal else np.ones_like(self.mask)

    @property
    def not_padded(self) -> Array:
        """The keys that are not padded, as a second mask says: [b, q, k]."""
        return np.ones_like(self.mask) if self.beside is None else self.beside

    def seeing(self, *, mask: Array | None = None, own: Array | None = None) -> "CheckCase":
        """The case as a candidate computes it that takes `mask` for the one that is passed, or is causal as `own` says."""
        return replace(self, visible=(self.mask if mask is None else mask) & (self.own if own is None else own) & self.not_padded)

    def with_one_query(self, *, batched: bool) -> "CheckCase":
        """The case with an item for each of its last queries [b * q, 1, d_model]; unless it is batched, with the last query alone."""
        queries, rows = min(len(self.query[0]), MOST_ALONE if batched else 1), dict[str, Any]()
        for name in ("query", "mask", "visible", "numbers", "beside"):
            if (x := getattr(self, name)) is not None:
                rows[name] = x[:, -queries:].reshape(-1, 1, *x.shape[2:])
        rows |= {name: np.repeat(getattr(self, name), queries, axis=0) for name in ("key", "value")}
        return replace(self, whole=None, positions=None, **rows)

    def layer(self, spec: LayerSpec) -> LayerSpec:
        """The layer as the arguments of this call make it."""
        return spec.model_copy(update=self.fields) if self.fields else spec

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the reference."""
        inputs = {"query": self.query, "key": self.key, "value": self.value, "query_offset": self.query_offset}
        return {**inputs, "attend_mask": self.visible, "bias": self.numbers, "positions": self.positions}

    def reference(self, spec: LayerSpec, weights: Mapping[str, Array]) -> Outputs:
        return attend(self.layer(spec), weights, **self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Draws cases for a candidate of this dtype that is always `causal`, or takes only some of the inputs.

    `at_end`: the last query of a causal candidate is at the last key, and not the first at the first. `one_length`: it takes as many keys
    as queries alone. `masks_alone`: the kinds of cases in which a mask takes the place of causality; `masks_per_item`: those whose masks
    may differ among items. Inputs are values of the dtype, stored as float64.
    """

    spec: LayerSpec = field(compare=False)
    weights: Mapping[str, Array] = field(compare=False)
    rng: np.random.Generator = field(compare=False)
    lengths: Lengths = Lengths()
    dtype: str = "float64"
    causal: bool = False
    at_end: bool = False
    one_length: bool = False
    inputs: tuple[str, ...] = ("query", "key", "value")
    masks_alone: tuple[CaseKind, ...] = ()
    masks_per_item: tuple[CaseKind, ...] = ("mask", "padding", "segments", "numbers")

    @property
    def batch(self) -> int:
        return self.lengths.batch

    @property
    def queries(self) -> int:
        return self.lengths.queries

    @property
    def keys_apart(self) -> bool:
        """Whether there may be more or fewer keys than queries, with the same numbers wherever the queries are."""
        return "key" in self.inputs and not (self.spec.positional or self.causal or self.one_length)

    def items(self, kind: CaseKind) -> int:
        """The number of items that have a mask of their own."""
        return self.batch if kind in self.masks_per_item else 1

    def case(
        self, name: str, kind: CaseKind, keys: int, mask: Array = ALL, largest: float = 3.0, queries: int = 0, batch: int = 0, **more: Any
    ) -> CheckCase:
        """A case with this mask, broadcast to [b, q, k], whose largest score is near `largest`. `more`: other fields of the case."""
        spec, rng, queries, batch = self.spec, self.rng, queries or self.queries, batch or self.batch
        same_widths = spec.query_dim == spec.key_dim == spec.value_dim
        query = rng.standard_normal((batch, queries, spec.query_dim))
        # Inputs that are passed apart have numbers of their own, so that one taken for another shows.
        is_query = keys == queries and same_widths and "key" not in self.inputs
        key = query if is_query else rng.standard_normal((batch, keys, spec.key_dim))
        value = key if "value" not in self.inputs else rng.standard_normal((batch, keys, spec.value_dim))
        mask = np.broadcast_to(mask, (batch, queries, keys))
        more = {"causal": self.causal and kind not in self.masks_alone, "query_offset": keys - queries if self.at_end else 0} | more
        case = CheckCase(name, kind, query, key, value, mask, mask, **more)
        return _scaled(case.seeing(), spec, self.weights, self.dtype, largest)

    def mask(self, keys: int) -> Array:
        """A random mask with a key for each row, for a causal candidate too, and a key that no query attends to if there are enough."""
        mask = self.rng.random((self.items("mask"), self.queries, keys)) < 0.5
        mask[:, np.arange(self.queries), np.arange(self.queries)] = True
        mask[:, :, self.queries : self.queries + 1] = False
        return mask

    def padding(self, shorter: int = 0) -> Array:
        """The keys that are not padded, of items of two lengths: [b, 1, k]; `shorter`: by how many keys."""
        lengths = self.queries - 2 - shorter + np.arange(self.items("padding")) % 2
        return np.asarray(np.arange(self.queries) < lengths[:, None, None])

    def segments(self) -> Array:
        """The sequence of each row, of three or two in an item: [b, q]."""
        parts = np.where(np.arange(self.batch) % 2 if "segments" in self.masks_per_item else np.zeros(self.batch, bool), 2, 3)
        return np.asarray(1 + np.arange(self.queries) * parts[:, None] // self.queries)


class Repeatable(Generic[T]):
    """Things that are made when they are first asked for, and kept."""

    def __init__(self, source: Iterable[T]) -> None:
        self.source, self.made = iter(source), list[T]()

    def __iter__(self) -> Iterator[T]:
        yield from self.made
        for x in self.source:
            self.made.append(x)
            yield x


def lengths_for(spec: LayerSpec, *, batched: bool = True, larger: bool = False, like: Lengths | None = None, tile: int = 1) -> Lengths:
    """The lengths of short cases: the usual ones, or those `like` others, as whole tiles of this many rows. `larger`: one item and one
    query more, which tells a size from a constant. The layer may have a fixed number of rows."""
    lengths = like or Lengths()
    queries = (POSITIONAL_QUERIES + (0 if like is None else 6) if spec.positional else lengths.queries) + larger
    queries = next((extent.stop for extent in spec.extents if not extent.negative), queries)
    of_tiles = Lengths(lengths.batch + larger if batched else 1, queries, lengths.keys, tile)
    return of_tiles if tile == 1 else replace(of_tiles, queries=of_tiles.whole(queries), keys=of_tiles.whole(queries) + tile)


def draw_short_cases(draw: Draw, *, decodes: bool = False, takes_back: bool = True, packs_keys: bool = False) -> Iterator[CheckCase]:
    """The cases in order of difficulty. `decodes`: the candidate has a cache, from which a caller `takes_back` rows. `packs_keys`: packed
    keys have lengths of their own."""
    spec, queries, keys = draw.spec, draw.queries, draw.lengths.keys
    yield draw.case("no mask", "plain", queries)
    if decodes:
        whole = draw.case("decoding row by row", "plain", queries)
        yield replace(whole, chunks=(1,) * queries)
        yield replace(whole, name="decoding in chunks", chunks=(2, 1, queries - 3))
        taken_back = replace(draw.case("rows that are rolled back", "plain", 2, queries=2), first_row=1)
        # Chunks of several rows after 1 and after 3 show a length of the cache that is always the same.
        name = "decoding with roll-back" if takes_back else "decoding in other chunks"
        yield replace(whole, name=name, chunks=(1, 2, queries - 3), rolled_back=taken_back if takes_back else None)
    yield draw.case("mask", "mask", queries, draw.mask(queries))
    yield draw.case("causal mask", "causal", queries, np.tri(queries, dtype=bool))
    if not spec.positional:  # the positions of queries are open if q != k
        yield draw.case("cross-attention", "plain", keys)
        if not draw.one_length:
            yield draw.case("cross-attention with a mask", "mask", keys, draw.mask(keys))
    padded = draw.case("padded keys", "padding", queries, draw.padding())
    if not padded.reference(spec, draw.weights).fully_masked_rows:  # as in a narrow window
        yield padded
    if not (spec.normalises_heads or spec.softcap):  # these bound the scores
        yield draw.case("large logits", "plain", queries, largest=LARGEST)
    if draw.dtype in ("bfloat16", "float16"):  # rounding then hides less of what is wrong with scores
        yield draw.case("larger scores", "plain", queries, largest=30.0)
    if spec.normalizer != "sigmoid":  # sigmoid weights depend on the length of a segment, but not on a mask
        segments = draw.segments()
        packed = draw.case("packed sequences", "segments", queries, segments[:, :, None] == segments[:, None, :])
        yield replace(packed, segments=segments)
        if packs_keys and not spec.positional:
            own = np.minimum(1 + np.arange(keys) // 2, segments[:, -1:])
            packed = draw.case("packed sequences with other lengths of keys", "segments", keys, segments[:, :, None] == own[:, None, :])
            yield replace(packed, segments=segments, key_segments=own)


def draw_one_row(draw: Draw) -> Iterator[CheckCase]:
    """A case of one row, in which most mistakes change nothing; none for a layer whose number of rows is fixed."""
    if all(extent.negative for extent in draw.spec.extents):
        yield draw.case("one row", "plain", 1, queries=1, group="one row")


def draw_long_cases(draw: Draw, *, decodes: bool = False) -> Iterator[CheckCase]:
    """Cases of one item that have more keys than a tile. None for a layer whose number of rows is fixed."""
    if any(not extent.negative for extent in draw.spec.extents):
        return
    lengths = [draw.lengths.whole(keys) for keys in LONG]
    for keys in lengths:
        yield draw.case(f"{keys} keys", "plain", keys, queries=keys, batch=1, group="long")
    if not (draw.spec.positional or draw.one_length):
        keys = draw.lengths.whole(CROSS)
        yield draw.case(f"{keys} keys, cross-attention", "plain", keys, batch=1, group="long")
    _, middle, longest = lengths
    if not draw.causal:
        yield draw.case(f"{middle} keys, causal", "causal", middle, np.tri(middle, dtype=bool), queries=middle, batch=1, group="long")
    padded = np.arange(longest) < longest - 60  # the last tiles have no key, or few
    yield draw.case(f"{longest} keys, padded", "padding", longest, padded, queries=longest, batch=1, group="long")
    if draw.spec.normalizer != "sigmoid":
        segments = 1 + np.searchsorted((longest // 2 - 9, longest - 61), np.arange(longest), side="right")[None]
        same = segments[:, :, None] == segments[:, None]
        packed = draw.case(f"{longest} keys, packed", "segments", longest, same, queries=longest, batch=1, group="long")
        yield replace(packed, segments=segments)
    if decodes:
        rows = draw.lengths.whole(LONG[2] + 2)  # a cache of 256 rows or fewer grows before the last ones
        whole = draw.case(f"decoding {rows} rows", "plain", rows, queries=rows, batch=1, group="long")
        yield replace(whole, chunks=(*[1] * 33, 32, 1, rows - 70, 1, 1, 1, 1))


def _scaled(case: CheckCase, spec: LayerSpec, weights: Mapping[str, Array], dtype: str, largest: float) -> CheckCase:
    """The case with its inputs multiplied by one number, so that its highest score is within a factor 2 of `largest`, if it can be."""
    highest = _highest_score(case, spec, weights)
    for _ in range(64):
        if largest / 2 <= highest <= largest * 2:
            break
        ratio = largest / highest if 0 < highest < math.inf else 2.0
        powers = max(1, math.ceil(abs(math.log2(ratio)) - 1))
        factor = 2 ** (powers / 2 if highest < largest else -powers / 2)  # scores are products of two inputs
        scaled = replace(case, query=case.query * factor, key=case.key * factor, value=case.value * factor)
        before, highest = highest, _highest_score(scaled, spec, weights)
        if abs(highest - before) < 0.1 * abs(before):  # a norm or a softcap bounds the scores
            break
        case = scaled
    query, key, value = (x.astype(BY_TORCH[dtype].numpy).astype(np.float64) for x in (case.query, case.key, case.value))
    return replace(case, query=query, key=key, value=value)


def _highest_score(case: CheckCase, spec: LayerSpec, weights: Mapping[str, Array]) -> float:
    """That of the first queries."""
    rows: dict[str, Any] = {"query": case.query, "attend_mask": case.visible, "bias": case.numbers}
    few = {name: None if x is None else x[:, :ENOUGH_QUERIES] for name, x in rows.items()}
    return float(value_of("scores", case.layer(spec), weights, **case.arguments | few).max())
