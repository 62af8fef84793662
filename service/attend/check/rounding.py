"""The reference with the roundings of a layer in half precision, and the largest error that they explain.

A half-precision layer stores tensors in its dtype between steps, and computes each step, scores and weights in float32. What is stored:
products of projections (queries, keys, values, latent vectors before and after their norm, the gate's logits, the output), and heads after
a norm, after RoPE, after the scales of queries, and after attention.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attend.attention.operators.step import Step
from attend.check.computation import largest_of, tolerance
from attend.check.layer import Layer
from attend.check.low_precision import HALF, to_precision
from attend.tensors import Array

STORED = frozenset({"query_projection", "key_projection", "value_projection", "query_latent", "latent", "value_latent", "rope_key", "gate"})


class RoundedLayer(Layer):
    """The reference, which rounds to the layer's dtype where the service stores a tensor in it."""

    def rounded(self, x: Array) -> Array:
        """The nearest numbers of the layer's dtype, in float64."""
        return to_precision(x, self.spec.dtype)

    def project(self, x: ArrayLike, name: str) -> Array:
        """The product, from rounded inputs: only the heads after attention are not rounded before."""
        return self.rounded(super().project(self.rounded(np.asarray(x)), name))

    def project_exactly(self, x: ArrayLike, name: str) -> Array:
        """The indexer and the forget gate compute in float64."""
        return Layer.project(self, x, name)

    def compute(self, step: Step, reads: Sequence[Any]) -> Any:
        result = super().compute(step, reads)
        return self.rounded(result) if {*step.writes} <= STORED else result


def half_tolerance(expected: Array, rounded: Array, dtype: str, scores: float, *, norm: bool = False, logarithmic: bool = False) -> float:
    """2 · (e + ε · max|x|), and the tolerance of float32, in which each step is computed; e is the largest error of `rounded`.

    `rounded` is the output of a RoundedLayer. To first order the error of an output is the sum of all roundings, each times what it is
    multiplied by later, and e is the size of this sum. The service rounds at the same places. The factor 2 is for sums near the middle of
    two numbers, which another order of additions rounds to the other one. 2 · ε · max|x| are four roundings of the output itself, which a
    RoundedLayer leaves out: of the reply, or of heads after attention, head_scale, the gate's function and its product.
    """
    finite = np.isfinite(expected)
    moved = float(np.abs(rounded.reshape(expected.shape)[finite] - expected[finite]).max(initial=0.0))
    return 2 * (moved + HALF[dtype] * largest_of(expected)) + tolerance(expected, "float32", scores, norm=norm, logarithmic=logarithmic)
