"""The search for the known mistakes that explain a candidate's numbers.

Mistakes are named only if the reference, with these mistakes made in it, gives the candidate's numbers in every case, each within its
tolerance, and also those of the candidate in other sizes. Single mistakes are tried first, then pairs. Of a pair, each alone has to change
the numbers of a case. If several explain all cases, more cases are drawn, until one is left or they never differ.

Of the tens of thousands of pairs, few are computed: `parts` of what a candidate returns, such as its weights or the output of a single row,
depend on few steps, and so show in which of them its mistakes are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice, product

import numpy as np

from attend.check.changes import Impossible
from attend.check.computation import QUERIES_OF, Computation, Expected
from attend.check.fitting import fitted_factors, fitted_scale, ratio_of_scales, scale_fitted_to_few
from attend.check.low_precision import HALF
from attend.check.mistakes import MISTAKES, Mistake
from attend.tensors import Array

Named = tuple[str, Mistake]
Mistakes = tuple[Named, ...]
PRECISION = frozenset(MISTAKES["precision"])
CONFIRMATIONS = 6  # further cases that an explanation must give, too
FORMULAS = frozenset(  # too many to combine if no part separates them
    ("rope formula", "rope frequencies", "norm formula", "products", "precision")
)
COMBINED = frozenset(("rope formula", "rope turn", "norm formula"))  # of these, all
TYPICAL = 2  # times the root mean square of the changes by rounding is that of a half-precision candidate's errors at most
MOST_NOISE = (
    0.02  # of the largest number: the root mean square of changes by rounding with which a half-precision case tells mistakes apart
)
UNEQUAL = frozenset(  # what mistakes are about after which equal keys are not equal, so that others change their weights
    ("projected", "inputs", "attended", "products", "split", "split of one", "cached rows")
)
NEAR = 1e4  # tolerances within which the effect of rounding on a mistake is computed
MOST_PAIRS = 5000  # that are computed: it bounds the time of a search; usually the parts leave fewer than 1000
MOST_EQUALS = 2  # other mistakes with the same numbers that are named
DOUBLED: Named = ("", Mistake(lambda c: c.with_scale(2 * c.spec.scale), "", ""))  # shows which parts depend on the factor on the scores


@dataclass(frozen=True, slots=True)
class Observation:
    """What a candidate returned for one case: "output" and possibly "attention_weights", and whether that is right."""

    right: Computation
    results: Mapping[str, Array]
    agrees: bool

    @property
    def lacks_queries(self) -> bool:
        """Whether an output has fewer rows than there are queries."""
        return any(got.shape[QUERIES_OF[name]] < self.right.case.query.shape[1] for name, got in self.results.items())

    def part(self, name: str) -> "Observation":
        """One of the results alone."""
        return Observation(self.right, {name: self.results[name]}, self.right.run().agrees(name, self.results[name]))


@dataclass(frozen=True, slots=True)
class OtherSizes:
    """What a candidate returned in other sizes. `alone`: the heads and widths that it has, if those could not be changed."""

    observed: Sequence[Observation]
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The mistakes that give a candidate's numbers in every case; empty if no known ones do. `equals` give the same numbers there."""

    mistakes: tuple[str, ...] = ()
    equals: tuple[tuple[str, ...], ...] = ()
    arithmetic: tuple[tuple[str, str], ...] = ()  # of each of the mistakes: what the candidate computes, and what is expected
    half: str = ""  # the candidate's dtype, if it is half precision
    alone: str = ""  # the only heads and widths in which the candidate has these mistakes for sure

    def __bool__(self) -> bool:
        return bool(self.mistakes)

    def __str__(self) -> str:
        if not self.mistakes:
            return ""
        same = "".join(f"; the same numbers come out when {_joined(other)}" for other in self.equals)
        shown = f", as far as {self.half} shows," if self.half else ""
        sizes = f" (tried with {self.alone} alone)" if self.alone else ""
        return f"this is what comes out{shown} when {_joined(self.mistakes)}{same}{sizes}"


def _joined(mistakes: Sequence[str]) -> str:
    return ", and when ".join(mistakes)


