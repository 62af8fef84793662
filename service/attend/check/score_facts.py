"""What is wrong with the scores whose exponentials the applied weights are, up to a factor of each row.

The errors of the scores are what they have too much, which most sentences say as numbers times something that is known of a pair: its
score, its distance, or the terms of its score. The numbers are those of heads, of keys, or of places in the queries and keys, which least
squares find and all pairs confirm.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from attend.check.compared_weights import ComparedWeights, by_head, by_key, by_place, centred, in_digits
from attend.check.pairs import MOST_LISTED, TILES, descriptions, first_of, key_in_words, listed, shortened, verb_after

FEWEST = 4  # numbers that show that a key has the scores of another one


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
    for statements in (_factors, _distances, _weights_of_keys, _scores_of_keys, _merged, _places, _clipped, _other_keys, _where):
        found = [*statements(seen)]
        yield from found
        if found:
            return


def _factors(seen: ComparedWeights) -> Iterator[str]:
    """Another factor on the scores."""
    if seen.scaled is not None:
        yield seen.scaled[0]


def _distances(seen: ComparedWeights) -> Iterator[str]:
    """A bias that is linear in the place of the key."""
    if (slopes := by_head(np.arange(seen.got.shape[3]) + np.zeros(seen.got.shape), seen.errors, seen)) is not None:
        yield f"{in_digits(slopes)} times the place of the key is added to the scores"


def _weights_of_keys(seen: ComparedWeights) -> Iterator[str]:
    """Scores that are wrong by the same number for some keys and all queries."""
    wrong = np.asarray(seen.wrong.any(axis=(0, 1, 2)))
    if wrong.sum() > wrong.size // 2 or (added := by_key(np.ones(seen.got.shape), seen.errors, seen)) is None:
        return
    factors = np.exp(added - np.nanmedian(added[~wrong]))[wrong]
    if len({f"{round(x, 6):.4g}" for x in factors}) == 1:
        for words in descriptions(np.broadcast_to(wrong, seen.got.shape), seen.shared, seen.applied.right.case):
            yield f"{words} ha{'s' if verb_after(words) == 'is' else 've'} {in_digits(factors)} times the weight beside the others"


def _scores_of_keys(seen: ComparedWeights) -> Iterator[str]:
    """Factors on the scores that differ from some keys to others."""
    n = seen.got.shape[3]
    if (factors := by_key(seen.scores, seen.logarithms, seen)) is None or np.isnan(factors).any():
        return
    begins = [0, *(np.flatnonzero(np.abs(np.diff(factors)) > 1e-3) + 1).tolist(), n]
    if len(begins) == 3 and abs(factors[0] - 1) < 1e-3:
        yield f"the scores of the keys from {begins[1]} on are multiplied by {in_digits(factors[-1:])}"
    for tile in TILES:
        if n > tile and np.allclose(factors, factors[tile] ** (np.arange(n) // tile), rtol=1e-3):
            yield f"the scores are multiplied by {in_digits(factors[[tile]])} once more in each block of {tile} keys"
    if len(begins) <= n // 2:
        parts = pairwise(begins)
        shown = [f"{in_digits(factors[[i]])} for {listed([*range(i, end)], 'key')}" for i, end in parts]
        yield f"the scores are multiplied by {', '.join(shown[:MOST_LISTED])}{', …' if len(shown) > MOST_LISTED else ''}"


def _merged(seen: ComparedWeights) -> Iterator[str]:
    """Groups of keys within which the weights are right, and not between them, as after a wrong merge of partial results."""
    step = np.abs(np.diff(seen.errors, axis=-1)) > seen.near[..., 1:] + seen.near[..., :-1]
    begins = [0, *(np.flatnonzero(step.any(axis=(0, 1, 2))) + 1).tolist(), seen.got.shape[3]]
    groups = [slice(i, end) for i, end in pairwise(begins)]
    if not seen.shared.all() or not 1 < len(groups) <= begins[-1] - 2 or sum(x.stop - x.start > 1 for x in groups) < 2:
        return
    ranges = [f"within {listed([*range(x.start, x.stop)], 'key')}" for x in groups]
    shown = ", ".join(ranges[:MOST_LISTED]) + (", and so on" if len(ranges) > MOST_LISTED else "")
    right = f"the weights are right {shown}, and not between these: partial results"
    largest, sums = np.empty(seen.scores.shape), np.empty(seen.scores.shape)
    for x in groups:
        scores = seen.scores[..., x]
        largest[..., x] = scores.max(axis=-1, keepdims=True)
        sums[..., x] = largest[..., x] + np.log(np.exp(scores - largest[..., x]).sum(axis=-1, keepdims=True))
    for words, of_groups in (("log-sum-exp", sums), ("maximum", largest)):
        if (factors := by_head(of_groups, seen.errors, seen)) is not None:
            merged = f"are merged as if the {words} of each was multiplied by {in_digits(1 + factors)}"
            yield f"{right} {merged}"
            yield f"partial results of groups of keys {merged}"
    yield f"{right} are merged with wrong factors"
    yield "the weights are right within groups of keys, and not between them: partial results are merged with wrong factors"


def _places(seen: ComparedWeights) -> Iterator[str]:
    """Places in queries and keys whose products do not count."""
    if (pair := seen.products) is None or (d := pair[0].shape[-1]) * seen.got.size > 2e6:
        return
    q, k = (np.moveaxis(x, -1, 0) for x in pair)
    terms = seen.applied.right.scale * q[..., None] * k[..., None, :]  # [d, b, h, q, k]
    if terms.shape[1:] != seen.got.shape or (factors := by_place(terms, seen.logarithms - seen.scores + terms.sum(axis=0), seen)) is None:
        return
    lost = np.abs(factors) < 0.01
    if lost.any() and (lost | (np.abs(factors - 1) < 0.01)).all():
        first = int(np.flatnonzero(lost)[0])
        if lost[first:].all():
            yield f"only the first {first} numbers of each query and key count in the scores"
        yield f"{listed(np.flatnonzero(lost).tolist(), 'number')} of queries and keys, of {d}, do not count in the scores"


def _clipped(seen: ComparedWeights) -> Iterator[str]:
    """Scores that count as a bound that they exceed, or fall below."""
    known, rows = seen.shared, seen.shared.sum(axis=-1) > 1
    if not rows.any():
        return
    ends = [
        (x.max(axis=-1, initial=-np.inf, where=known)[rows], x.min(axis=-1, initial=np.inf, where=known)[rows])
        for x in (seen.scores, seen.logarithms)
    ]
    (top, low), (largest, smallest) = ends
    upper, lower = float((low + largest - smallest).max()), float((top - largest + smallest).min())
    both = float(np.median(np.abs((seen.scores + seen.errors)[seen.wrong])))
    for words, first, last in (
        (f"scores above {upper:.4g} count as {upper:.4g}", -np.inf, upper),
        (f"scores below {lower:.4g} count as {lower:.4g}", lower, np.inf),
        (f"the scores are clipped to ±{both:.4g}", -both, both),
    ):
        if (np.abs(centred(seen.logarithms, known) - centred(np.clip(seen.scores, first, last), known)) <= 3 * seen.near).all():
            yield words


def _other_keys(seen: ComparedWeights) -> Iterator[str]:
    """Keys whose scores are those of other keys, maybe of other items."""
    wrong, n = np.flatnonzero(seen.wrong.any(axis=(0, 1, 2))), seen.got.shape[3]
    if (pair := seen.products) is None or not 0 < len(wrong) <= n // 2:
        return
    q, k = pair
    if len(k) ** 2 * q.shape[2] * k.size > 1e7 or k.shape[2] != n:
        return
    products = seen.applied.right.scale * np.einsum("bhid,chjd->bcjhi", q, k)
    shown = []
    for item, j in np.argwhere(seen.wrong.any(axis=(1, 2))):
        known = seen.shared[item, ..., j]
        implied = products[item, item, j] + np.where(known, seen.errors[item, ..., j], 0.0)
        far = np.abs(np.where(known, products[item] - implied, 0.0)).max(axis=(2, 3))
        if known.sum() < FEWEST or not len(found := np.argwhere(far <= 1e-4)):
            return
        other, at = found[0]
        shown.append(f"{key_in_words(int(j), n)} of item {item} has the scores of {key_in_words(int(at), n)} of item {other}")
    yield shortened(shown)


def _where(seen: ComparedWeights) -> Iterator[str]:
    """Where the wrong scores are, if they are not everywhere."""
    for words in descriptions(seen.wrong, seen.shared, seen.applied.right.case):
        if not words.startswith("all keys") and words != first_of(seen.wrong):
            yield f"the weights of {words} are wrong beside the others, which are right up to a factor of each row"
