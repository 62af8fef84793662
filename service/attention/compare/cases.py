"""What a target is asked: a few calls of rising difficulty, each made so that one kind of mistake cannot hide in it.

It knows the reference, to measure the scores, and not the target. Inputs are scaled until the largest score is near 3, so that the softmax
is neither flat nor a spike whatever the weights are; batch, heads, queries, keys and widths all differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from service.attention.reference.forward import Reference, attend
from service.spec import LayerSpec
from service.tensors import BY_TORCH, Array

BATCH, QUERIES, KEYS = 2, 5, 7


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One call. The reference sees `seen`, the target is told `told`: they differ for a target that is causal by itself."""

    name: str
    kind: Literal["plain", "mask", "causal", "padding"]
    query: Array  # [b, q, d_model]
    key: Array  # [b, k, key_dim]
    value: Array  # [b, k, value_dim]
    told: Array  # [b, q, k], true = may attend
    seen: Array

    @property
    def is_cross(self) -> bool:
        return len(self.key[0]) != len(self.query[0])

    def answer(self, spec: LayerSpec, weights: Mapping[str, Array]) -> Reference:
        return attend(spec, weights, query=self.query, key=self.key, value=self.value, attend_mask=self.seen)


@dataclass(frozen=True, slots=True)
class Frame:
    """What the trials have to respect in a target."""

    dtype: str
    batched: bool
    causal: bool
    one_source: bool  # value is key
    per_item_mask: bool
    per_item_padding: bool


def draw_check_cases(spec: LayerSpec, weights: Mapping[str, Array], frame: Frame, seed: int) -> Iterator[CheckCase]:
    """The trials in order of difficulty. Inputs are values of the target's dtype, held in float64."""
    rng = np.random.default_rng(seed)
    batch = BATCH if frame.batched else 1
    one_input = spec.d_model == spec.key_dim == spec.value_dim

    def draw(name: str, kind: Literal["plain", "mask", "causal", "padding"], keys: int, told: Array) -> CheckCase:
        query = rng.standard_normal((batch, QUERIES, spec.d_model))
        key = query if keys == QUERIES and one_input else rng.standard_normal((batch, keys, spec.key_dim))
        value = key if key is query or frame.one_source else rng.standard_normal((batch, keys, spec.value_dim))
        told = np.broadcast_to(told, (batch, QUERIES, keys))
        seen = told & np.tri(QUERIES, keys, dtype=bool) if frame.causal else told
        return _scaled(CheckCase(name, kind, query, key, value, told, seen), spec, weights, frame.dtype, largest=3.0)

    def draw_mask(keys: int) -> Array:
        mask = rng.random((batch if frame.per_item_mask else 1, QUERIES, keys)) < 0.5
        mask[:, np.arange(QUERIES), np.arange(QUERIES)] = True  # so that every row has a key, even of a causal target
        return mask

    everything = np.ones((), bool)
    lengths = np.array([QUERIES - 2, QUERIES - 1][: batch if frame.per_item_padding else 1])
    yield draw("no mask", "plain", QUERIES, everything)
    yield draw("mask", "mask", QUERIES, draw_mask(QUERIES))
    yield draw("causal mask", "causal", QUERIES, np.tri(QUERIES, dtype=bool))
    yield draw("cross-attention", "plain", KEYS, everything)
    yield draw("cross-attention with a mask", "mask", KEYS, draw_mask(KEYS))
    yield draw("padded keys", "padding", QUERIES, np.arange(QUERIES) < lengths[:, None, None])
    yield _scaled(draw("large logits", "plain", QUERIES, everything), spec, weights, frame.dtype, largest=1500.0)


def _scaled(case: CheckCase, spec: LayerSpec, weights: Mapping[str, Array], dtype: str, largest: float) -> CheckCase:
    """The trial with its inputs multiplied by one number, so that its highest score is within a factor 2 of `largest`."""
    for _ in range(64):
        highest = float(case.answer(spec, weights).scores.max())
        if largest / 2 <= highest <= largest * 2:
            break
        factor = 2**0.5 if highest < largest else 0.5**0.5  # scores are products of two inputs
        case = replace(case, query=case.query * factor, key=case.key * factor, value=case.value * factor)
    query, key, value = (x.astype(BY_TORCH[dtype].numpy).astype(np.float64) for x in (case.query, case.key, case.value))
    return replace(case, query=query, key=key, value=value)