def explain(
    observed: Sequence[Observation],
    further: Iterator[Observation],
    parts: Iterable[Observation] = (),
    elsewhere: Callable[[], OtherSizes] | None = None,
) -> Explanation:
    """The fewest known mistakes, one or two, that give the observed numbers in every case, and in other sizes (`elsewhere`).

    Where several explain all cases, `further` cases are tried until they differ. Those that never differ are named together. `parts`: cases
    on which most mistakes change nothing.
    """
    probe = next(x for x in observed if not x.agrees)  # excludes most mistakes
    others = [x for x in observed if x is not probe]
    if not any(np.isfinite(result).any() for x in observed for result in x.results.values()):
        return Explanation()  # whatever makes NaN would explain it
    search, more = _Search(probe, others, parts), _Repeatable(further)
    with np.errstate(all="ignore"):
        # Mistakes that show only in long calls, or with further arguments, are searched alone: no part tells what two do.
        beside = (search.pairs, search.factors_beside) if any(not x.agrees and x.right.case.group == "short" for x in observed) else ()
        for tried in (search.singles, search.factors, search.ratios, *beside):
            found = [mistakes for mistakes in tried() if all(_may_be(mistakes, x) for x in others) and _each_shows(mistakes, observed)]
            sizes = elsewhere() if found and elsewhere is not None else None
            found = found if sizes is None else _confirmed(found, sizes.observed)
            if found := _told_apart(found, iter(more)):
                first, *equals = (tuple(name for name, _ in mistakes) for mistakes in found)
                arithmetic = tuple(mistake.arithmetic(probe.right) for _, mistake in found[0])
                half = probe.right.dtype if probe.right.dtype in HALF else ""
                return Explanation(first, tuple(equals[:MOST_EQUALS]), arithmetic, half, "" if sizes is None else sizes.alone)
    return Explanation()


class _Repeatable:
    """Observations that are made when they are first asked for, and kept."""

    def __init__(self, source: Iterable[Observation]) -> None:
        self.source, self.made = iter(source), list[Observation]()

    def __iter__(self) -> Iterator[Observation]:
        yield from self.made
        for x in self.source:
            self.made.append(x)
            yield x


@dataclass(frozen=True, slots=True)
class _Tried:
    """A mistake that changes the first wrong case: what it is about, and whether it alone gives what was observed there."""

    subjects: frozenset[str]
    mistake: Named
    gives: bool
    vague: bool  # whether it enlarges rounding so much that this case does not say


@dataclass(frozen=True, slots=True)
class _OnPart:
    """A mistake made in a part: whether it alone gives what was observed, and whether it changes nothing there."""

    gives: bool
    keeps: bool
    changed: Computation | None  # None: it cannot be made in these shapes, alone
    spoilt: int | None = 0  # which rows that are right in what was observed it changes, one bit each; None: unknown


