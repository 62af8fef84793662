"""What the weights that a candidate applies show beside the right ones: facts that are read off the numbers, each checked on all pairs.

First, which keys get no weight that should get some, and which get some that should get none; then what the weights are times on the other
pairs: the logarithm of that is the error of a score, but for a number of each row, which the softmax leaves open.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attend.check.applied_weights import AppliedWeights
from attend.check.fitting import least_squares
from attend.check.pairs import TILES, descriptions, first_of, listed
from attend.tensors import Array

SMALLEST = 100  # times the largest error of a weight is the right weight of a key of which it is said that it gets none
NEAR = 2e-5  # errors of scores that rounding explains in float32
FEWEST = 4  # numbers that show that a key has the scores of another one
MOST_SHOWN = 3  # of what is listed
LOG2E = 1.4426950408889634

Sentences = dict[str, list[str]]  # what they are about -> alternatives that are true, the plainest first: what guesses at a tile comes last


def facts(applied: Sequence[AppliedWeights]) -> tuple[str, ...]:
    """The plainest sentence about each subject that is true of all these wrong cases, or else of the first, which is named then."""
    first, *others = [_sentences(x) for x in applied]
    where = f" (in the case “{applied[0].right.case.name}”)"
    general = {subject: [x for x in told if all(x in other.get(subject, ()) for other in others)] for subject, told in first.items()}
    return tuple(general[subject][0] if general[subject] else told[0] + where for subject, told in first.items())


def _sentences(applied: AppliedWeights) -> Sentences:
    seen = _Seen(applied)
    found = {"masks": [*_masks(seen)]}
    if not found["masks"]:
        found |= {"lost": [*_lost(seen)], "gained": [*_gained(seen)]}
    if not applied.has_numbers:
        return {subject: sentences for subject, sentences in found.items() if sentences}
    found["order"] = [*_orders(seen)]
    if not found["order"] and seen.is_softmax:
        found["scores"] = [*_scores(seen)]
        found["gained scores"] = [*_gained_scores(seen)]
    found["sums"] = [*_sums(seen)] if applied.of_others is None else []
    found["others"] = [*_of_others(applied)]
    return {subject: sentences for subject, sentences in found.items() if sentences}


@dataclass(frozen=True)
class _Seen:
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
        right, known, wanted = self.applied.right, self.shared, _centred(self.logarithms, self.shared)
        if not self.applied.has_numbers or not known.any():
            return None
        scores = _centred(self.scores, known)
        if (factors := _by_head(scores, wanted, self)) is not None:
            said = f"the scores are multiplied by {_numbers(factors)}"
            return said, np.reshape(factors, (-1, 1, 1)) * np.where(self.weighty, self.scores, 0.0)
        if not np.allclose(_centred(right.with_scale(2 * right.scale).scores(), known), 2 * scores):  # a bias or a softcap follows
            factor = least_squares(lambda scale: _centred(right.with_scale(scale).scores(), known) - wanted, right.scale)
            made = right.with_scale(factor).scores()
            if (np.abs(_centred(made, known) - wanted) <= 3 * self.near).all():
                return f"Q Kᵀ is multiplied by {_numbers([factor / right.scale])}, besides its scale", made
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
        return bool(self.shared.any()) and not (_spread(differences) > 1e-6).any() and not (self.got < 0).any()

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


def _spread(x: Array) -> Array:
    """The largest less the smallest number of each row, which may have NaN."""
    return np.asarray(np.where(np.isnan(x), -np.inf, x).max(axis=-1) - np.where(np.isnan(x), np.inf, x).min(axis=-1))


def _masks(seen: _Seen) -> Iterator[str]:
    """Whether the keys that get weight are those that other items may attend to."""
    visible, moved = np.isfinite(seen.scores), []
    if len(visible) < 2 or not seen.applied.has_numbers or not (seen.lost.any() and seen.gained.any()):
        return
    for b, h in np.ndindex(*visible.shape[:2]):
        has = np.abs(seen.got[b, h]) > 10 * seen.applied.noise
        same = [item for item in (b, *range(len(visible))) if np.array_equal(has, visible[item, h])]
        if not same:
            return
        if same[0] != b:
            moved.append(f"head {h} of item {b} that of item {same[0]}")
    yield f"heads have the mask of another item: {', '.join(moved[:MOST_SHOWN])}{_and_others(len(moved))}"
    yield "heads have the mask of another item"


def _of_others(applied: AppliedWeights) -> Iterator[str]:
    """Which values of other items and heads get weight."""
    if applied.of_others is None:
        return
    has = applied.of_others > 10 * applied.noise
    n, used = applied.weights.shape[3], list[str]()
    for b, c in np.argwhere(has.any(axis=(1, 2, 4, 5))):
        keys = np.flatnonzero(has[b, :, :, c].any(axis=(0, 1, 2))).tolist()
        words = _key_of(keys[0], n) if len(keys) == 1 else "all keys" if len(keys) == n else listed(keys, "key")
        used += [f"those of {words} of item {c} in item {b}"] if b != c else []
    if used:
        yield f"values of other items get weight: {', '.join(used[:MOST_SHOWN])}{_and_others(len(used))}"
        yield "values of other items get weight"
    heads = [(int(h), int(g)) for h, g in np.argwhere(has.any(axis=(0, 2, 3, 5)))]
    if not used and heads:
        shown = [f"those of head {g} in head {h}" for h, g in heads]
        yield f"values of other heads get weight: {', '.join(shown[:MOST_SHOWN])}{_and_others(len(shown))}"


def _and_others(count: int) -> str:
    """What follows the first of so many things."""
    return f", and {count - MOST_SHOWN} other{'s' * (count > MOST_SHOWN + 1)}" if count > MOST_SHOWN else ""


def _lost(seen: _Seen) -> Iterator[str]:
    """Which keys get no weight that should get some."""
    for words in descriptions(seen.lost, seen.weighty, seen.applied.right.case):
        yield f"{words} {_is(words)} left out"


def _gained(seen: _Seen) -> Iterator[str]:
    """Which keys get weight that should get none."""
    for words in descriptions(seen.gained, seen.blocked, seen.applied.right.case):
        yield f"{words.replace('all keys', 'all blocked keys', 1)} {_is(words)} seen and should not be"


def _is(words: str) -> str:
    """The verb after words for one or several keys."""
    one = words.startswith(("the last key", "the first key", "the key ", "key ", "every ", "each query's own key", "1 pair "))
    return "is" if one and "own key and" not in words else "are"


def _gained_scores(seen: _Seen) -> Iterator[str]:
    """What scores blocked keys have in place of -inf."""
    if not seen.gained.any():
        return
    anchor = (seen.logarithms - seen.scores - seen.errors).max(axis=-1, initial=-np.inf, where=seen.shared, keepdims=True)
    known = seen.gained & np.isfinite(anchor) & (seen.got > 1e3 * seen.applied.noise)
    implied = np.where(known, np.log(np.maximum(seen.got, 1e-300)) - np.where(known, anchor, 0.0), np.nan)
    for words, numbers in (("their scores are {}, and not -inf", implied), ("{} is added to their scores", implied - seen.unmasked)):
        known = numbers[np.isfinite(numbers)]
        if known.size > 1 and not seen.wrong.any() and float(known.max() - known.min()) <= 1e-3:
            number = round(float(known.mean()), 3) + 0.0
            yield words.format(f"{number:.4g}") if number or "added" not in words else "their scores are as if nothing was blocked"


def _orders(seen: _Seen) -> Iterator[str]:
    """Whether the weights are those of other heads, items, queries or keys."""
    got, right = seen.got, seen.right
    if got.shape[2] == got.shape[3] and _same(got, right.swapaxes(2, 3)):
        yield "the weights are transposed: that of query i and key j is that of query j and key i"
    for axis, name in ((1, "head"), (0, "item"), (2, "query"), (3, "key")):
        places = _places(np.moveaxis(got, axis, 0), np.moveaxis(right, axis, 0))
        if places is not None:
            yield from _order(places, name)


def _same(one: Array, two: Array) -> bool:
    return bool((np.abs(one - two) <= 1e-5 * np.maximum(1e-3, np.maximum(np.abs(one), np.abs(two)))).all())


def _places(got: Array, right: Array) -> list[int] | None:
    """For each part of the first axis the part of `right` that it equals; None if one equals none, or all are in their places."""
    n = len(got)
    if n < 2 or got.size * n > 3e7:
        return None
    found = []
    for i in range(n):
        equal = [j for j in (i, *range(n)) if _same(got[i], right[j])]
        if not equal:
            return None
        found.append(equal[0])
    return None if found == [*range(n)] else found


def _order(places: list[int], name: str) -> Iterator[str]:
    """Words for an order of heads, items, queries or keys."""
    n, has = len(places), "weight" if name == "key" else "weights"
    if len({*places}) == 1:
        yield f"every {name} has the {has} of {name} {places[0]}"
    for shift, words in ((-1, "before"), (1, "after")):
        if places == [(i + shift) % n for i in range(n)]:
            yield f"each {name} has the {has} of the one {words}"
        if places == [min(max(i + shift, 0), n - 1) for i in range(n)]:
            yield f"each {name} has the {has} of the one {words}, but for that at the end"
    if places == [*range(n)][::-1]:
        yield f"the {has} of {name} i are those of {name} n - 1 - i" if name != "key" else "the weight of key j is that of key n - 1 - j"
    moved = [f"{name} {i} has the {has} of {name} {j}" for i, j in enumerate(places) if i != j]
    yield ", ".join(moved[:MOST_SHOWN]) + _and_others(len(moved))


def _scores(seen: _Seen) -> Iterator[str]:
    """What is wrong with the scores on the pairs that have weight in both."""
    if not seen.wrong.any():
        return
    numbers = seen.got[seen.shared]
    if not (_spread(np.where(seen.shared, seen.got, np.nan)) > 1e-6).any() and numbers.size:
        yield "all keys that get weight have the same in each row"
        return
    for statements in (_factors, _biases, _of_keys, _cut_scores, _merged, _of_numbers, _clipped, _other_keys, _where):
        found = [*statements(seen)]
        yield from found
        if found:
            return


def _centred(x: Array, known: Array) -> Array:
    """Less the mean of the known numbers of each row, 0 elsewhere."""
    count = np.maximum(known.sum(axis=-1, keepdims=True), 1)
    mean = np.where(known, x, 0.0).sum(axis=-1, keepdims=True) / count
    return np.where(known, x - mean, 0.0)


def _fitted(x: Array, y: Array, near: Array) -> float | None:
    """The number c with y = c x everywhere; None if there is none."""
    square = float(np.sum(x * x))
    factor = float(np.sum(x * y)) / square if square > 0 else np.nan
    return factor if np.isfinite(factor) and (np.abs(y - factor * x) <= near).all() else None


def _by_head(x: Array, y: Array, seen: _Seen) -> list[float] | None:
    """The factor of each head with y = c x; None if one has none."""
    found = [_fitted(x[:, h], y[:, h], 3 * seen.near[:, h]) for h in range(x.shape[1])]
    known = [x for x in found if x is not None]
    return known if len(known) == len(found) else None


def _numbers(factors: Sequence[float]) -> str:
    """One number if all are equal, or those of the heads."""
    rounded = [f"{round(x, 6):.4g}" for x in factors]
    if len({*rounded}) == 1:
        return rounded[0]
    return f"{', '.join(rounded[:4])}{', …' if len(rounded) > 4 else ''} in the heads"


def _factors(seen: _Seen) -> Iterator[str]:
    """Another factor on the scores."""
    if seen.scaled is not None:
        yield seen.scaled[0]


def _biases(seen: _Seen) -> Iterator[str]:
    """A bias that is linear in the place of the key."""
    keys = np.broadcast_to(np.arange(seen.got.shape[3], dtype=float), seen.got.shape)
    slopes = _by_head(_centred(keys, seen.shared), _centred(seen.errors, seen.shared), seen)
    if slopes is not None:
        yield f"{_numbers(slopes)} is added to the scores for each key of distance"


def _of_keys(seen: _Seen) -> Iterator[str]:
    """Scores that are wrong by the same number for all queries."""
    n, known, errors = seen.got.shape[3], seen.shared, np.nan_to_num(seen.errors)
    wrong = np.flatnonzero(seen.wrong.any(axis=(0, 1, 2)))
    if len(wrong) > n // 2:
        return
    numbers = {j: errors[..., j][known[..., j]] for j in wrong}
    if all(float(x.max() - x.min()) <= 5e-5 for x in numbers.values()):
        factors = {f"{round(float(np.exp(np.median(x))), 6):.4g}" for x in numbers.values()}
        if len(factors) == 1:
            for words in descriptions(np.broadcast_to(np.isin(np.arange(n), wrong), known.shape), known, seen.applied.right.case):
                yield f"{words} ha{'s' if _is(words) == 'is' else 've'} {factors.copy().pop()} times the weight beside the others"


def _groups(seen: _Seen) -> list[tuple[int, int]]:
    """The keys from one to another whose scores are wrong by the same number in each row."""
    errors, n = seen.errors, seen.got.shape[3]
    step = np.abs(np.diff(errors, axis=-1)) > seen.near[..., 1:] + seen.near[..., :-1]
    begins = [0, *(np.flatnonzero(step.any(axis=(0, 1, 2))) + 1).tolist(), n]
    return [(begins[i], begins[i + 1]) for i in range(len(begins) - 1)]


def _merged(seen: _Seen) -> Iterator[str]:
    """Groups of keys within which the weights are right, and not between them, as after a wrong merge of partial results."""
    groups, n = _groups(seen), seen.got.shape[3]
    if not seen.shared.all() or not 1 < len(groups) <= n - 2 or sum(end - first > 1 for first, end in groups) < 2:
        return
    ranges = [listed([*range(*group)], "key") for group in groups]
    shown = ", ".join(f"within {x}" for x in ranges[:3]) + (", and so on" if len(ranges) > 3 else "")
    begins = f"the weights are right {shown}, and not between these"
    scores = [seen.scores[..., slice(*group)] for group in groups]
    largest = np.stack([x.max(axis=-1) for x in scores], axis=-1)
    sums = np.stack([np.log(np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1)) for x in scores], axis=-1) + largest
    errors = np.stack([seen.errors[..., group[0]] for group in groups], axis=-1)
    everywhere, near = np.ones_like(errors, bool), np.full(errors.shape, 1e-3)
    for words, x in (("the log-sum-exp of each", sums), ("the maximum of each", largest)):
        if (factor := _fitted(_centred(x, everywhere), _centred(errors, everywhere), near)) is not None:
            merged = f"are merged as if {words} was multiplied by {_known_number(1 + factor)}"
            yield f"{begins}: partial results {merged}"
            yield f"partial results of groups of keys {merged}"
    yield f"{begins}: partial results are merged with wrong factors"
    yield "the weights are right within groups of keys, and not between them: partial results are merged with wrong factors"


def _cut_scores(seen: _Seen) -> Iterator[str]:
    """Factors on the scores that differ from some keys to others."""
    n, scores, logarithms = seen.got.shape[3], seen.scores, seen.logarithms
    known = seen.shared[..., :1] & seen.shared
    if n < 3 or not known[..., 0].any() or not known[..., 1].any():
        return
    near = 3 * (seen.near + seen.near[..., :1]) + 1e-4
    scores, logarithms = (np.where(known, x, 0.0) for x in (scores, logarithms))
    one, two = (np.where(known[..., 1], x[..., 1] - x[..., 0], 0.0) for x in (scores, logarithms))
    first = _fitted(one, two, near[..., 1])
    if first is None:
        return
    wanted = np.where(known, logarithms - logarithms[..., :1] + first * scores[..., :1], 0.0)
    found = [_fitted(scores[..., j], wanted[..., j], near[..., j]) for j in range(n)]
    factors = [x for x in found if x is not None]
    if len(factors) < n:
        return
    begins = [0, *(j for j in range(1, n) if abs(factors[j] - factors[j - 1]) > 1e-3), n]
    if len(begins) == 3 and abs(factors[0] - 1) < 1e-3:
        yield f"the scores of the keys from {begins[1]} on are multiplied by {_known_number(factors[-1])}"
    for tile in TILES:
        if n > tile and np.allclose(factors, factors[tile] ** (np.arange(n) // tile), rtol=1e-3):
            yield f"the scores are multiplied by {_known_number(factors[tile])} once more in each block of {tile} keys"
    if len(begins) <= n // 2:
        parts = [(begins[i], begins[i + 1]) for i in range(len(begins) - 1)]
        shown = [f"{_known_number(factors[i])} for {listed([*range(i, end)], 'key')}" for i, end in parts]
        yield f"the scores are multiplied by {', '.join(shown[:3])}{', …' if len(shown) > 3 else ''}"


def _known_number(x: float) -> str:
    """A number, with its name if it has one."""
    name = {LOG2E: " = log2(e)", 1 / LOG2E: " = log(2)"}
    return f"{x:.4g}" + next((words for number, words in name.items() if abs(x - number) < 1e-3), "")


def _of_numbers(seen: _Seen) -> Iterator[str]:
    """Numbers of queries and keys whose products do not count."""
    if (pair := seen.products) is None or (d := pair[0].shape[-1]) * seen.got.size > 2e6:
        return
    q, k, scale = *pair, seen.applied.right.scale
    parts = scale * q[..., :, None, :] * k[..., None, :, :]  # [b, h, q, k, d]
    if parts.shape[:4] != seen.got.shape:
        return
    others = np.where(np.isfinite(seen.scores), seen.scores - parts.sum(axis=-1), 0.0)
    wanted = _centred(seen.logarithms - others, seen.shared)[seen.shared]
    x = np.stack([_centred(parts[..., i], seen.shared)[seen.shared] for i in range(d)], axis=-1)
    if len(x) < 2 * d:
        return
    factors, *_ = np.linalg.lstsq(x, wanted, rcond=None)
    if (np.abs(x @ factors - wanted) > 3 * seen.near[seen.shared]).any():
        return
    lost, right = np.abs(factors) < 0.01, np.abs(factors - 1) < 0.01
    if lost.any() and (lost | right).all():
        first = int(np.flatnonzero(lost)[0])
        if lost[first:].all():
            yield f"only the first {first} numbers of each query and key count in the scores"
        yield f"{listed(np.flatnonzero(lost).tolist(), 'number')} of queries and keys, of {d}, do not count in the scores"


def _clipped(seen: _Seen) -> Iterator[str]:
    """Scores that count as a bound that they exceed, or fall below."""
    known, scores, logarithms = seen.shared, seen.scores, seen.logarithms
    ends = [(x.max(axis=-1, initial=-np.inf, where=known), x.min(axis=-1, initial=np.inf, where=known)) for x in (scores, logarithms)]
    rows = known.sum(axis=-1) > 1
    (top, low), (largest, smallest) = ((x[rows], y[rows]) for x, y in ends)
    spread = largest - smallest
    if not rows.any():
        return
    upper, lower = float((low + spread).max()), float((top - spread).min())
    counted = scores + seen.errors
    both = float(np.median(np.abs(counted[seen.wrong]))) if seen.wrong.any() else 0.0
    for words, first, last in (
        (f"scores above {upper:.4g} count as {upper:.4g}", -np.inf, upper),
        (f"scores below {lower:.4g} count as {lower:.4g}", lower, np.inf),
        (f"the scores are clipped to ±{both:.4g}", -both, both),
    ):
        error = _centred(logarithms, known) - _centred(np.clip(scores, first, last), known)
        if (np.abs(error) <= 3 * seen.near).all():
            yield words


def _other_keys(seen: _Seen) -> Iterator[str]:
    """Keys whose scores are those of other keys, maybe of other items."""
    wrong = np.flatnonzero(seen.wrong.any(axis=(0, 1, 2)))
    if (pair := seen.products) is None or not 0 < len(wrong) <= seen.got.shape[3] // 2:
        return
    q, k = pair
    b, n = len(k), seen.got.shape[3]
    if b * q.shape[2] * k.size * b > 1e7 or k.shape[2] != n:
        return
    products = seen.applied.right.scale * np.einsum("bhid,chjd->bhicj", q, k)
    own = np.stack([products[i, :, :, i] for i in range(b)])
    implied = np.where(seen.shared, own + seen.errors, np.nan)
    told = []
    for item in range(b):
        for j in wrong:
            if not seen.wrong[item, ..., j].any():
                continue
            column = implied[item, ..., j][..., None, None]
            far = np.where(np.isnan(column), 0.0, np.abs(products[item] - column)).max(axis=(0, 1))
            if np.isfinite(column).sum() < FEWEST or not len(found := np.argwhere(far <= 1e-4)):
                return
            told.append((item, int(j), int(found[0][0]), int(found[0][1])))
    shown = [f"{_key_of(j, n)} of item {item} has the scores of {_key_of(at, n)} of item {other}" for item, j, other, at in told]
    if told:
        yield ", ".join(shown[:MOST_SHOWN]) + _and_others(len(shown))


def _key_of(j: int, n: int) -> str:
    """Words for key j of n."""
    return "the last key" if j == n - 1 else "the first key" if j == 0 else f"key {j}"


def _where(seen: _Seen) -> Iterator[str]:
    """Where the wrong scores are, if they are not everywhere."""
    for words in descriptions(seen.wrong, seen.shared, seen.applied.right.case):
        if not words.startswith("all keys") and words != first_of(seen.wrong):
            yield f"the weights of {words} are wrong beside the others, which are right up to a factor of each row"


def _sums(seen: _Seen) -> Iterator[str]:
    """What rows sum to that have weight."""
    rows = seen.rows[..., 0] & (seen.got != 0).any(axis=-1)
    got, right = seen.got.sum(axis=-1)[rows], seen.right.sum(axis=-1)[rows]
    if not got.size or (np.abs(got - right) <= 1e-4).all():
        return
    if seen.is_softmax and not seen.wrong.any() and not seen.lost.any():
        yield from _added(seen)
    low, high, expected = f"{got.min():.4g}", f"{got.max():.4g}", f"{right.min():.4g}"
    sums = f"rows sum to {low}" if low == high else f"rows sum to {low} to {high}"
    others = " and not to 1" if np.ptp(right) < 1e-4 and expected == "1" else ", and the right ones to other numbers"
    alone = not (seen.wrong.any() or seen.lost.any() or seen.gained.any()) and seen.is_softmax
    yield f"{'the weights are right up to a factor of each row: ' if alone else ''}{sums}{others}"
    if (got < right + 1e-6).all():
        yield "rows sum to less than they should"


def _added(seen: _Seen) -> Iterator[str]:
    """What the sums of the rows have beside the exponentials of the scores: [b, h, q], if it is the same in each row of a head."""
    counts = (seen.got > 0) & np.isfinite(seen.unmasked)
    logarithm = np.where(seen.shared, seen.scores - seen.logarithms, np.nan)
    total = np.exp(np.nanmean(np.where(seen.rows, logarithm, 0.0), axis=-1))
    added = total - np.where(counts, np.exp(np.where(counts, seen.unmasked, 0.0)), 0.0).sum(axis=-1)
    by_head, n = np.moveaxis(added, 1, 0).reshape(added.shape[1], -1), seen.got.shape[3]
    near = 1e-4 * total.max()
    if (np.ptp(by_head, axis=1) > near).any():
        everything = np.exp(seen.unmasked).sum(axis=-1)
        if np.isfinite(everything).all() and (np.abs(total - everything) <= near).all():
            yield "rows are divided by the sum over all keys, also those that are blocked"
        return
    numbers, more = np.median(by_head, axis=1), _logits_of_heads(seen)
    if more is not None and (numbers > 0).all():
        name, logits = more
        factor = _fitted(logits, np.log(numbers), np.full(len(numbers), 1e-2))
        if factor is not None:
            yield f"the logits of the {name} are multiplied by {factor:.4g}"
        shown = ", ".join(f"{x:.4g}" for x in np.log(numbers)[:4])
        yield f"the logits of the {name} are as if they were {shown}{', …' if len(numbers) > 4 else ''}"
    count = round(float(numbers[0]))
    if count > 0 and (np.abs(numbers - count) <= near).all():
        also = "that are not there take part in the softmax, with a score of zero"
        yield f"{count} further key{'s' if count > 1 else ''} {also}"
        for tile in TILES:
            if count < tile and (n + count) % tile == 0:
                yield f"further keys, as many as fill the last tile of {tile}, {also}"


def _logits_of_heads(seen: _Seen) -> tuple[str, Array] | None:
    """The weight of the layer that adds a number for each head to the sums of exponentials, with its name; None if it has none."""
    right = seen.applied.right
    reads = (name for run in right.steps() if "log_sum_exp" in run.step.reads for name in run.step.reads)
    name = next((x for x in reads if x in right.weights and right.weights[x].shape == (right.spec.num_heads,)), None)
    return None if name is None else (name, right.weights[name])
