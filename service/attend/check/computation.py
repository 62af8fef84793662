"""What the reference, or the reference with mistakes in it, computes for a case, with tolerances, which docs/check.md explains."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attend.attention.dataflow import constants, needed
from attend.attention.program import program_of
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.attention.reference.call import ReferenceCall
from attend.attention.reference.forward import features_of, inputs_of, run_steps
from attend.check.cases import CheckCase
from attend.check.chunks import in_chunks
from attend.check.divergence import RunStep
from attend.check.layer import ComparedOutputs, Known, Layer
from attend.check.low_precision import EVERY_STEP, NUDGE, in_low_precision
from attend.spec import LayerSpec
from attend.tensors import Array

# In multiples of the distance of 1 to the next number of the dtype.
RELATIVE = {"float64": 16 * 2.0**-52, "float32": 16 * 2.0**-23, "float16": 5 * 2.0**-10, "bfloat16": 2.5 * 2.0**-7}
VAGUE = {"float16": 0.05, "bfloat16": 0.15}  # tolerances above this part of the largest number exclude hardly any; otherwise 0.01
LARGE = (1e9, 1e4, 1e5, 1e6, 1e10, 1e20, 1e30, 3.4028234663852886e38)  # what many use in place of infinity
MIXING = ("split_heads", "weights_of", "mixed_weights", "apply_weights", "merge_heads", "project")  # steps that may mix rows of queries
QUERIES_OF = {"output": 1, "attention_weights": -2}  # the axis of the queries
MAGNIFIED = RELATIVE | {"float64": 80 * 2.0**-52, "float32": 80 * 2.0**-23}


@dataclass(frozen=True, slots=True)
class Expected:
    """The output and the weights of a computation, and how far a candidate's may be from them."""

    outputs: Mapping[str, Array]
    largest: Mapping[str, float]  # max|x| of each
    tolerances: Mapping[str, float | Array]  # an array: of each number
    dtype: str = "float64"
    largest_score: float = 0.0  # max|x| of the scores

    def agrees(self, name: str, got: Array) -> bool:
        """Whether an output of a candidate has these numbers. It may have fewer queries: rows do not depend on each other."""
        expected, tolerance, axis = self.outputs[name], self.tolerances[name], QUERIES_OF[name]
        if got.ndim == expected.ndim and got.shape[axis] < expected.shape[axis]:
            rows = range(got.shape[axis])
            expected = np.take(expected, rows, axis)
            tolerance = np.take(tolerance, rows, axis) if isinstance(tolerance, np.ndarray) else tolerance
        return got.shape == expected.shape and bool(_near(got, expected, tolerance).all())

    def typical_error(self, name: str, got: Array) -> float:
        """The root mean square of the errors of an output that `agrees`."""
        rows = [slice(0, n) for n in got.shape]  # it may have fewer queries
        return root_mean_square(got - self.outputs[name][tuple(rows)])

    @property
    def is_vague(self) -> bool:
        """Whether roundings may change the numbers of an output so much that hardly any are excluded."""
        return any(map(self.is_vague_in, self.tolerances))

    def is_vague_in(self, name: str) -> bool:
        """The same of one output."""
        tolerance = self.tolerances[name]
        mean = tolerance if isinstance(tolerance, float) else float(tolerance.mean())
        return mean > max(VAGUE.get(self.dtype, 0.01) * self.largest[name], 1e-29)

    def excludes(self, results: Mapping[str, Array]) -> bool:
        """Whether a candidate has other numbers than the finite ones here, by more than rounding may change."""
        if self.is_vague:
            return False
        same_shape = [(x, results[name], name) for name, x in self.outputs.items() if name in results and results[name].shape == x.shape]
        near = {name: 1e-2 * max(self.largest[name], largest_of(got)) for _, got, name in same_shape}
        return any((np.isfinite(x) & ~(np.abs(x - got) <= near[name])).any() for x, got, name in same_shape)

    def largest_tolerance(self, name: str) -> float:
        tolerance = self.tolerances[name]
        return tolerance if isinstance(tolerance, float) else float(tolerance.max())

    def widened(self, tolerances: Mapping[str, float]) -> "Expected":
        """The same with larger tolerances, of at most a thousandth of the largest number; itself if none is larger."""
        wider = {name: min(tolerances[name], 1e-3 * largest) for name, largest in self.largest.items()}
        if all(wider[name] <= self.largest_tolerance(name) for name in wider):
            return self
        return replace(self, tolerances={name: np.maximum(x, wider[name]) for name, x in self.tolerances.items()})