class _Search:
    """The mistakes that give the numbers of the first wrong case, `probe`."""

    def __init__(self, probe: Observation, others: Sequence[Observation], parts: Iterable[Observation]) -> None:
        self.probe, self._of_small_cases = probe, parts
        possible = [(subjects, mistake, changed) for subjects, mistake in _known() if (changed := _changed(mistake, probe)) is not None]
        names = {name for _, (name, _), _ in possible}
        self.here = [
            _Tried(subjects, mistake, gives, not gives and bool(_results_agree(changed, probe, vague=True)))
            for subjects, mistake, changed in possible
            if (gives := _results_agree(changed, probe)) is not None
        ]
        self.elsewhere = [
            (subjects, mistake)
            for subjects, mistake in _known()
            if mistake[0] not in names and any(_changed(mistake, x) is not None for x in others)
        ]

    @cached_property
    def fitted(self) -> Named | None:
        """Another factor on the scores that gives the numbers."""
        fitted = fitted_scale(self.probe.right, self.probe.results)
        return fitted if fitted and _gives((fitted,), self.probe) else None

    @cached_property
    def parts(self) -> list[Observation]:
        """What depends on few steps: the weights, if the candidate returns them, and cases of few rows or equal keys."""
        of_probe = [self.probe.part("attention_weights")] if "attention_weights" in self.probe.results else []
        return [*of_probe, *self._of_small_cases]

    def singles(self) -> Iterator[Mistakes]:
        """One known mistake."""
        yield from ((x.mistake,) for x in self.here if x.gives)
        yield from ((x.mistake,) for x in self.here if x.vague and self._gives_a_part(x.mistake))

    def factors(self) -> Iterator[Mistakes]:
        """Another factor on the scores or after them."""
        if self.fitted:
            yield (self.fitted,)
        fitted = fitted_factors(self.probe.right, self.probe.results)
        yield from ((factor,) for factor in fitted if _gives((factor,), self.probe))

    def ratios(self) -> Iterator[Mistakes]:
        """Another factor on the scores in proportion to the right one."""
        if self.fitted:
            right = self.probe.right
            yield (ratio_of_scales(self.fitted[1].change(right).spec.scale, right.spec.scale, right.dtype),)

    def _gives_a_part(self, mistake: Named) -> bool:
        """Whether a mistake gives a wrong part for certain, and may give all others."""
        wrong = [part for part in self.parts if not part.agrees]
        return all(_may_be((mistake,), part) for part in self.parts) and any(_gives((mistake,), part) for part in wrong)

    def pairs(self) -> Iterator[Mistakes]:
        """Two mistakes about different things. The second may change nothing in this case."""
        for x, (subjects, other) in product([x for x in self.here if x.gives], self.elsewhere):
            if x.subjects.isdisjoint(subjects):
                yield x.mistake, other
        if self.fitted:
            yield from ((self.fitted, other) for subjects, other in self.elsewhere if "scale" not in subjects)
        possible = (
            (one, two, of_one, of_two)
            for (one, of_one), (two, of_two) in combinations(self._on_parts, 2)
            if one.subjects.isdisjoint(two.subjects) and self._may_give(one, two, of_one, of_two)
        )
        for one, two, of_one, of_two in islice(possible, MOST_PAIRS):
            if self._gives_parts(two.mistake, of_one, of_two) and _gives((one.mistake, two.mistake), self.probe):
                yield one.mistake, two.mistake

    def factors_beside(self) -> Iterator[Mistakes]:
        """Another factor on the scores, and a known mistake."""
        of_scale = [_on_part(DOUBLED, part, part.right.run()) for part in self.parts]
        for x, of_x in self._on_parts:
            both = [(one, scaled) for part, one, scaled in zip(self.parts, of_x, of_scale, strict=True) if not x.subjects & _mixing(part)]
            kept = all((one.gives or not scaled.keeps) and _spoil_alike(one, scaled) for one, scaled in both)
            if kept and "scale" not in x.subjects and (fitted := self._fitted_beside(x.mistake, of_x)):
                yield fitted, x.mistake

    @cached_property
    def _on_parts(self) -> list[tuple[_Tried, list[_OnPart]]]:
        """Each mistake that changes the first wrong case, and what it does to each part.

        Other positions of RoPE are last: with a wrong rotation they are rotated by that.
        """
        here = sorted(self.here, key=lambda x: "rope turn" in x.subjects)
        parts = [(part, part.right.run()) for part in self.parts]
        return [(x, [_on_part(x.mistake, *part) for part in parts]) for x in here]

    def _may_give(self, one: _Tried, two: _Tried, of_one: Sequence[_OnPart], of_two: Sequence[_OnPart]) -> bool:
        """Whether both may give what was observed: a mistake that keeps a part leaves it to the other to give it.

        That is not so of equal keys if the softmax runs over something else than the keys or other rows take their place, nor of a row of
        zeros if a norm changes places with RoPE.
        """
        subjects = one.subjects | two.subjects
        both = [(x, y) for part, x, y in zip(self.parts, of_one, of_two, strict=True) if not subjects & _mixing(part)]
        if not all((y.gives or not x.keeps) and (x.gives or not y.keeps) and _spoil_alike(x, y) for x, y in both):
            return False
        return any(x.keeps != y.keeps for x, y in both) or subjects.isdisjoint(FORMULAS) or subjects <= COMBINED

    def _gives_parts(self, two: Named, of_one: Sequence[_OnPart], of_two: Sequence[_OnPart]) -> bool:
        """Whether a pair gives the parts that both change. They are small, and exclude most pairs."""
        changed = [(part, x.changed) for part, x, y in zip(self.parts, of_one, of_two, strict=True) if not (x.keeps or y.keeps)]
        return all(one is None or _gives((two,), part, vague=True, after=one) for part, one in changed)

    def _fitted_beside(self, mistake: Named, of_mistake: Sequence[_OnPart]) -> Named | None:
        """Another factor on the scores that, together with the mistake, gives the numbers."""
        with suppress(ValueError, IndexError):
            if "attention_weights" in self.probe.results:
                fitted = fitted_scale(mistake[1].change(self.probe.right), self.probe.results)
            else:
                wrong = ((part, x.changed) for part, x in zip(self.parts, of_mistake, strict=True) if not part.agrees)
                fitted = scale_fitted_to_few((changed, part.results["output"]) for part, changed in wrong if changed is not None)
            return fitted if fitted and _gives((fitted, mistake), self.probe) else None
        return None


