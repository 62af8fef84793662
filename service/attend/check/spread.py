"""How far the outputs of a candidate in half precision may be from the reference.

Correct implementations round at different places, and add in different orders. So the reference is computed several times, with every
step moved at random by up to one unit in the last place of the candidate's dtype, and with what sums in that dtype lose (TTrace, arXiv
2506.09280). What its outputs then differ by is the bound, in three measures:

    the largest error       at most twice the largest difference
    the mean error          its root mean square, at most that of the differences, which are twice as large as those of rounding
    the factor on scores    fitted to all errors together: rounding has no direction, so a factor of 1.01 shows below the other two
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attend.check.cases import CheckCase
from attend.check.computation import VAGUE, Computation, Expected, root_mean_square
from attend.check.layer import Layer
from attend.check.low_precision import HALF
from attend.tensors import Array

ON_AVERAGE = "on average the errors are"
DRAWS = 6  # of moved numbers; 2 for calls of many pairs
MANY = 5000
TILE = 16  # keys of the shortest tile after which a sum may be stored
STEP = 1e-3  # by which the scale is changed to find its effect
LEAST_FACTOR = 0.006  # that a wrong factor on the scores differs from 1 by: truncating in place of rounding makes up to 0.004
CERTAIN = 6.0  # times the deviation of the factor that rounding makes


@dataclass(frozen=True, slots=True)
class Measure:
    """An error in one of the measures, its bound, and what it says if it is larger."""

    error: float
    bound: float
    words: str = ""

    @property
    def ratio(self) -> float:
        return self.error / self.bound if self.bound else float("inf" if self.error else 0)


@dataclass(frozen=True, slots=True)
class Spread:
    """The exact outputs, what they differ by if each step is moved, and what they change by with the scale."""

    exact: Mapping[str, Array]
    moved: Mapping[str, Array]  # differences, of each draw: [draws, …]
    by_scale: Mapping[str, Array]
    dtype: str
    is_rough: bool  # whether rounding changes single scores by 0.5 and more: then few draws do not show how far outputs may move

    def is_vague_in(self, name: str) -> bool:
        """Whether rounding may change this output so much that hardly any numbers are excluded."""
        largest = float(np.abs(self.exact[name]).max(initial=0.0))
        return self.is_rough or max(map(root_mean_square, self.moved[name])) > VAGUE[self.dtype] * max(largest, 1e-30) / 3

    def largest_tolerance(self, name: str) -> float:
        """The largest error that rounding explains."""
        return self._times * float(np.abs(self.moved[name]).max(initial=0.0)) + 1e-30

    @property
    def _times(self) -> float:
        """The bounds, in the differences."""
        return 8.0 if self.is_rough else 2.0

    def measures(self, name: str, got: Array) -> tuple[Measure, ...]:
        """The errors of an output with the right shape."""
        error = got - self.exact[name]
        typical = root_mean_square(self.moved[name]) + 1e-30
        mean = root_mean_square(error)
        measures = [
            Measure(float(np.abs(error).max(initial=0.0)), self.largest_tolerance(name)),
            Measure(
                mean,
                typical * self._times / 2,
                f"{ON_AVERAGE} {2 * mean / typical:.2g} times those that rounding every step makes",
            ),
        ]
        if not self.is_rough and (square := float(np.sum(self.by_scale[name] ** 2))) > 0:
            factors = [float(np.sum(x * self.by_scale[name])) / square for x in (*self.moved[name], error)]
            bound = max(LEAST_FACTOR, CERTAIN * float(np.sqrt(np.mean(np.square(factors[:-1])))))
            words = f"the errors are those of scores that are multiplied by about {1 + factors[-1]:.3g}, besides their scale"
            measures.append(Measure(abs(factors[-1]), bound, words))
        return tuple(measures)


def spread_of(right: Computation, expected: Expected, *, rounds_inputs: bool) -> Spread:
    """The spread of what the reference computes for a case of a candidate in half precision, which may round its inputs first."""
    case = right.case
    draws = DRAWS if case.visible.size < MANY else 2
    moving = _moving(right.dtype, np.random.default_rng(0), rounds_inputs)
    outputs = replace(right, case=_repeated(case, draws), layer=moving).outputs()
    moved = {name: outputs[name].reshape(draws, *x.shape) - x for name, x in expected.outputs.items()}
    scaled = right.with_scale(right.scale * (1 + STEP)).outputs()
    by_scale = {name: (scaled[name] - x) / STEP for name, x in expected.outputs.items()}
    return Spread(expected.outputs, moved, by_scale, right.dtype, HALF[right.dtype] * expected.largest_score > 0.5)


def _repeated(case: CheckCase, times: int) -> CheckCase:
    """The case with each item of its batch so many times, as that computes all draws at once."""
    given = {name: getattr(case, name) for name in ("query", "key", "value", "visible", "numbers")}
    repeated: dict[str, Any] = {name: np.concatenate([x] * times) for name, x in given.items() if x is not None}
    return replace(case, **repeated)


def _moving(dtype: str, rng: np.random.Generator, rounds_inputs: bool) -> type[Layer]:
    """The layer with every step moved at random by up to one unit in the last place, and by what sums lose."""
    unit = HALF[dtype]

    def by_unit(x: Array, factor: float = 1.0) -> Array:
        return x * (1 + factor * unit * rng.uniform(-1, 1, x.shape))

    def by_sum(x: Array, terms: Array) -> Array:
        """A sum whose terms have these absolute values in total."""
        return by_unit(x) + unit / 2 * rng.uniform(-1, 1, x.shape) * terms

    class Moving(Layer):
        def project(self, x: ArrayLike, name: str) -> Array:
            return by_unit(super().project(x, name))

        def project_heads(self, name: str, x: Array) -> Array:
            heads = super().project_heads(name, by_unit(x) if rounds_inputs else x)
            return by_unit(heads) if self.spec.projections else heads

        def at_positions(self, q: Array, k: Array) -> tuple[Array, Array]:
            moved = super().at_positions(q, k)
            return moved if moved[0] is q and moved[1] is k else (by_unit(moved[0]), by_unit(moved[1]))

        def raw_scores(self, q: Array, k: Array) -> Array:
            return by_sum(super().raw_scores(by_unit(q), k), np.abs(q) @ np.abs(k).swapaxes(-1, -2))

        def weights_of(self, scores: Array, sinks: Array | None) -> Any:
            weights, log_sum_exp = super().weights_of(by_unit(scores), sinks)
            of_tiles = by_unit(np.ones((*weights.shape[:-1], 1)), 0.5 * (weights.shape[-1] / TILE) ** 0.5)
            return by_unit(weights) * of_tiles, log_sum_exp

        def apply_weights(self, weights: Array, values: Array) -> Array:
            return by_sum(super().apply_weights(weights, values), np.abs(weights) @ np.abs(values))

    return Moving
