"""The cases a candidate is called on, in order of difficulty, and what the reference computes for them, with tolerances.

Each case is made so that one kind of mistake shows. Inputs are scaled until the largest score is near 3, so that the softmax is neither
flat nor one-hot whatever the weights are; a norm of queries and keys makes scores independent of that. Batch, heads, queries, keys and
widths all differ. docs/check.md explains the tolerances.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from service.attention.reference.forward import Layer, Outputs, attend
from service.attention.reference.request import Request
from service.spec import LayerSpec
from service.tensors import BY_TORCH, Array

BATCH, QUERIES, KEYS = 2, 5, 7
POSITIONAL_QUERIES = 31  # where results depend on positions, so that windows and scaled frequencies show
CaseKind = Literal["plain", "mask", "causal", "padding", "segments"]
# In multiples of the distance of 1 to the next number of the dtype.
RELATIVE = {"float64": 16 * 2.0**-52, "float32": 16 * 2.0**-23, "float16": 5 * 2.0**-10, "bfloat16": 2.5 * 2.0**-7}
MAGNIFIED = RELATIVE | {"float64": 80 * 2.0**-52, "float32": 80 * 2.0**-23}


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
    segments: Array | None = None  # [b, n], of packed sequences: the mask is between rows of equal numbers

    @property
    def is_cross(self) -> bool:
        return len(self.key[0]) != len(self.query[0])

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
    value_is_key: bool = False,
    masks_per_item: Collection[CaseKind] = ("mask", "padding", "segments"),
) -> Iterator[CheckCase]:
    """The cases in order of difficulty, for a candidate of this dtype that is always `causal`, or takes no value (`value_is_key`).

    Inputs are values of the dtype, stored as float64. `masks_per_item`: the kinds of cases whose masks may differ among items.
    """
    rng = np.random.default_rng(seed)
    batch = BATCH if batched else 1
    queries = spec.grid_bias.num_tokens if spec.grid_bias else POSITIONAL_QUERIES if spec.positional else QUERIES
    same_widths = spec.query_dim == spec.key_dim == spec.value_dim

    def draw(name: str, kind: CaseKind, keys: int, mask: Array, largest: float = 3.0) -> CheckCase:
        query = rng.standard_normal((batch, queries, spec.query_dim))
        key = query if keys == queries and same_widths else rng.standard_normal((batch, keys, spec.key_dim))
        value = key if key is query or value_is_key else rng.standard_normal((batch, keys, spec.value_dim))
        mask = np.broadcast_to(mask, (batch, queries, keys))
        visible = mask & np.tri(queries, keys, dtype=bool) if causal else mask
        return _scaled(CheckCase(name, kind, query, key, value, mask, visible), spec, weights, dtype, largest)

    def draw_mask(keys: int) -> Array:
        mask = rng.random((batch if "mask" in masks_per_item else 1, queries, keys)) < 0.5
        mask[:, np.arange(queries), np.arange(queries)] = True  # each row has a key, for a causal candidate too
        return mask

    everything = np.ones((), bool)
    lengths = np.array([queries - 2, queries - 1][: batch if "padding" in masks_per_item else 1])
    yield draw("no mask", "plain", queries, everything)
    yield draw("mask", "mask", queries, draw_mask(queries))
    yield draw("causal mask", "causal", queries, np.tri(queries, dtype=bool))
    if not spec.positional:  # the positions of queries are open if q != k
        yield draw("cross-attention", "plain", KEYS, everything)
        yield draw("cross-attention with a mask", "mask", KEYS, draw_mask(KEYS))
    padded = draw("padded keys", "padding", queries, np.arange(queries) < lengths[:, None, None])
    if not padded.reference(spec, weights).fully_masked_rows:  # as in a narrow window
        yield padded
    if not (spec.qk_norm or spec.softcap):  # these bound the scores
        yield draw("large logits", "plain", queries, everything, largest=1500.0)
    if spec.normalizer != "sigmoid":  # sigmoid weights depend on the length of a segment, but not on a mask
        segments = np.stack([1 + np.arange(queries) * parts // queries for parts in (3, 2)])
        segments = segments[np.arange(batch) if "segments" in masks_per_item else np.zeros(batch, int)]
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


@dataclass(frozen=True, slots=True)
class Expected:
    """The output and the weights of a computation, and how far a candidate's may be from them."""

    outputs: Mapping[str, Array]
    tolerances: Mapping[str, float]
    rows: Array  # [b, q], those that have a key: libraries differ in the others

    def agrees(self, name: str, got: Array) -> bool:
        """Whether an output of a candidate has these numbers, in rows that have a key."""
        expected = self.outputs[name]
        if got.shape != expected.shape:
            return False
        if not self.rows.all():  # [b, q, d], or [b, h, q, k] -> [b, q, h, k]
            got, expected = (np.moveaxis(x, -2, 1)[self.rows] for x in (got, expected))
        return np.allclose(got, expected, rtol=0, atol=self.tolerances[name], equal_nan=True)


@dataclass(frozen=True, slots=True)
class Computation:
    """A call of the reference."""

    spec: LayerSpec
    weights: Mapping[str, Array]
    case: CheckCase
    dtype: str = "float64"  # of the candidate: it decides where exp overflows, and the tolerance
    tolerance: float | None = None  # relative; None: by dtype
    average_weights: bool = False  # whether the weights are averaged over the heads
    added: Array | None = None  # [b, q, k], added to the scores
    layer: type[Layer] = Layer  # a subclass replaces steps
    residual: bool = False
    returned: str = "attention_weights"  # which output is compared with the weights

    @np.errstate(all="ignore")
    def run(self) -> Expected:
        """ValueError: shapes for which a change is impossible."""
        case = self.case
        mask = None if case.visible.all() else case.visible
        request = Request(query=case.query, key=case.key, value=case.value, attend_mask=mask, bias=self.added)
        result = self.layer(self.spec, self.weights).attend(request)
        weights = getattr(result, self.returned)
        outputs = {
            "output": result.output + case.query if self.residual else result.output,
            "attention_weights": weights.mean(axis=1) if self.average_weights else weights,
        }
        rows = np.ones(case.query.shape[:2], bool) if mask is None else np.logical_not(result.fully_masked.any(axis=1))
        norm, relative = self.spec.qk_norm is not None, self.tolerance
        tolerances = {name: tolerance(x, self.dtype, result.scores, norm=norm, relative=relative) for name, x in outputs.items()}
        return Expected(outputs, tolerances, rows)


def tolerance(
    expected: Array, dtype: str, scores: Array | float, *, norm: bool = False, relative: float | None = None, logarithmic: bool = False
) -> float:
    """r · max(1, max|scores|) · max|x|, without the last factor for outputs that are `logarithmic` in the weights.

    An error of e in a score is a relative error of e in its weight, and scores of size s are rounded by s · r. r is `relative`, or by
    dtype; larger after a `norm` of queries and keys, which may divide by little, and for logarithmic outputs, which may contain biases that
    are larger than the scores.
    """
    by_dtype = MAGNIFIED if norm or logarithmic else RELATIVE
    unit = by_dtype.get(dtype, RELATIVE["float64"]) if relative is None else relative
    return max(unit * max(1.0, _largest(scores)) * (1.0 if logarithmic else _largest(expected)), 1e-30)


def _largest(x: Array | float) -> float:
    """max|x| of the finite numbers, 0 if there are none."""
    return float(np.abs(x, where=np.isfinite(x), out=np.zeros(np.shape(x))).max(initial=0.0))
