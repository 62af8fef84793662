"""Mistakes in the scores, in the softmax, and in what is returned."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attend.check.changes import Change, Function, at_step, change_scale, change_softmax, only_if
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, attention, computing
from attend.check.pairs import TILES
from attend.tensors import BY_TORCH, Array

SIZES: dict[str, Callable[[Computation], int]] = {
    "d_model": lambda c: c.spec.d_model,
    "the number of heads": lambda c: c.spec.num_heads,
    "the number of queries": lambda c: c.case.query.shape[1],
    "the number of keys": lambda c: c.case.key.shape[1],
    "the batch size": lambda c: c.case.query.shape[0],
}
SCALES: dict[str, tuple[str, Callable[[Computation], float]]] = {
    "the scores are not divided by sqrt(head_dim)": ("Q Kᵀ", lambda c: 1.0),
    "the layer's own scale is ignored, and the scores are divided by sqrt(head_dim)": ("Q Kᵀ / √d", lambda c: c.spec.head_dim**-0.5),
    "the scores are divided by head_dim and not by its square root (or by the root twice)": ("Q Kᵀ / d", lambda c: 1 / c.spec.head_dim),
    "the scores are multiplied by sqrt(head_dim) and not divided": ("Q Kᵀ · √d", lambda c: c.spec.head_dim**0.5),
    "the scores are multiplied by head_dim and not divided by its square root": ("Q Kᵀ · d", lambda c: float(c.spec.head_dim)),
    "the scores are multiplied by 0: all visible keys have the same weight": ("0 · Q Kᵀ", lambda c: 0.0),
} | {
    f"the scores are divided by sqrt({words}) and not by sqrt(head_dim)": (
        f"Q Kᵀ / √{words if words == 'd_model' else f'({words})'}",
        lambda c, size=size: size(c) ** -0.5,
    )
    for words, size in SIZES.items()
}
# What scores S become, as a function of them, the softcap c, and the scale.
CAPS: dict[str, tuple[str, Callable[[Array, float, float], Array]]] = {
    "the scores are not divided by the softcap before tanh": ("c · tanh(S)", lambda s, c, scale: c * np.tanh(s)),
    "tanh is not multiplied by the softcap": ("tanh(S / c)", lambda s, c, scale: np.tanh(s / c)),
    "the softcap comes before the scale": ("scale · c · tanh(Q Kᵀ / c)", lambda s, c, scale: scale * c * np.tanh(s / scale / c)),
}
WEIGHTS: dict[str, tuple[str, Callable[[Array], Array]]] = {  # as a function of the scores [b, h, q, k], -inf where blocked
    "the exponentials are not divided by their sum": ("exp(S - m)", lambda s: np.exp(s - s.max(axis=-1, keepdims=True))),
    "there is no softmax: the scores are the weights": ("S", lambda s: s),
    "there is no exp: the scores are divided by their sum": ("S / Σ S", lambda s: s / s.sum(axis=-1, keepdims=True)),
    "each weight is the sigmoid of its score": ("1 / (1 + exp(-S))", lambda s: 1 / (1 + np.exp(-s))),
}


def capped(changed: Callable[[Array, float, float], Array]) -> Change:
    """Replaces the softcap. Impossible without one."""
    return only_if(
        lambda c: c.spec.softcap, lambda c: at_step("softcap", lambda compute, scores, softcap: changed(scores, softcap, c.scale))(c)
    )


def of_scores(weights: Callable[[Array], Array]) -> Change:
    """Replaces the softmax by a function of the scores."""
    return change_softmax(lambda c, softmax, scores, sinks: weights(scores))


def exp_without_maximum(c: Computation, softmax: Function, scores: Array, sinks: Array | None) -> Array:
    """The weights by exp of the scores themselves, in the candidate's dtype."""
    exponentials = np.exp(scores.astype(BY_TORCH[c.dtype].numpy)).astype(np.float64)
    sink = 0.0 if sinks is None else np.exp(sinks[..., None])
    return np.asarray(exponentials / (exponentials.sum(axis=-1, keepdims=True) + sink))


def in_blocks(keys: int, *, rescaled: tuple[str, ...]) -> Change:
    """Computes the softmax in blocks of so many keys, with a running maximum; rescales only these of "sum" and "output" when it grows."""

    def weights(scores: Array) -> Array:
        ends = np.minimum(np.arange(scores.shape[-1]) // keys * keys + keys, scores.shape[-1]) - 1
        largest = np.maximum.accumulate(scores, axis=-1)[..., ends]
        exponentials = np.where(np.isneginf(scores), 0.0, np.exp(scores - largest))
        factors = np.where(np.isneginf(largest), 0.0, np.exp(largest - largest[..., -1:]))
        sums, outputs = (exponentials * (factors if part in rescaled else 1.0) for part in ("sum", "output"))
        return np.asarray(outputs / sums.sum(axis=-1, keepdims=True))

    return of_scores(weights)


MISTAKES: dict[str, Mistake] = {
    **{name: Mistake(change_scale(scale), attention(wrong), attention()) for name, (wrong, scale) in SCALES.items()},
    **computing("softmax(c · tanh(S / c))", {name: (f"softmax({wrong})", capped(made)) for name, (wrong, made) in CAPS.items()}),
    **computing(
        "P = exp(S - m) / Σ exp(S - m), m and Σ over the keys",
        {
            "exp overflows, because the largest score of the row is not subtracted first": (
                "P = exp(S) / Σ exp(S)",
                change_softmax(exp_without_maximum),
            ),
            **{name: (f"P = {wrong}", of_scores(weights)) for name, (wrong, weights) in WEIGHTS.items()},
        },
    ),
    **computing(
        "l = l · exp(m_old - m) + Σ p, o = o · exp(m_old - m) + Σ p v",
        {
            f"in the online softmax with blocks of {keys}, {words} when the maximum grows": (computed, in_blocks(keys, rescaled=rescaled))
            for keys in (1, 2, 4, *TILES)
            for words, rescaled, computed in (
                ("the output is not rescaled", ("sum",), "l = l · exp(m_old - m) + Σ p, o = o + Σ p v"),
                ("the sum is not rescaled", ("output",), "l = l + Σ p, o = o · exp(m_old - m) + Σ p v"),
                ("sum and output are not rescaled", (), "l = l + Σ p, o = o + Σ p v"),
            )
        },
    ),
    "the query is added to the output (a residual connection)": Mistake(
        lambda c: replace(c, residual=True), "x + attention(x)", "attention(x)"
    ),
    "the weights that are returned are those without the mask": Mistake(
        lambda c: replace(c, returned_of=c.case.seeing(mask=np.ones_like(c.case.mask))), "returns softmax(S)", "returns softmax(S + M)"
    ),
    "the scores are returned and not the weights": Mistake(lambda c: replace(c, returned="scores"), "returns S", "returns softmax(S)"),
}
