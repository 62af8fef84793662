"""The reference with some steps in fewer digits, as a candidate has them that casts to half precision on the way.

Rounding is a step like any other, so its numbers can be reproduced: the candidate's differ from those of the reference by no more than the
rounding errors of its own dtype, except where a number is so near the middle of two numbers of the lower precision that such an error
decides to which one it is rounded. `nudge` shows where: it moves every number by that much of the largest one before it is rounded.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attend.check.layer import Layer
from attend.tensors import BY_TORCH, Array

HALF = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # the distance of 1 to the next number
EVERY_STEP = frozenset({"projections", "queries", "keys", "products", "scores", "weights", "applied", "values", "heads"})
NUDGE = {"float32": 2.0**-22, "float64": 2.0**-50}  # of the largest number: errors of a sum of products in the candidate's dtype


def to_precision(x: Array, dtype: str, nudge: float = 0.0) -> Array:
    """The nearest numbers of the dtype, in float64, to numbers moved by `nudge` times the largest."""
    moved = x + nudge * float(np.abs(x, where=np.isfinite(x), out=np.zeros(x.shape)).max(initial=0.0)) if nudge else x
    return moved.astype(np.float32).astype(BY_TORCH[dtype].numpy).astype(np.float64)


def in_low_precision(layer: type[Layer], dtype: str, rounded: Collection[str], nudge: float = 0.0) -> type[Layer]:
    """The layer with these of its numbers rounded: projections (before and after RoPE), queries, keys (`scaled queries`: times the
    scale, before they are multiplied by the keys), products, scores, weights (`applied`: as they are multiplied by values), values,
    heads."""

    def to(name: str, x: Array) -> Array:
        return to_precision(x, dtype, nudge) if name in rounded else x

    class Rounding(layer):  # type: ignore[misc, valid-type]  # the layer is a variable
        def project(self, x: ArrayLike, name: str) -> Array:
            return to("projections", super().project(x, name))

        def at_positions(self, q: Array, k: Array) -> tuple[Array, Array]:
            q, k = super().at_positions(q, k)
            return to("projections", q), to("projections", k)

        def raw_scores(self, q: Array, k: Array) -> Array:
            q = to("scaled queries", q * self.values["scale"]) / self.values["scale"] if "scaled queries" in rounded else to("queries", q)
            return to("products", super().raw_scores(q, to("keys", k)))

        def weights_of(self, scores: Array, sinks: Array | None) -> Any:
            weights, log_sum_exp = super().weights_of(to("scores", scores), sinks)
            return to("weights", weights), log_sum_exp

        def apply_weights(self, weights: Array, values: Array) -> Array:
            return to("heads", super().apply_weights(to("applied", weights), to("values", values)))

    return Rounding
