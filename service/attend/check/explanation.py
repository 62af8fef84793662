"""The search for the mistake that explains a candidate's numbers: a known one (`mistakes/`), a change of the first wrong step
(`algebra/`), a constant factor (`fitting.py`), or a change of another step.

A mistake is named only if the reference, with this mistake made in it, gives the candidate's numbers in every case, each within its
tolerance, and also those of the candidate in other sizes. If several explain all cases, more cases are drawn, until one is left or they
never differ. Of two mistakes, `explain_in_turn` finds the one that shows without a mask and then the one that shows with it. Two that
show in the same calls have no name; the first wrong step says where to look, and the second shows once the first is mended.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import chain

import numpy as np

from attend.check.algebra import changes_of
from attend.check.cases import Repeatable
from attend.check.changes import Impossible
from attend.check.computation import QUERIES_OF, Computation, Expected
from attend.check.fitting import fitted_factors, fitted_scale, ratio_of_scales
from attend.check.low_precision import HALF
from attend.check.mistakes import MISTAKES, Mistake
from attend.check.mistakes.mistake import Named
from attend.check.mistakes.precision import MISTAKES as PRECISION
from attend.tensors import Array

CONFIRMATIONS = 6  # further cases that an explanation must give, too
TYPICAL = 2  # times the root mean square of the changes by rounding is that of a half-precision candidate's errors at most
MOST_NOISE = (
    0.02  # of the largest number: the root mean square of changes by rounding with which a half-precision case tells mistakes apart
)
NEAR = 1e4  # tolerances within which the effect of rounding on a mistake is computed
FEWER = 20  # times fewer pairs than the first wrong case that a case has which is looked at before
MOST_EQUALS = 2  # other mistakes with the same numbers that are named


class Fit(IntEnum):
    """Whether a computation gives what was observed; VAGUE: it does, but roundings may change it so much that hardly any would not."""

    NO, VAGUE, YES = range(3)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a candidate returned for one case: "output" and possibly "attention_weights", and whether that is right."""

    right: Computation
    results: Mapping[str, Array]
    agrees: bool
    known: dict[Mistake, Fit | None] = field(default_factory=dict)  # whether mistakes that were tried before fit
    changes: list[Named] = field(default_factory=list)  # of its steps, once they are made

    @property
    def lacks_queries(self) -> bool:
        """Whether an output has fewer rows than there are queries."""
        return any(got.shape[QUERIES_OF[name]] < self.right.case.query.shape[1] for name, got in self.results.items())

    @property
    def pairs(self) -> int:
        """How many pairs of queries and keys there are."""
        return int(self.right.case.visible.size)

    @property
    def is_unmasked(self) -> bool:
        """Whether it is one call without a mask; the candidate may have a causal one of its own."""
        case = self.right.case
        return not case.chunks and bool((case.mask & case.not_padded).all())

    def beside(self, mistake: Mistake) -> "Observation":
        """The same beside a reference with a mistake in it; unchanged where the mistake cannot be made."""
        with suppress(ValueError, IndexError):
            right = mistake.change(self.right)
            return Observation(right, self.results, _fit(right, self) is not Fit.NO)  # a vague case excludes no other mistake
        return self

    def fit(self, mistake: Mistake) -> Fit | None:
        """Whether the reference with this mistake returns what was observed; None if it changes nothing here."""
        if mistake not in self.known:
            self.known[mistake] = self._try(mistake)
        return self.known[mistake]

    def changes_of_steps(self) -> Iterator[Named]:
        """What may be wrong in any step."""
        if not self.changes:
            self.changes.extend(changes_of(self.right))
        return iter(self.changes)

    def _try(self, mistake: Mistake) -> Fit | None:
        try:
            changed = mistake.change(self.right)
            return None if changed is self.right else _fit(changed, self)
        except Impossible:
            return None
        except (ValueError, IndexError):  # shapes for which the mistake cannot be made
            return Fit.NO