@dataclass(frozen=True, slots=True)
class Computation:
    """A call of the reference."""

    spec: LayerSpec
    weights: Mapping[str, Array]
    case: CheckCase
    dtype: str = "float64"  # of the candidate: it decides where exp overflows, and the tolerance
    tolerance: float | None = None  # relative; None: by dtype
    average_weights: bool = False  # whether the weights are averaged over the heads
    layer: type[Layer] = Layer  # a subclass replaces steps
    residual: bool = False
    factor: float = 1.0  # on the output
    returned: str = "attention_weights"  # which output is compared with the weights
    returned_of: CheckCase | None = None  # and of which case, if it is another
    rounded: tuple[str, frozenset[str]] | None = None  # a dtype, and which numbers are rounded to it
    other_scale: float | None = None  # in place of the layer's factor on the scores
    known: Known = field(default_factory=Known)  # of the computation without mistakes

    @np.errstate(all="ignore")
    def steps(self) -> list[RunStep]:
        """The steps of the layer's program that the output depends on and that write real numbers, with what they write."""
        m, call = NumpyArithmetic(self.weights), self._call
        values, steps, written = m.weights | inputs_of(self.spec, call), list[RunStep](), dict[str, int]()
        program = program_of(self.spec, features_of(self.spec, call))
        run_steps(m, constants(program), values)
        for step in needed(program, {"output"}, known=[name for constant in constants(program) for name in constant.writes]):
            run_steps(m, (step,), values)
            made = next((x for name in step.writes if (x := values[name]) is not None), None)
            parents = frozenset(written[name] for name in step.reads if name in written)
            if made is not None and np.asarray(made).dtype.kind == "f":
                written |= dict.fromkeys(step.writes, len(steps))
                steps.append(RunStep(step, np.asarray(made), parents))
        return steps

    def with_scale(self, scale: float) -> "Computation":
        """The computation with another factor on the scores."""
        return replace(self, other_scale=scale)

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.spec.scale if self.other_scale is None else self.other_scale

    def scores(self) -> Array:
        """The scores [b, h, q, k], -inf where a key is blocked."""
        return self._attend().scores

    def outputs(self) -> Mapping[str, Array]:
        """What it returns, without tolerances."""
        return self._outputs(self._attend())

    def run(self) -> Expected:
        """What it returns, with weights 0 in rows without a key. ValueError: shapes for which a change is impossible."""
        return self._expected(self._attend())

    def outcomes(self, results: Mapping[str, Array]) -> Iterator[Expected]:
        """What it may return: rows without a key are 0, or NaN, or as a large number in place of -inf makes them. ValueError as `run`.

        Such a number changes no other number that is finite: if those differ from a candidate's `results`, it is not tried.
        """
        result = self._attend()
        outcome = self._expected(result)
        yield outcome
        empty, finite = result.fully_masked[..., None], bool(np.isfinite(result.attention_weights).all())
        if finite and not empty.any():
            return
        if empty.any():
            heads_of_rows = np.where(empty.any(axis=1), np.nan, 0.0)
            outcome = self._expected(
                replace(result, output=result.output + heads_of_rows, attention_weights=np.where(empty, np.nan, result.attention_weights))
            )
            yield outcome
        if outcome.excludes(results) and (not empty.any() or all(getattr(self.layer, x) is getattr(Layer, x) for x in MIXING)):
            return
        fills = LARGE[:1] if finite else LARGE  # a row without a key is uniform, whatever it is
        yield from (self._expected(self._with_finite_scores(fill)._attend(), fill) for fill in fills)

    def effect_of_rounding(self) -> dict[str, float]:
        """How far the outputs move, times 16, if the inputs are moved by their rounding: a mistake may enlarge that."""
        unit, draw = 2.0**-52 if self.dtype == "float64" else 2.0**-23, np.random.default_rng(0).uniform
        moved = {name: x * (1 + unit * draw(-1, 1, x.shape)) for name in ("query", "key", "value") for x in [getattr(self.case, name)]}
        one, two = self.outputs(), replace(self, case=replace(self.case, **moved)).outputs()
        return {name: 16 * largest_of(two[name] - x) for name, x in one.items()}

    def noise(self) -> dict[str, float]:
        """The root mean square of what the outputs change if every step is rounded to the candidate's half precision."""
        rounded = replace(self, rounded=(self.dtype, EVERY_STEP))
        exact, moved = self.outputs(), rounded.outputs()
        return {name: root_mean_square(moved[name] - x) for name, x in exact.items()}

    def _with_finite_scores(self, fill: float) -> "Computation":
        """The computation with a large negative number, -fill, in place of every score of -inf."""

        def weights_of(layer: Layer, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
            return self.layer.weights_of(layer, np.where(np.isneginf(scores), -fill, scores), sinks)

        return replace(self, layer=type("Finite", (self.layer,), {"weights_of": weights_of}))

    @property
    def _call(self) -> ReferenceCall:
        """The call as the reference gets it."""
        call: ReferenceCall = self.known.result(self._make_call, self.case, self.other_scale)
        return call

    def _make_call(self) -> ReferenceCall:
        case = self.case
        visible = case.visible & case.exists if case.chunks else case.visible
        mask = None if visible.all() else visible
        inputs: dict[str, Any] = {"query": case.query, "key": case.key, "value": case.value, "query_offset": case.query_offset}
        return ReferenceCall(**inputs, attend_mask=mask, bias=case.numbers, positions=case.positions, scale=self.other_scale)

    @np.errstate(all="ignore")
    def _attend(self, nudge: float = 0.0) -> ComparedOutputs:
        """Every output. `nudge` moves numbers before they are rounded."""
        case, call = self.case, self._call
        layer = self.layer if self.rounded is None else in_low_precision(self.layer, *self.rounded, nudge)
        if case.chunks and layer is not Layer:
            with suppress(ValueError):
                return in_chunks(layer, case)(self.spec, self.weights, self.known).compared(call)
        return layer(self.spec, self.weights, self.known).compared(call)

    @np.errstate(all="ignore")
    def _expected(self, result: ComparedOutputs, fill: float = LARGE[0]) -> Expected:
        """`fill`: the large number in the scores, if any. Their other numbers lose no more by it than the distance of two numbers there."""
        outputs, norm, relative = self._outputs(result), self.spec.normalises_heads, self.tolerance
        scores = largest_of(np.where(np.abs(result.scores) < fill / 2, result.scores, 0.0))
        scores = max(scores, fill / 16 if fill < LARGE[0] else 0.0)  # 16: of RELATIVE
        largest = {name: largest_of(x) for name, x in outputs.items()}
        tolerances: dict[str, float | Array] = {
            name: tolerance(x, self.dtype, scores, norm=norm, relative=relative) for name, x in largest.items()
        }
        for nudge in () if self.rounded is None else (NUDGE.get(self.dtype, 0.0), -NUDGE.get(self.dtype, 0.0)):
            nudged = self._outputs(self._attend(nudge))
            tolerances = {name: x + 2 * np.nan_to_num(np.abs(nudged[name] - outputs[name])) for name, x in tolerances.items()}
        return Expected(outputs, largest, tolerances, self.dtype, scores)

    def _outputs(self, result: ComparedOutputs) -> dict[str, Array]:
        """The results that a candidate is compared with."""
        of = result if self.returned_of is None else replace(self, case=self.returned_of, known=Known())._attend()
        weights = getattr(of, self.returned)
        return {
            "output": self.factor * (result.output + self.case.query if self.residual else result.output),
            "attention_weights": weights.mean(axis=1) if self.average_weights else weights,
        }


def tolerance(
    expected: Array | float,
    dtype: str,
    scores: Array | float,
    *,
    norm: bool = False,
    relative: float | None = None,
    logarithmic: bool = False,
) -> float:
    """r · max(1, max|scores|) · max|x|, without the last factor for outputs that are `logarithmic` in the weights.

    An error of e in a score is a relative error of e in its weight, and scores of size s are rounded by s · r. r is `relative`, or by
    dtype; larger after a `norm` of queries and keys, which may divide by little, and for logarithmic outputs, which may contain biases that
    are larger than the scores.
    """
    by_dtype = MAGNIFIED if norm or logarithmic else RELATIVE
    unit = by_dtype.get(dtype, RELATIVE["float64"]) if relative is None else relative
    return max(unit * max(1.0, largest_of(scores)) * (1.0 if logarithmic else largest_of(expected)), 1e-30)


def root_mean_square(x: Array) -> float:
    """That of the finite numbers, 0 if there are none."""
    finite = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _near(x: Array, y: Array, tolerance: float | Array) -> Array:
    """Where two arrays of one shape differ by at most the tolerance; equal infinite numbers, and NaN in both, are near."""
    return np.asarray((np.abs(x - y) <= tolerance) | (x == y) | (np.isnan(x) & np.isnan(y)))


def largest_of(x: Array | float) -> float:
    """max|x| of the finite numbers, 0 if there are none."""
    if isinstance(x, float):
        return abs(x) if math.isfinite(x) else 0.0
    if x.size and math.isfinite(largest := max(float(x.max()), -float(x.min()))):
        return largest
    return float(np.abs(x, where=np.isfinite(x), out=np.zeros(np.shape(x))).max(initial=0.0))
