"""Mistakes after the softmax: in the sum of values, the output and what is returned."""

from dataclasses import replace

import numpy as np

from attend.check.changes import Change, replace_steps
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


def mix_rows(of_weights: str, of_values: str) -> Change:
    """Sums of other rows: o_i = Σ_j P_ab v_c for a, b, c among i and j. ValueError if there is no such row."""

    def apply_weights(layer: Layer, weights: Array, values: Array) -> Array:
        queries, keys = weights.shape[-2:]
        if queries > keys or (queries < keys and "j" in of_weights[:1]):
            raise ValueError
        own = np.diagonal(weights, axis1=-2, axis2=-1)  # P_ii
        w = {"ij": weights, "ji": weights.swapaxes(-1, -2), "ii": own[..., :, None], "jj": own[..., None, :]}[of_weights]
        w = np.broadcast_to(w, weights.shape)
        return np.asarray(w @ values if of_values == "j" else w.sum(axis=-1, keepdims=True) * values[..., :queries, :])

    return replace_steps(apply_weights=apply_weights)


ROWS: dict[str, tuple[str, str]] = {  # name -> the indices of the weights and of the values
    "the weights are transposed before they are applied to the values": ("ji", "j"),
    "each query uses the value of its own row": ("ij", "i"),
    "each row is its own value times the sum of its weights over the queries": ("ji", "i"),
    "each value is multiplied by the weight of its own row for itself": ("jj", "j"),
    "each row is the sum of all values times its weight for itself": ("ii", "j"),
    "each row is its own value times its weight for itself, once for every key": ("ii", "i"),
    "each row is its own value times the sum of the weights of all rows for themselves": ("jj", "i"),
}
MISTAKES: dict[str, dict[str, Mistake]] = {
    "values": computing(
        "o_i = Σ_j P_ij v_j",
        {name: (f"o_i = Σ_j P_{weights} v_{values}", mix_rows(weights, values)) for name, (weights, values) in ROWS.items()}
        | {
            "the values of the last key alone are used, without a sum": (
                "o_i = P_ij v_j for the last j",
                replace_steps(apply_weights=lambda layer, w, v: w[..., -1:] * v[:, :, -1:]),
            ),
            "the values of the keys after the first q are left out, where q is the number of queries": (
                "o_i = Σ_j P_ij v_j over j < q",
                replace_steps(apply_weights=lambda layer, w, v: w[..., : w.shape[-2]] @ v[:, :, : w.shape[-2]]),
            ),
            "the weights are divided by the values and not multiplied": (
                "o_i = Σ_j P_ij / v_j",
                replace_steps(apply_weights=lambda layer, w, v: (w[..., None] / v[:, :, None]).sum(axis=3)),
            ),
            "the weights are added up without the values": (
                "o_i = Σ_j P_ij",
                replace_steps(apply_weights=lambda layer, w, v: np.broadcast_to(w.sum(axis=-1, keepdims=True), (*w.shape[:3], v.shape[3]))),
            ),
            "the values are added up without the weights": (
                "o_i = Σ_j v_j",
                replace_steps(apply_weights=lambda layer, w, v: np.broadcast_to(v.sum(axis=2, keepdims=True), (*w.shape[:3], v.shape[3]))),
            ),
            "the outputs of the heads are 0": (
                "o_i = 0",
                replace_steps(apply_weights=lambda layer, w, v: np.zeros((*w.shape[:3], v.shape[3]))),
            ),
            "1 is added to the outputs of the heads": (
                "o_i = 1 + Σ_j P_ij v_j",
                replace_steps(apply_weights=lambda layer, w, v: 1 + w @ v),
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