@dataclass(frozen=True, slots=True)
class OtherSizes:
    """What a candidate returned in other sizes. `alone`: the heads and widths that it has, if those could not be changed."""

    observed: Iterable[Observation]
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The mistake that gives a candidate's numbers in every case; empty if no known one does. `equals` give the same numbers there."""

    mistakes: tuple[str, ...] = ()
    equals: tuple[tuple[str, ...], ...] = ()
    arithmetic: tuple[tuple[str, str], ...] = ()  # what the candidate computes, and what is expected
    half: str = ""  # the candidate's dtype, if it is half precision
    alone: str = ""  # the only heads and widths in which the candidate has these mistakes for sure
    made: Mistake | None = None  # the mistake itself

    def __bool__(self) -> bool:
        return bool(self.mistakes)

    def __str__(self) -> str:
        if not self.mistakes:
            return ""
        same = "".join(f"; the same numbers come out when {name}" for (name,) in self.equals)
        shown = f", as far as {self.half} shows," if self.half else ""
        sizes = f" (tried with {self.alone} alone)" if self.alone else ""
        return f"this is what comes out{shown} when {self.mistakes[0]}{same}{sizes}"


def explain(
    observed: Sequence[Observation],
    further: Iterable[Observation],
    elsewhere: Callable[[], OtherSizes] | None = None,
    steps: Collection[str] = (),
) -> Explanation:
    """The mistake that gives the observed numbers in every case, and in other sizes (`elsewhere`).

    Where several explain all cases, `further` cases are tried until they differ. Those that never differ are named together. `steps`: the
    first wrong ones, if they are known.
    """
    probe = next(x for x in observed if not x.agrees)  # excludes most mistakes
    others = [x for x in observed if x is not probe]
    if not any(np.isfinite(result).any() for x in observed for result in x.results.values()):
        return Explanation()  # whatever makes NaN would explain it
    search, more = _Search(probe, others, steps), Repeatable(further)
    with np.errstate(all="ignore"):
        for tried in (search.likely, search.factors, search.ratios, search.elsewhere):
            found = [mistake for mistake in tried() if all(_may_be(mistake, x) for x in others)]
            sizes = elsewhere() if found and elsewhere is not None else None
            found = found if sizes is None else _confirmed(found, sizes.observed)
            if found := _told_apart(found, iter(more)):
                first, *equals = ((name,) for name, _ in found)
                arithmetic = (found[0][1].arithmetic(probe.right),)
                half = probe.right.dtype if probe.right.dtype in HALF else ""
                return Explanation(first, tuple(equals[:MOST_EQUALS]), arithmetic, half, "" if sizes is None else sizes.alone, found[0][1])
    return Explanation()


def explain_in_turn(
    observed: Sequence[Observation], further: Iterable[Observation], elsewhere: Callable[[], OtherSizes]
) -> Sequence[Explanation]:
    """The mistake that gives the numbers of calls without a mask, and the one that, beside it, gives those of the others, if it has a name;
    empty if the first has none, or no call with a mask is wrong besides.
    """
    unmasked, masked = ([x for x in observed if x.is_unmasked == is_unmasked] for is_unmasked in (True, False))
    if all(x.agrees for x in masked) or all(x.agrees for x in unmasked):
        return ()
    more = Repeatable(further)

    def explain_as(observed: Sequence[Observation], seen: Callable[[Iterable[Observation]], Iterator[Observation]]) -> Explanation:
        return explain(observed, seen(more), lambda: replace(elsewhere(), observed=seen(elsewhere().observed)))

    first = explain_as(unmasked, lambda all_cases: (x for x in all_cases if x.is_unmasked))
    if (mistake := first.made) is None:
        return ()
    beside = [x.beside(mistake) for x in masked]
    if all(x.agrees for x in beside):
        return ()
    return (first, explain_as(beside, lambda all_cases: (x.beside(mistake) for x in all_cases)))


