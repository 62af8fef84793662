"""What is wrong with the scores whose exponentials the applied weights are, up to a factor of each row. Each is checked on all pairs."""

from collections.abc import Iterator

import numpy as np

from attend.check.compared_weights import ComparedWeights, by_head, centred, fitted, in_digits, spread
from attend.check.pairs import MOST_LISTED, TILES, and_others, descriptions, first_of, key_in_words, listed, verb_after

FEWEST = 4  # numbers that show that a key has the scores of another one
LOG2E = 1.4426950408889634


def facts_of_gained_scores(seen: ComparedWeights) -> Iterator[str]:
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


def facts_of_scores(seen: ComparedWeights) -> Iterator[str]:
    """What is wrong with the scores on the pairs that have weight in both."""
    if not seen.wrong.any():
        return
    numbers = seen.got[seen.shared]
    if not (spread(np.where(seen.shared, seen.got, np.nan)) > 1e-6).any() and numbers.size:
        yield "all keys that get weight have the same in each row"
        return
    for statements in (_factors, _biases, _of_keys, _cut_scores, _merged, _of_numbers, _clipped, _other_keys, _where):
        found = [*statements(seen)]
        yield from found
        if found:
            return


def _factors(seen: ComparedWeights) -> Iterator[str]:
    """Another factor on the scores."""
    if seen.scaled is not None:
        yield seen.scaled[0]


def _biases(seen: ComparedWeights) -> Iterator[str]:
    """A bias that is linear in the place of the key."""
    keys = np.broadcast_to(np.arange(seen.got.shape[3], dtype=float), seen.got.shape)
    slopes = by_head(centred(keys, seen.shared), centred(seen.errors, seen.shared), seen)
    if slopes is not None:
        yield f"{in_digits(slopes)} is added to the scores for each key of distance"


def _of_keys(seen: ComparedWeights) -> Iterator[str]:
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
                yield f"{words} ha{'s' if verb_after(words) == 'is' else 've'} {factors.copy().pop()} times the weight beside the others"


def _groups(seen: ComparedWeights) -> list[tuple[int, int]]:
    """The keys from one to another whose scores are wrong by the same number in each row."""
    errors, n = seen.errors, seen.got.shape[3]
    step = np.abs(np.diff(errors, axis=-1)) > seen.near[..., 1:] + seen.near[..., :-1]
    begins = [0, *(np.flatnonzero(step.any(axis=(0, 1, 2))) + 1).tolist(), n]
    return [(begins[i], begins[i + 1]) for i in range(len(begins) - 1)]


def _merged(seen: ComparedWeights) -> Iterator[str]:
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
        if (factor := fitted(centred(x, everywhere), centred(errors, everywhere), near)) is not None:
            merged = f"are merged as if {words} was multiplied by {_known_number(1 + factor)}"
            yield f"{begins}: partial results {merged}"
            yield f"partial results of groups of keys {merged}"
    yield f"{begins}: partial results are merged with wrong factors"
    yield "the weights are right within groups of keys, and not between them: partial results are merged with wrong factors"


def _cut_scores(seen: ComparedWeights) -> Iterator[str]:
    """Factors on the scores that differ from some keys to others."""
    n, scores, logarithms = seen.got.shape[3], seen.scores, seen.logarithms
    known = seen.shared[..., :1] & seen.shared
    if n < 3 or not known[..., 0].any() or not known[..., 1].any():
        return
    near = 3 * (seen.near + seen.near[..., :1]) + 1e-4
    scores, logarithms = (np.where(known, x, 0.0) for x in (scores, logarithms))
    one, two = (np.where(known[..., 1], x[..., 1] - x[..., 0], 0.0) for x in (scores, logarithms))
    first = fitted(one, two, near[..., 1])
    if first is None:
        return
    wanted = np.where(known, logarithms - logarithms[..., :1] + first * scores[..., :1], 0.0)
    found = [fitted(scores[..., j], wanted[..., j], near[..., j]) for j in range(n)]
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


def _of_numbers(seen: ComparedWeights) -> Iterator[str]:
    """Numbers of queries and keys whose products do not count."""
    if (pair := seen.products) is None or (d := pair[0].shape[-1]) * seen.got.size > 2e6:
        return
    q, k, scale = *pair, seen.applied.right.scale
    parts = scale * q[..., :, None, :] * k[..., None, :, :]  # [b, h, q, k, d]
    if parts.shape[:4] != seen.got.shape:
        return
    others = np.where(np.isfinite(seen.scores), seen.scores - parts.sum(axis=-1), 0.0)
    wanted = centred(seen.logarithms - others, seen.shared)[seen.shared]
    x = np.stack([centred(parts[..., i], seen.shared)[seen.shared] for i in range(d)], axis=-1)
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


def _clipped(seen: ComparedWeights) -> Iterator[str]:
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
        error = centred(logarithms, known) - centred(np.clip(scores, first, last), known)
        if (np.abs(error) <= 3 * seen.near).all():
            yield words


def _other_keys(seen: ComparedWeights) -> Iterator[str]:
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
    shown = [f"{key_in_words(j, n)} of item {item} has the scores of {key_in_words(at, n)} of item {other}" for item, j, other, at in told]
    if told:
        yield ", ".join(shown[:MOST_LISTED]) + and_others(len(shown))


def _where(seen: ComparedWeights) -> Iterator[str]:
    """Where the wrong scores are, if they are not everywhere."""
    for words in descriptions(seen.wrong, seen.shared, seen.applied.right.case):
        if not words.startswith("all keys") and words != first_of(seen.wrong):
            yield f"the weights of {words} are wrong beside the others, which are right up to a factor of each row"
