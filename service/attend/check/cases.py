"""The cases a candidate is called on, in order of difficulty.

Each case is made so that one kind of mistake shows. Inputs are scaled until the largest score is near 3, so that the softmax is neither
flat nor one-hot whatever the weights are; a norm of queries and keys makes scores independent of that. Batch, heads, queries, keys and
widths all differ.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from attend.attention.reference.forward import Outputs, attend
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH, Array

BATCH, QUERIES, KEYS = 2, 5, 7
POSITIONAL_QUERIES = 31  # where results depend on positions, so that windows and scaled frequencies show
CaseKind = Literal["plain", "mask", "causal", "padding", "segments"]


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
    causal: bool = False  # whether the candidate is causal without a mask
    query_offset: int = 0  # the key at which its first query is
    chunks: tuple[int, ...] = ()  # rows of each call, if the sequence is decoded with a cache
    first_row: int = 0  # of a chunk
    rolled_back: "CheckCase | None" = None  # rows that are decoded after the first chunk, and then taken back

    @property
    def is_cross(self) -> bool:
        return len(self.key[0]) != len(self.query[0])

    @property
    def parts(self) -> "Iterator[CheckCase]":
        """The calls that decode the sequence, each with the rows of one chunk."""
        ends = np.cumsum(self.chunks)
        for start, stop in zip(ends - self.chunks, ends, strict=True):
            rows: dict[str, Any] = {name: getattr(self, name)[:, start:stop] for name in ("query", "key", "value")}
            rows["mask"] = self.mask[:, start:stop, start:stop]
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

    def with_mask(self, mask: Array) -> "CheckCase":
        """The case as a candidate computes it that takes `mask` for the one that is passed."""
        return replace(self, visible=mask & self.own)

    def reference(self, spec: LayerSpec, weights: Mapping[str, Array]) -> Outputs:
        return attend(spec, weights, query=self.query, key=self.key, value=self.value, attend_mask=self.visible)


def draw_check_cases(
    spec: LayerSpec,
    weights: Mapping[str, Array],
    seed: int,
    *,
    dtype: str = "float64",
    batched: bool = True,
    causal: bool = False,
    at_end: bool = False,
    decodes: bool = False,
    inputs: Collection[str] = ("query", "key", "value"),
    masks_per_item: Collection[CaseKind] = ("mask", "padding", "segments"),
    partial: bool = False,
    larger: bool = False,
) -> Iterator[CheckCase]:
    """The cases in order of difficulty, for a candidate of this dtype that is always `causal`, or takes only some of the inputs.

    `decodes`: it has a cache. `at_end`: the last query of a causal candidate is at the last key, and not the first at the first.
    `partial`: other cases, on which most mistakes change nothing, and which so tell what a wrong candidate does right. `larger`: one item
    and one query more, which tells a size from a constant.

    Inputs are values of the dtype, stored as float64. `masks_per_item`: the kinds of cases whose masks may differ among items.
    """
    rng = np.random.default_rng(seed)
    batch = BATCH + larger if batched else 1
    queries = (POSITIONAL_QUERIES if spec.positional else QUERIES) + larger
    queries = next((extent.stop for extent in spec.extents if not extent.negative), queries)
    same_widths = spec.query_dim == spec.key_dim == spec.value_dim

    def draw(name: str, kind: CaseKind, keys: int, mask: Array, largest: float = 3.0, queries: int = queries) -> CheckCase:
        query = rng.standard_normal((batch, queries, spec.query_dim))
        # Inputs that are passed apart have numbers of their own, so that one taken for another shows.
        key = query if keys == queries and same_widths and "key" not in inputs else rng.standard_normal((batch, keys, spec.key_dim))
        value = key if "value" not in inputs else rng.standard_normal((batch, keys, spec.value_dim))
        mask = np.broadcast_to(mask, (batch, queries, keys))
        case = CheckCase(name, kind, query, key, value, mask, mask, causal=causal, query_offset=keys - queries if at_end else 0)
        return _scaled(case.with_mask(mask), spec, weights, dtype, largest)

    def draw_mask(keys: int) -> Array:
        mask = rng.random((batch if "mask" in masks_per_item else 1, queries, keys)) < 0.5
        mask[:, np.arange(queries), np.arange(queries)] = True  # each row has a key, for a causal candidate too
        mask[:, :, queries : queries + 1] = False  # a key that no query attends to
        return mask

    everything = np.ones((), bool)
    if partial:
        if all(extent.negative for extent in spec.extents):  # else the number of rows is fixed
            yield draw("one row", "plain", 1, everything, queries=1)
            yield draw("three rows", "plain", 3, everything, queries=3)
            if spec.rope and "key" not in inputs:  # the row that is not 0 is at no distance from itself: no angle matters
                case = draw("a row of zeros", "plain", 2, everything, queries=2)
                rows = case.query * np.arange(2)[:, None]
                yield replace(case, query=rows, key=rows, value=rows)
        yield draw("small scores", "plain", queries, everything, largest=0.3)
        if {"key", "value"} <= set(inputs):
            case = draw("equal keys", "plain", queries, everything)
            yield replace(case, key=np.repeat(case.key[:, :1], queries, axis=1))
        elif "key" not in inputs and not spec.positional:
            case = draw("equal rows", "plain", queries, everything)
            rows = np.repeat(case.query[:, :1], queries, axis=1)
            yield replace(case, query=rows, key=rows, value=rows)
        return
    lengths = queries - 2 + np.arange(batch if "padding" in masks_per_item else 1) % 2
    yield draw("no mask", "plain", queries, everything)
    if decodes:
        whole = draw("decoding row by row", "plain", queries, everything)
        yield replace(whole, chunks=(1,) * queries)
        yield replace(whole, name="decoding in chunks", chunks=(2, 1, queries - 3))
        taken_back = replace(draw("rows that are rolled back", "plain", 2, everything, queries=2), first_row=1)
        # Chunks of several rows after 1 and after 3 show a length of the cache that is always the same.
        yield replace(whole, name="decoding with roll-back", chunks=(1, 2, queries - 3), rolled_back=taken_back)
    yield draw("mask", "mask", queries, draw_mask(queries))
    yield draw("causal mask", "causal", queries, np.tri(queries, dtype=bool))
    if not spec.positional:  # the positions of queries are open if q != k
        yield draw("cross-attention", "plain", KEYS, everything)
        yield draw("cross-attention with a mask", "mask", KEYS, draw_mask(KEYS))
    padded = draw("padded keys", "padding", queries, np.arange(queries) < lengths[:, None, None])
    if not padded.reference(spec, weights).fully_masked_rows:  # as in a narrow window
        yield padded
    if not (spec.normalises_heads or spec.softcap):  # these bound the scores
        yield draw("large logits", "plain", queries, everything, largest=1500.0)
    if spec.normalizer != "sigmoid":  # sigmoid weights depend on the length of a segment, but not on a mask
        segments = np.stack([1 + np.arange(queries) * parts // queries for parts in (3, 2)])
        segments = segments[np.arange(batch) % 2 if "segments" in masks_per_item else np.zeros(batch, int)]
        packed = draw("packed sequences", "segments", queries, segments[:, :, None] == segments[:, None, :])
        yield replace(packed, segments=segments)


def _scaled(case: CheckCase, spec: LayerSpec, weights: Mapping[str, Array], dtype: str, largest: float) -> CheckCase:
    """The case with its inputs multiplied by one number, so that its highest score is within a factor 2 of `largest`, if it can be."""
    highest = float(case.reference(spec, weights).scores.max())
    for _ in range(64):
        if largest / 2 <= highest <= largest * 2:
            break
        factor = 2**0.5 if highest < largest else 0.5**0.5  # scores are products of two inputs
        scaled = replace(case, query=case.query * factor, key=case.key * factor, value=case.value * factor)
        before, highest = highest, float(scaled.reference(spec, weights).scores.max())
        if abs(highest - before) < 0.1 * abs(before):  # a norm or a softcap bounds the scores
            break
        case = scaled
    query, key, value = (x.astype(BY_TORCH[dtype].numpy).astype(np.float64) for x in (case.query, case.key, case.value))
    return replace(case, query=query, key=key, value=value)