class _Search:
    """The mistakes that give the numbers of the first wrong case, `probe`. `steps`: the first wrong ones; empty if none are known."""

    def __init__(self, probe: Observation, others: Sequence[Observation], steps: Collection[str]) -> None:
        self.probe, self.others, self.steps = probe, others, steps
        shortest = min(others, key=lambda x: x.pairs, default=probe)
        self.first = shortest if FEWER * shortest.pairs < probe.pairs else None  # excludes most mistakes in less time than a long case

    @cached_property
    def fitted(self) -> Named | None:
        """Another factor on the scores that gives the numbers; a case that agrees and is not the probe excludes it."""
        if self.first is not None and self.first.agrees:
            return None
        fitted = fitted_scale(self.probe.right, self.probe.results)
        return fitted if fitted and _gives(fitted, self.probe) else None

    def likely(self) -> Iterator[Named]:
        """Changes of the first wrong steps, or of all if those are not known; and the known mistakes."""
        changes = (x for x in self.probe.changes_of_steps() if not self.steps or x[1].step in self.steps)
        return self._that_give(chain(changes, MISTAKES.items()))

    def elsewhere(self) -> Iterator[Named]:
        """Changes of the other steps, which may give the same numbers as what the candidate has there."""
        return self._that_give(x for x in self.probe.changes_of_steps() if self.steps and x[1].step not in self.steps)

    def _that_give(self, mistakes: Iterable[Named]) -> Iterator[Named]:
        """Those that give the numbers; then those that enlarge rounding so much that this case does not say, if another wrong one does."""
        vague = list[Named]()
        for mistake in mistakes:
            if self.first is not None and not _may_be(mistake, self.first):
                continue
            fit = self.probe.fit(mistake[1])
            if fit is Fit.YES:
                yield mistake
            elif fit is Fit.VAGUE:
                vague.append(mistake)
        wrong = [x for x in self.others if not x.agrees]
        yield from (mistake for mistake in vague if any(_gives(mistake, x) for x in wrong))

    def factors(self) -> Iterator[Named]:
        """Another factor on the scores or after them."""
        if self.fitted:
            yield self.fitted
        fitted = fitted_factors(self.probe.right, self.probe.results)
        yield from (factor for factor in fitted if _gives(factor, self.probe))

    def ratios(self) -> Iterator[Named]:
        """Another factor on the scores in proportion to the right one."""
        if self.fitted:
            right = self.probe.right
            yield ratio_of_scales(self.fitted[1].change(right).scale, right.scale, right.dtype)


def _fit(changed: Computation, observed: Observation) -> Fit:
    """Whether a computation gives what was observed. ValueError, IndexError: shapes for which it cannot be computed."""
    results, best = observed.results, Fit.NO
    for x in changed.outcomes(results):
        if not observed.lacks_queries or all(x.outputs[name].shape == got.shape for name, got in results.items()):
            best = max(best, _fit_of_outcome(changed, x, results))
        if best is Fit.YES:
            break
    return best


def _fit_of_outcome(changed: Computation, expected: Expected, results: Mapping[str, Array]) -> Fit:
    """The same of one of the outcomes of a computation. Roundings may change it by more than the tolerance."""
    wrong = next((name for name, got in results.items() if not expected.agrees(name, got)), None)
    otherwise = Fit.VAGUE if expected.is_vague and wrong is None else Fit.NO
    if expected.is_vague and changed.dtype not in HALF:
        return otherwise
    if wrong is None:
        return Fit.YES if changed.dtype not in HALF or _errors_are_typical(changed, expected, results) else otherwise
    near = expected.widened({name: NEAR * expected.largest_tolerance(name) for name in expected.tolerances})
    if near is expected or not near.agrees(wrong, results[wrong]) or not all(near.agrees(name, got) for name, got in results.items()):
        return otherwise
    wider = expected.widened(changed.effect_of_rounding())
    return Fit.YES if all(wider.agrees(name, got) for name, got in results.items()) else otherwise


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


def _confirmed(found: list[Named], observed: Iterable[Observation]) -> list[Named]:
    """Those that give what was observed in other sizes, where some of it has to be wrong.

    Errors of few digits grow with the length of a sum and depend on its order, so other widths say nothing about those.
    """
    is_wrong = False
    for x in observed:
        is_wrong = is_wrong or not x.agrees
        found = [mistake for mistake in found if mistake[0] in PRECISION or _may_be(mistake, x)]
        if not found:
            break
    return found if is_wrong else []


def _told_apart(found: list[Named], further: Iterator[Observation]) -> list[Named]:
    """Those that also give the numbers of a few further cases; of several, of all further cases until one is left."""
    confirmations = 0
    while found and (confirmations < CONFIRMATIONS or len(found) > 1):
        if (x := next(further, None)) is None:
            break
        found = [mistake for mistake in found if _may_be(mistake, x)]
        confirmations += 1
    return found


def _may_be(mistake: Named, observed: Observation) -> bool:
    """Whether this mistake gives what was observed, or is so sensitive to rounding in this case that it says nothing about it.

    Errors of a sum in few digits grow with its length, so a long case says nothing about those.
    """
    if observed.right.case.group == "long" and not observed.agrees and mistake[0] in PRECISION:
        return True
    fit = observed.fit(mistake[1])
    return observed.agrees if fit is None else fit is not Fit.NO


def _gives(mistake: Named, observed: Observation) -> bool:
    """Whether the reference with this mistake returns what was observed. A mistake that a case has no room for changes nothing there."""
    fit = observed.fit(mistake[1])
    return observed.agrees if fit is None else fit is Fit.YES
