"""Mistakes after the softmax: in the sum of values, the output and what is returned."""

from dataclasses import replace

import numpy as np

from attend.check.changes import replace_steps
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


def apply_transposed(layer: Layer, weights: Array, values: Array) -> Array:
    """Sums of other rows, o_i = Σ_j P_ji v_j. ValueError unless there are as many queries as keys."""
    return np.asarray(weights.swapaxes(-1, -2) @ values)


MISTAKES: dict[str, dict[str, Mistake]] = {
    "values": computing(
        "o_i = Σ_j P_ij v_j",
        {
            "the weights are transposed before they are applied to the values": (
                "o_i = Σ_j P_ji v_j",
                replace_steps(apply_weights=apply_transposed),
            ),
            "the values of the last key alone are used, without a sum": (
                "o_i = P_ij v_j for the last j",
                replace_steps(apply_weights=lambda layer, w, v: w[..., -1:] * v[:, :, -1:]),
            ),
            "the values of the keys after the first q are left out, where q is the number of queries": (
                "o_i = Σ_j P_ij v_j over j < q",
                replace_steps(apply_weights=lambda layer, w, v: w[..., : w.shape[-2]] @ v[:, :, : w.shape[-2]]),
            ),
            "the values are added up without the weights": (
                "o_i = Σ_j v_j",
                replace_steps(apply_weights=lambda layer, w, v: np.broadcast_to(v.sum(axis=2, keepdims=True), (*w.shape[:3], v.shape[3]))),
            ),
            "the outputs of the heads are 0": (
                "o_i = 0",
                replace_steps(apply_weights=lambda layer, w, v: np.zeros((*w.shape[:3], v.shape[3]))),
            ),
            "the weighted values are averaged and not summed": (
                "o_i = Σ_j P_ij v_j / k",
                replace_steps(apply_weights=lambda layer, w, v: w @ v / w.shape[-1]),
            ),
        },
    ),
    "residual": {
        "the query is added to the output (a residual connection)": Mistake(
            lambda c: replace(c, residual=True), "x + attention(x)", "attention(x)"
        ),
    },
    "returned": {
        "the scores are returned and not the weights": Mistake(lambda c: replace(c, returned="scores"), "returns S", "returns softmax(S)"),
    },
}
