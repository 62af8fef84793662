"""Mistakes in the softmax."""

from collections.abc import Callable

import numpy as np

from attend.check.changes import Change, Function, change_softmax, change_spec, exp_without_maximum
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, computing
from attend.check.pairs import TILES
from attend.tensors import BY_TORCH, Array

RIGHT = "P = exp(S - m) / Σ exp(S - m), m and Σ over the keys"


def _exponentials(scores: Array) -> Array:
    """exp of the scores less the largest of their row."""
    return np.asarray(np.exp(scores - scores.max(axis=-1, keepdims=True)))


def _normalised(x: Array) -> Array:
    return np.asarray(x / x.sum(axis=-1, keepdims=True))


def of_scores(weights: Callable[[Array], Array]) -> Change:
    """Replaces the softmax by a function of the scores [b, h, q, k], -inf where blocked."""
    return change_softmax(lambda c, softmax, scores, sinks: weights(scores))


def shifted(shift: Callable[[Array], Array]) -> Change:
    """Takes exp, in the candidate's dtype, of the scores less what `shift` returns for them, and divides by the sum of the row."""

    def weights(c: Computation, softmax: Function, scores: Array, sinks: Array | None) -> Array:
        exponentials = np.exp((scores - shift(scores)).astype(BY_TORCH[c.dtype].numpy)).astype(np.float64)
        return _normalised(exponentials)

    return change_softmax(weights)


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


MISTAKES: dict[str, dict[str, Mistake]] = {
    "exp": computing(
        RIGHT,
        {
            "exp overflows, because the largest score of the row is not subtracted first": (
                "P = exp(S) / Σ exp(S)",
                change_softmax(exp_without_maximum),
            ),
            "exp underflows, because the largest of all scores is subtracted and not that of the row": (
                "P = exp(S - m) / Σ exp(S - m), m = max of all S",
                shifted(lambda s: s.max()),
            ),
        },
    ),
    "softmax": computing(
        RIGHT,
        {
            "the exponentials are not divided by their sum": ("P = exp(S - m)", of_scores(_exponentials)),
            "there is no softmax: the scores are the weights": ("P = S", of_scores(lambda s: s)),
            "there is no exp: the scores are divided by their sum": ("P = S / Σ S", of_scores(_normalised)),
            "each weight is the sigmoid of its score": ("P = 1 / (1 + exp(-S))", of_scores(lambda s: 1 / (1 + np.exp(-s)))),
            "exp of the scores themselves is taken, and not normalised": ("P = exp(S)", of_scores(np.exp)),
            "the logarithm of the weights is taken": (
                "P = log softmax(S)",
                change_softmax(lambda c, softmax, scores, sinks: np.log(softmax(scores, sinks))),
            ),
            "1 is added to the sum of the exponentials (softmax off by one)": (
                "P = exp(S) / (1 + Σ exp(S))",
                change_softmax(lambda c, softmax, scores, sinks: softmax(scores, np.zeros(scores.shape[1])[:, None])),
            ),
        },
    ),
    "online softmax": computing(
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
    "normalizer": computing(
        "P = sigmoid(S)",
        {"the scores are normalised by a plain softmax": ("P = softmax(S)", change_spec(normalizer=lambda spec: "softmax"))},
    ),
}