def _mixing(part: Observation) -> frozenset[str]:
    """What mistakes are about that make others change a part which they keep alone."""
    name = part.right.case.name
    if name.startswith("equal"):
        return frozenset({"axis"}) | UNEQUAL
    if name == "one row" and not part.agrees:
        return frozenset({"axis"})
    return frozenset({"norm order"} if name == "a row of zeros" else ())


def _known() -> Iterator[tuple[frozenset[str], Named]]:
    """What is changed, and the mistake."""
    for changed, mistakes in MISTAKES.items():
        subjects = frozenset(changed.split(" + "))
        yield from ((subjects, mistake) for mistake in mistakes.items())


def _changed(mistake: Named, observed: Observation) -> Computation | None:
    """The computation with a mistake; None if it changes nothing, or cannot be made in these shapes."""
    with suppress(ValueError, IndexError):
        changed = mistake[1].change(observed.right)
        return None if changed is observed.right else changed
    return None


def _on_part(mistake: Named, part: Observation, right: Expected) -> _OnPart:
    """A mistake made in a part, for which the reference gives `right`."""
    unchanged = _OnPart(part.agrees, keeps=True, changed=part.right)
    try:
        changed = mistake[1].change(part.right)
        if changed is part.right:
            return unchanged
        outcomes = list(changed.outcomes(part.results))
    except Impossible:
        return unchanged
    except (ValueError, IndexError):
        return _OnPart(True, False, None, None)
    keeps = all(_equal(outcomes[0].outputs[name], right.outputs[name]) for name in part.results)
    gives = any(x.is_vague or _agrees(changed, x, part.results) for x in outcomes)
    return _OnPart(gives, keeps, changed, None if any(x.is_vague for x in outcomes) else _spoilt_rows(outcomes, part, right))


def _spoilt_rows(outcomes: Sequence[Expected], part: Observation, right: Expected) -> int:
    """The rows of queries that are right in what was observed, and wrong in every outcome; one bit each."""
    spoilt = 0
    for name, got in part.results.items():
        if any(x[name].shape != got.shape for x in (right.outputs, *(outcome.outputs for outcome in outcomes))):
            continue
        rows = right.right_rows(name, got)
        for outcome in outcomes:
            rows = rows & ~right.right_rows(name, outcome.outputs[name])
        spoilt = spoilt << len(rows) | sum(1 << i for i, row in enumerate(rows) if row)
    return spoilt


def _spoil_alike(one: _OnPart, two: _OnPart) -> bool:
    """Whether two mistakes change the same rows of those that are right: one alone would leave such a row wrong."""
    return one.spoilt is None or two.spoilt is None or one.spoilt == two.spoilt


def _results_agree(changed: Computation, observed: Observation, vague: bool = False) -> bool | None:
    """Whether a computation gives what was observed; None for shapes for which it cannot be computed."""
    results = observed.results
    with suppress(ValueError, IndexError):
        return any(
            _agrees(changed, x, results, vague)
            for x in changed.outcomes(results)
            if not observed.lacks_queries or all(x.outputs[name].shape == got.shape for name, got in results.items())
        )
    return None


