"""The weights that a candidate applies beside the right ones: what follows from both, and factors that are fitted to it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attend.check.applied_weights import AppliedWeights
from attend.check.fitting import least_squares
from attend.tensors import Array

SMALLEST = 100  # times the largest error of a weight is the right weight of a key of which it is said that it gets none
NEAR = 2e-5  # errors of scores that rounding explains in float32
NAMES = {math.log2(math.e): " = log2(e)", math.log(2): " = log(2)"}  # of numbers


@dataclass(frozen=True)
class ComparedWeights:
    """The applied and the right weights [b, h, q, k], and what follows from them."""

    applied: AppliedWeights

    @property
    def got(self) -> Array:
        return self.applied.weights

    @cached_property
    def scores(self) -> Array:
        """The right ones, -inf where a key is blocked."""
        return self.applied.right.scores()

    @cached_property
    def unmasked(self) -> Array:
        """The right ones without the mask."""
        right, case = self.applied.right, self.applied.right.case
        return replace(right, case=replace(case, visible=np.ones_like(case.visible), chunks=(), rolled_back=None)).scores()

    @cached_property
    def right(self) -> Array:
        return np.asarray(replace(self.applied.right, average_weights=False).outputs()["attention_weights"])

    @cached_property
    def rows(self) -> Array:
        """The rows that have a key: [b, h, q, 1]."""
        return np.asarray(np.isfinite(self.scores).any(axis=-1, keepdims=True))

    @cached_property
    def blocked(self) -> Array:
        return np.asarray(np.isneginf(self.scores) & self.rows & self.applied.known)

    @cached_property
    def lost(self) -> Array:
        """Where a key gets no weight, and would get some with the factors on the scores that the other weights show."""
        lost = np.asarray((self.got == 0) & self.weighty)
        if self.scaled is None:
            return lost
        scores = np.where(self.weighty, self.scaled[1], 0.0)
        anchor = np.where(self.shared, self.logarithms - scores, -np.inf).max(axis=-1, keepdims=True)
        return np.asarray(lost & (np.isneginf(anchor) | (anchor + scores > np.log(SMALLEST * self.applied.noise))))

    @cached_property
    def scaled(self) -> tuple[str, Array] | None:
        """What is said of factors on the scores that explain all weights that are shared, and the scores with them."""
        right, known, wanted = self.applied.right, self.shared, centred(self.logarithms, self.shared)
        if not self.applied.has_numbers or not known.any():
            return None
        scores = centred(self.scores, known)
        if (factors := by_head(self.scores, self.logarithms, self)) is not None:
            said = f"the scores are multiplied by {in_digits(factors)}"
            return said, factors[:, None, None] * np.where(self.weighty, self.scores, 0.0)
        if not np.allclose(centred(right.with_scale(2 * right.scale).scores(), known), 2 * scores):  # a bias or a softcap follows
            factor = least_squares(lambda scale: centred(right.with_scale(scale).scores(), known) - wanted, right.scale)
            made = right.with_scale(factor).scores()
            if (np.abs(centred(made, known) - wanted) <= 3 * self.near).all():
                return f"Q Kᵀ is multiplied by {in_digits([factor / right.scale])}, besides its scale", made
        return None

    @cached_property
    def weighty(self) -> Array:
        """Where the right weight is so large that it would be seen."""
        return (self.right > SMALLEST * self.applied.noise) & self.rows & self.applied.known

    @cached_property
    def gained(self) -> Array:
        return np.asarray((np.abs(self.got) > 10 * self.applied.noise) & self.blocked)

    @cached_property
    def shared(self) -> Array:
        """Where the right and the applied weight are positive, and so large that their ratio is known."""
        return self.weighty & (self.got > 10 * self.applied.noise)

    @cached_property
    def is_softmax(self) -> bool:
        """Whether the right weights are the exponentials of the scores but for a factor of each row."""
        differences = np.where(self.weighty, np.log(np.where(self.weighty, self.right, 1.0)) - self.scores, np.nan)
        return bool(self.shared.any()) and not (spread(differences) > 1e-6).any() and not (self.got < 0).any()

    @cached_property
    def near(self) -> Array:
        """How large an error of a score is that says nothing."""
        unit = NEAR if self.applied.right.dtype != "float64" else 1e-7
        return np.asarray(unit + 10 * self.applied.noise / np.maximum(np.minimum(self.got, self.right), self.applied.noise))

    @cached_property
    def logarithms(self) -> Array:
        """Those of the applied weights, which are scores but for a number of each row; NaN where they are not known."""
        return np.where(self.shared, np.log(np.where(self.shared, self.got, 1.0)), np.nan)

    @cached_property
    def errors(self) -> Array:
        """Those of the scores, less one of the middle of each row."""
        errors = self.logarithms - self.scores
        empty = np.where(self.shared.any(axis=-1, keepdims=True), errors, 0.0)
        return np.asarray(errors - np.nanquantile(empty, 0.5, axis=-1, keepdims=True, method="lower"))

    @cached_property
    def wrong(self) -> Array:
        """Where a score is wrong beside most others of its row."""
        return np.asarray(np.abs(np.nan_to_num(self.errors)) > self.near)

    @property
    def products(self) -> tuple[Array, Array] | None:
        """The queries and keys [b, h, n, d] whose products the scores are; None if they are not made of products alone."""
        steps, spec = self.applied.right.steps(), self.applied.right.spec
        for run in steps:
            if run.step.name == "scaled_products" and "query_projection" in run.step.reads:
                made = {name: steps[i].value for i in sorted(run.parents) for name in steps[i].step.writes}
                if {"query_projection", "key_projection"} <= made.keys():
                    q, k = made["query_projection"], made["key_projection"]
                    return q, np.repeat(k, spec.num_heads // k.shape[1], axis=1)
        return None


def spread(x: Array) -> Array:
    """The largest less the smallest number of each row, which may have NaN."""
    return np.asarray(np.where(np.isnan(x), -np.inf, x).max(axis=-1) - np.where(np.isnan(x), np.inf, x).min(axis=-1))


def centred(x: Array, known: Array) -> Array:
    """Less the mean of the known numbers of each row, 0 elsewhere."""
    count = np.maximum(known.sum(axis=-1, keepdims=True), 1)
    mean = np.where(known, x, 0.0).sum(axis=-1, keepdims=True) / count
    return np.where(known, x - mean, 0.0)


def by_head(x: Array, y: Array, seen: ComparedWeights) -> Array | None:
    """The number c of each head with y = c · x on all pairs that are shared, but for a number of each row; None if there are none."""
    x, y = centred(x, seen.shared), centred(y, seen.shared)
    squares = np.sum(x * x, axis=(0, 2, 3))
    if not squares.all():
        return None
    factors = np.sum(x * y, axis=(0, 2, 3)) / squares
    return factors if (np.abs(y - factors[:, None, None] * x) <= 3 * seen.near).all() else None


def by_key(x: Array, y: Array, seen: ComparedWeights) -> Array | None:
    """The same with a number of each key, NaN where nothing is shared."""
    x, y = np.where(seen.shared, x, 0.0), centred(y, seen.shared)
    rows, counts = x.reshape(-1, x.shape[3]), np.maximum(seen.shared.sum(axis=-1).reshape(-1, 1), 1)
    gram = np.diag(np.sum(rows**2, axis=0)) - rows.T @ (rows / counts)  # of the rows of x for each key, less their means
    factors = np.linalg.lstsq(gram, np.sum(rows * y.reshape(rows.shape), axis=0), rcond=None)[0]
    is_right = (np.abs(y - centred(factors * x, seen.shared)) <= 3 * seen.near).all()
    return np.where(gram.diagonal() > 0, factors, np.nan) if is_right else None


def by_place(x: Array, y: Array, seen: ComparedWeights) -> Array | None:
    """The same with a number of each place of x [d, b, h, q, k], whose terms are added."""
    terms, wanted = centred(x, seen.shared)[:, seen.shared].T, centred(y, seen.shared)[seen.shared]
    if len(terms) < 2 * len(x):
        return None
    factors = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    return factors if (np.abs(terms @ factors - wanted) <= 3 * seen.near[seen.shared]).all() else None


def in_digits(factors: Sequence[float] | Array) -> str:
    """One number if all are equal, with its name if it has one, or those of the heads."""
    rounded = [f"{round(float(x), 6):.4g}" for x in factors]
    if len({*rounded}) == 1:
        return rounded[0] + next((words for number, words in NAMES.items() if abs(factors[0] - number) < 1e-3), "")
    return f"{', '.join(rounded[:4])}{', …' if len(rounded) > 4 else ''} in the heads"
