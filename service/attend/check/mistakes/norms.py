"""Mistakes in norms of queries and keys."""

from collections.abc import Callable

import numpy as np

from attend.attention.operators.qk_norm import QKNorm
from attend.check.changes import Change, change_part, map_weights, only_if, replace_steps
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array

# of x (centred in a layer norm), its mean square with eps, the parameter w, and eps
Numbers = Callable[[Array, Array, Array, float], Array]


def norm_as(numbers: Numbers, axes: tuple[int, ...] | None = None, names: tuple[str, ...] = ("query", "key")) -> Change:
    """Norms of queries and keys [b, h, n, d] by another formula, or with the mean over other axes."""

    def normed(layer: Layer, x: Array, name: str, norm: QKNorm) -> Array:
        if name not in names:
            return Layer.norm(layer, x, name, norm)
        over = axes or ((-1,) if norm.over == "head" else (1, 3))
        centred = x - x.mean(axis=over, keepdims=True) if norm.kind == "layer" else x
        weight, bias = layer.norm_weight(f"{name}_norm.weight", 1.0), layer.norm_weight(f"{name}_norm.bias", 0.0)
        square = (centred**2).mean(axis=over, keepdims=True) + norm.eps
        return np.asarray(numbers(centred, square, np.asarray(weight), norm.eps) + bias)

    return only_if(lambda c: c.spec.qk_norm, replace_steps(norm=normed))


FORMULAS: dict[str, Numbers] = {  # what norms compute, where w * x / sqrt(mean(x²)) is right
    "w * x": lambda x, square, w, eps: w * x,
    "w * x / mean(x²)": lambda x, square, w, eps: w * x / square,
    "x / sqrt(mean(x²))": lambda x, square, w, eps: x / np.sqrt(square),
    "w * x / sqrt(sum(x²))": lambda x, square, w, eps: w * x / np.sqrt(square * x.shape[-1]),
}


RIGHT = "w * x / sqrt(mean(x²))"


def _right(x: Array, square: Array, w: Array, eps: float) -> Array:
    return np.asarray(w * x / np.sqrt(square))


MISTAKES: dict[str, dict[str, Mistake]] = {
    "norm width": {
        "the norm is taken per head and not over the full width of all heads": Mistake(
            change_part("qk_norm", over="head"), "mean(x²) over each head", "mean(x²) over all heads of a row"
        ),
        "the norm is taken over the full width of all heads and not per head": Mistake(
            change_part("qk_norm", over="all"), "mean(x²) over all heads of a row", "mean(x²) over each head"
        ),
    },
    "norm formula": computing(
        RIGHT,
        {f"norms compute {formula} and not {RIGHT}": (formula, norm_as(numbers)) for formula, numbers in FORMULAS.items()}
        | {
            f"norms take their mean over the {words} and not over the numbers of a row": (
                f"w * x / sqrt(mean(x²)), the mean over the {words}",
                norm_as(_right, (axis,)),
            )
            for axis, words in ((2, "rows"), (1, "heads"), (0, "batch"))
        },
    ),
    "norm weights": {
        "1 + w is forgotten: norms multiply by their parameter w (see norm_weights)": Mistake(
            map_weights("_norm.weight", lambda w: w - 1), "w * x / sqrt(mean(x²))", "(1 + w) * x / sqrt(mean(x²))"
        ),
        "norms multiply by 1 + w and not by their parameter w (see norm_weights)": Mistake(
            map_weights("_norm.weight", lambda w: w + 1), "(1 + w) * x / sqrt(mean(x²))", "w * x / sqrt(mean(x²))"
        ),
    },
}