def _agrees(changed: Computation, expected: Expected, results: Mapping[str, Array], vague: bool = False) -> bool:
    """Whether a computation has these results. Roundings may change it by more than the tolerance.

    `vague`: also if that excludes hardly any results.
    """
    wrong = next((name for name, got in results.items() if not expected.agrees(name, got)), None)
    if expected.is_vague and (vague or changed.dtype not in HALF):
        return vague and wrong is None
    if wrong is None:
        return changed.dtype not in HALF or _errors_are_typical(changed, expected, results)
    near = expected.widened({name: NEAR * expected.largest_tolerance(name) for name in expected.tolerances})
    if near is expected or not near.agrees(wrong, results[wrong]) or not all(near.agrees(name, got) for name, got in results.items()):
        return False
    wider = expected.widened(changed.effect_of_rounding())
    return all(wider.agrees(name, got) for name, got in results.items())


def _errors_are_typical(changed: Computation, expected: Expected, results: Mapping[str, Array]) -> bool:
    """Whether the errors of a half-precision candidate are on average as small as those that rounding makes.

    The largest of them may be far larger, so that two mistakes may both give the numbers within the tolerance. Where rounding changes too
    much, they are not.
    """
    noise = changed.noise()
    return all(
        noise[name] <= MOST_NOISE * expected.largest[name]
        and expected.typical_error(name, got) <= TYPICAL * noise[name] + 1e-6 * expected.largest[name]
        for name, got in results.items()
    )


def _equal(x: Array, y: Array) -> bool:
    return x.shape == y.shape and np.allclose(x, y, rtol=1e-9, atol=1e-12)


def _each_shows(mistakes: Mistakes, observed: Sequence[Observation]) -> bool:
    """Whether each of several mistakes alone changes the numbers of a case. One that never does, such as a bias of the keys without a mask,
    is no reason for what the others compute."""
    return len(mistakes) == 1 or all(any(_shows(mistake, x) for x in observed) for mistake in mistakes)


def _shows(mistake: Named, observed: Observation) -> bool:
    """Whether a mistake changes what the reference computes for a case."""
    if (changed := _changed(mistake, observed)) is None:
        return False
    right = observed.right.run()
    try:
        return any(not _equal(x, right.outputs[name]) for name, x in changed.run().outputs.items())
    except (ValueError, IndexError):
        return True


def _confirmed(found: list[Mistakes], observed: Sequence[Observation]) -> list[Mistakes]:
    """Those that give what was observed in other sizes, where some of it has to be wrong.

    Errors of few digits grow with the length of a sum and depend on its order, so other widths say nothing about those.
    """
    if all(x.agrees for x in observed):
        return []
    return [mistakes for mistakes in found if mistakes[0][0] in PRECISION or all(_may_be(mistakes, x) for x in observed)]


def _told_apart(found: list[Mistakes], further: Iterator[Observation]) -> list[Mistakes]:
    """Those that also give the numbers of a few further cases; of several, of all further cases until one is left."""
    confirmations = 0
    while found and (confirmations < CONFIRMATIONS or len(found) > 1):
        if (x := next(further, None)) is None:
            break
        found = [mistakes for mistakes in found if _may_be(mistakes, x)]
        confirmations += 1
    return found


def _may_be(mistakes: Mistakes, observed: Observation) -> bool:
    """Whether these mistakes give what was observed, or are so sensitive to rounding in this case that it says nothing about them.

    Errors of a sum in few digits grow with its length, so a long case says nothing about those.
    """
    if observed.right.case.group == "long" and not observed.agrees and any(name in PRECISION for name, _ in mistakes):
        return True
    return _gives(mistakes, observed, vague=True)


def _gives(mistakes: Mistakes, observed: Observation, vague: bool = False, after: Computation | None = None) -> bool:
    """Whether the reference with these mistakes returns what was observed. A mistake that a case has no room for changes nothing there.

    `after`: the computation with earlier mistakes.
    """
    changed = after or observed.right
    try:
        for _, mistake in mistakes:
            with suppress(Impossible):
                changed = mistake.change(changed)
    except (ValueError, IndexError):  # shapes for which these mistakes cannot be made
        return False
    return observed.agrees if changed is observed.right else bool(_results_agree(changed, observed, vague))
