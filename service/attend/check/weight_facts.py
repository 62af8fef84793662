"""What the weights that a candidate applies show beside the right ones: facts that are read off the numbers, each checked on all pairs.

First, which keys get no weight that should get some, and which get some that should get none; then what the weights are times on the other
pairs: the logarithm of that is the error of a score, but for a number of each row, which the softmax leaves open.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from attend.check.algebra.orders import ORDERS, SAME
from attend.check.applied_weights import AppliedWeights
from attend.check.compared_weights import ComparedWeights, in_digits
from attend.check.pairs import TILES, descriptions, key_in_words, listed, shortened, verb_after
from attend.check.score_facts import facts_of_gained_scores, facts_of_scores
from attend.tensors import Array

Sentences = dict[str, list[str]]  # what they are about -> alternatives that are true, the plainest first: what guesses at a tile comes last


def facts(applied: Sequence[AppliedWeights]) -> tuple[str, ...]:
    """The plainest sentence about each subject that is true of all these wrong cases, or else of the first, which is named then."""
    first, *others = [_sentences(x) for x in applied]
    where = f" (in the case “{applied[0].right.case.name}”)"
    general = {subject: [x for x in told if all(x in other.get(subject, ()) for other in others)] for subject, told in first.items()}
    return tuple(general[subject][0] if general[subject] else told[0] + where for subject, told in first.items())


def _sentences(applied: AppliedWeights) -> Sentences:
    seen = ComparedWeights(applied)
    found = {"masks": [*_masks(seen)]}
    if not found["masks"]:
        found |= {"lost": [*_lost(seen)], "gained": [*_gained(seen)]}
    if not applied.has_numbers:
        return {subject: sentences for subject, sentences in found.items() if sentences}
    found["order"] = [*_orders(seen)]
    if not found["order"] and seen.is_softmax:
        found["scores"] = [*facts_of_scores(seen)]
        found["gained scores"] = [*facts_of_gained_scores(seen)]
    found["sums"] = [*_sums(seen)] if applied.of_others is None else []
    found["others"] = [*_of_others(applied)]
    return {subject: sentences for subject, sentences in found.items() if sentences}


def _masks(seen: ComparedWeights) -> Iterator[str]:
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
    yield f"heads have the mask of another item: {shortened(moved)}"
    yield "heads have the mask of another item"


def _of_others(applied: AppliedWeights) -> Iterator[str]:
    """Which values of other items and heads get weight."""
    if applied.of_others is None:
        return
    has = applied.of_others > 10 * applied.noise
    n, used = applied.weights.shape[3], list[str]()
    for b, c in np.argwhere(has.any(axis=(1, 2, 4, 5))):
        keys = np.flatnonzero(has[b, :, :, c].any(axis=(0, 1, 2))).tolist()
        words = key_in_words(keys[0], n) if len(keys) == 1 else "all keys" if len(keys) == n else listed(keys, "key")
        used += [f"those of {words} of item {c} in item {b}"] if b != c else []
    if used:
        yield f"values of other items get weight: {shortened(used)}"
        yield "values of other items get weight"


def _lost(seen: ComparedWeights) -> Iterator[str]:
    """Which keys get no weight that should get some."""
    for words in descriptions(seen.lost, seen.weighty, seen.applied.right.case):
        yield f"{words} {verb_after(words)} left out"


def _gained(seen: ComparedWeights) -> Iterator[str]:
    """Which keys get weight that should get none."""
    for words in descriptions(seen.gained, seen.blocked, seen.applied.right.case):
        yield f"{words.replace('all keys', 'all blocked keys', 1)} {verb_after(words)} seen and should not be"


def _orders(seen: ComparedWeights) -> Iterator[str]:
    """Whether the weights are those of other heads, items, queries or keys."""
    got, right = seen.got, seen.right
    if got.shape[2] == got.shape[3] and _same(got, right.swapaxes(2, 3)):
        yield "the weights are transposed: that of query i and key j is that of query j and key i"
    for axis, name, several in ((1, "head", "heads"), (0, "item", "items"), (2, "query", "queries"), (3, "key", "keys")):
        places = _places(np.moveaxis(got, axis, 0), np.moveaxis(right, axis, 0))
        if places is None:
            continue
        for words, (_, order) in (SAME | ORDERS).items():
            if places == [*order(len(places))]:
                same = f"all {several} have the weights of the {words}"
                yield same if words in SAME else f"the weights of the {several} are in another order: {words}"
        moved = [f"{name} {i} has the weights of {name} {j}" for i, j in enumerate(places) if i != j]
        yield shortened(moved)


def _same(one: Array, two: Array) -> bool:
    return bool((np.abs(one - two) <= 1e-5 * np.maximum(1e-3, np.maximum(np.abs(one), np.abs(two)))).all())


def _places(got: Array, right: Array) -> list[int] | None:
    """For each part of the first axis the part of `right` that it equals; None if one equals none, or all are in their places."""
    n = len(got)
    if n < 2 or got.size * n > 3e7:
        return None
    found = list[int]()
    for i in range(n):
        if (place := next((j for j in (i, *range(n)) if _same(got[i], right[j])), None)) is None:
            return None
        found.append(place)
    return None if found == [*range(n)] else found


def _sums(seen: ComparedWeights) -> Iterator[str]:
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


def _added(seen: ComparedWeights) -> Iterator[str]:
    """What the sums of the rows have beside the exponentials of the scores: [b, h, q], if it is the same in each row of a head."""
    counts = (seen.got > 0) & np.isfinite(seen.unmasked)
    logarithm = np.where(seen.shared, seen.scores - seen.logarithms, np.nan)
    total = np.exp(np.nanmean(np.where(seen.rows, logarithm, 0.0), axis=-1))
    added = total - np.where(counts, np.exp(np.where(counts, seen.unmasked, 0.0)), 0.0).sum(axis=-1)
    by_head, n = np.moveaxis(added, 1, 0).reshape(added.shape[1], -1), seen.got.shape[3]
    near = 1e-4 * total.max()
    if (np.ptp(by_head, axis=1) > near).any():
        return
    numbers, more = np.median(by_head, axis=1), _logits_of_heads(seen)
    if more is not None and (numbers > 0).all():
        name, logits = more
        wrong = np.log(numbers)
        factor = float(wrong @ logits) / float(logits @ logits)
        if (np.abs(wrong - factor * logits) <= 1e-2).all():
            yield f"the logits of the {name} are multiplied by {factor:.4g}"
        yield f"the logits of the {name} are as if they were {in_digits(wrong)}"
    count = round(float(numbers[0]))
    if count > 0 and (np.abs(numbers - count) <= near).all():
        also = "part in the softmax, with a score of zero"
        yield f"{count} further keys that are not there take {also}" if count > 1 else f"a further key that is not there takes {also}"
        for tile in TILES:
            if count < tile and (n + count) % tile == 0:
                yield f"further keys, as many as fill the last tile of {tile}, that are not there take {also}"


def _logits_of_heads(seen: ComparedWeights) -> tuple[str, Array] | None:
    """The weight of the layer that adds a number for each head to the sums of exponentials, with its name; None if it has none."""
    right = seen.applied.right
    reads = (name for run in right.steps() if "log_sum_exp" in run.step.reads for name in run.step.reads)
    name = next((x for x in reads if x in right.weights and right.weights[x].shape == (right.spec.num_heads,)), None)
    return None if name is None else (name, right.weights[name])
