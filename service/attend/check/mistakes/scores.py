"""Mistakes in the scores: their factor, and what they are products of."""

from collections.abc import Callable

import numpy as np

from attend.check.changes import Change, at_step, change_scale, only_if, replace_steps
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, attention, computing
from attend.spec import LayerSpec
from attend.tensors import Array

SCALES: dict[str, tuple[str, Callable[[Computation], float]]] = {
    "the scores are not divided by sqrt(head_dim)": ("Q Kᵀ", lambda c: 1.0),
    "mscale is forgotten, and the scores are divided by sqrt(head_dim) alone": ("Q Kᵀ / √d", lambda c: _with_power_of_mscale(c.spec, 0)),
    "the scores are multiplied by mscale and not by its square": ("mscale · Q Kᵀ / √d", lambda c: _with_power_of_mscale(c.spec, 1)),
    "the layer's own scale is ignored, and the scores are divided by sqrt(head_dim)": (
        "Q Kᵀ / √d",
        lambda c: c.spec.scale if c.spec.latent else c.spec.head_dim**-0.5,
    ),
    "the scores are divided by sqrt(d_model) and not by sqrt(head_dim)": ("Q Kᵀ / √d_model", lambda c: c.spec.d_model**-0.5),
    "the scores are divided by head_dim and not by its square root (or by the root twice)": ("Q Kᵀ / d", lambda c: 1 / c.spec.head_dim),
    "the scores are multiplied by sqrt(head_dim) and not divided": ("Q Kᵀ · √d", lambda c: c.spec.head_dim**0.5),
    "the scores are multiplied by head_dim and not divided by its square root": ("Q Kᵀ · d", lambda c: float(c.spec.head_dim)),
    "the scores are multiplied by 0: all visible keys have the same weight": ("0 · Q Kᵀ", lambda c: 0.0),
} | {
    f"the scores are divided by sqrt({words}) and not by sqrt(head_dim)": (f"Q Kᵀ / √({words})", lambda c, length=length: length(c) ** -0.5)
    for words, length in (
        ("the number of heads", lambda c: c.spec.num_heads),
        ("the number of queries", lambda c: c.case.query.shape[1]),
        ("the number of keys", lambda c: c.case.key.shape[1]),
        ("the batch size", lambda c: c.case.query.shape[0]),
    )
}


def _with_power_of_mscale(spec: LayerSpec, power: int) -> float:
    """The scale of a latent layer, mscale² / √head_dim, with another power of mscale."""
    root = spec.head_dim**-0.5
    return (spec.scale / root) ** (power / 2) * root if spec.latent else spec.scale


def transposed_products(layer: Layer, q: Array, k: Array) -> Array:
    """Products of other rows, S_ij = q_j · k_i. ValueError unless there are as many queries as keys."""
    if q.shape[2] != k.shape[2]:
        raise ValueError
    return np.asarray(k @ q.swapaxes(-1, -2))


def cap(changed: Callable[[Array, float, float], Array]) -> Change:
    """Replaces the softcap by a function of the scores, the softcap and the scale. Impossible without a softcap."""

    def change(c: Computation) -> Computation:
        return at_step("softcap", lambda compute, scores, softcap: changed(scores, softcap, c.scale))(c)

    return only_if(lambda c: c.spec.softcap, change)


MISTAKES: dict[str, dict[str, Mistake]] = {
    "softcap + softcap formula": computing(
        "softmax(c · tanh(S / c))",
        {
            "the scores are not divided by the softcap before tanh": (
                "softmax(c · tanh(S))",
                cap(lambda s, c, scale: c * np.tanh(s)),
            ),
            "tanh is not multiplied by the softcap, but by the scores": (
                "softmax(S · tanh(S / c))",
                cap(lambda s, c, scale: s * np.tanh(s / c)),
            ),
            "tanh is not multiplied by the softcap": ("softmax(tanh(S / c))", cap(lambda s, c, scale: np.tanh(s / c))),
            "the softcap comes before the scale": (
                "softmax(scale · c · tanh(Q Kᵀ / c))",
                cap(lambda s, c, scale: scale * c * np.tanh(s / scale / c)),
            ),
        },
    ),
    "scale": {
        hint: Mistake(change_scale(scale), attention(wrong), attention("mscale² · Q Kᵀ / √d") if "mscale" in hint else attention())
        for hint, (wrong, scale) in SCALES.items()
    },
    "products": computing(
        "S_ij = q_i · k_j{scale}",
        {
            "the scores are transposed: that of query i and key j is that of query j and key i": (
                "S_ij = q_j · k_i{scale}",
                only_if(lambda c: not c.spec.relative_scores, replace_steps(raw_scores=transposed_products)),
            ),
        },
    ),
}
