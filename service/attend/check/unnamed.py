"""What is said of a disagreement that no mistake explains: the facts that the applied weights show."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from attend.check.adapter import CallFailed, NoCache
from attend.check.algebra.steps import NOUNS
from attend.check.applied_weights import applied_weights, independent_of
from attend.check.calls import ComparedCase, call
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase
from attend.check.disagreements import IN_SWEEP, UNEXPLAINED
from attend.check.report import Comparison
from attend.check.spread import ON_AVERAGE
from attend.check.tried import Tried
from attend.check.weight_facts import facts

LARGEST = 100.0  # score of a case: with larger ones, most weights are 0
MOST_CASES = 4  # further wrong ones of which what is said has to be true, too
UNNAMED = (UNEXPLAINED, IN_SWEEP, ON_AVERAGE)  # how hints begin that name nothing


def with_weights(tried: Tried, comparison: Comparison, longest: int) -> Comparison:
    """The comparison with what the applied weights show, if the first disagreement has numbers and no name."""
    first = comparison.first
    if first is None or first.index is None or first.output != "output" or not (first.hint or "").startswith(UNNAMED):
        return comparison
    prepared = tried.prepare()
    with prepared.evaluating(), suppress(Exception):  # what a wrong candidate makes of other values is its own affair
        told, found = _told(prepared, comparison, tried.seed, longest)
        if told:
            rest = (first.hint or "").removeprefix(UNEXPLAINED).removeprefix("; ")
            hint = f"{found}: {'; '.join(told)}" + (f"; {rest}" if rest else "")
            return replace(comparison, disagreements=(replace(first, hint=hint, weights=told), *comparison.disagreements[1:]))
    return comparison


def _told(prepared: Candidate, comparison: Comparison, seed: int, longest: int) -> tuple[tuple[str, ...], str]:
    """The facts, and where they are from."""
    wrong = _wrong_cases(prepared, comparison, seed, longest)
    if (first := next(wrong, None)) is None:
        return (), ""
    if unread := independent_of(prepared, first):
        names = " and ".join(NOUNS[role] for role in unread)
        same = all(independent_of(prepared, x) == unread for x in islice(wrong, MOST_CASES))
        where = "" if same else f" (in the case “{first.right.case.name}”)"
        return (f"the output does not depend on the {names}{where}",), "found by calls with other numbers"
    if (applied := applied_weights(prepared, first)) is None:
        return (), ""
    further = [*_other_draw(prepared, first, seed), *islice(wrong, MOST_CASES)]
    others = [x for case in further if (x := applied_weights(prepared, case)) is not None and x.has_numbers is applied.has_numbers]
    return facts([applied, *others]), applied.found


def _other_draw(prepared: Candidate, first: ComparedCase, seed: int) -> Iterator[ComparedCase]:
    """The same case with other numbers, if it is wrong with these, too."""
    case = first.right.case
    for other in prepared.draw_cases(seed + 1, (case.group,)):
        if other.name == case.name:
            yield from _if_wrong(prepared, other)


def _wrong_cases(prepared: Candidate, comparison: Comparison, seed: int, longest: int) -> Iterator[ComparedCase]:
    """The wrong cases in their order, called again."""
    names = {result.case for result in comparison.results if result.agrees is False}
    sweeps: Iterator[CheckCase] = (case for sweep in prepared.draw_sweeps(seed, longest) for case in sweep.cases)
    for case in chain(prepared.draw_cases(seed), sweeps):
        if case.name in names:
            yield from _if_wrong(prepared, case)


def _if_wrong(prepared: Candidate, case: CheckCase) -> Iterator[ComparedCase]:
    """The case as it is compared, if its numbers are wrong."""
    with suppress(CallFailed, NoCache):
        compared = call(prepared, case)
        is_clear = compared.has_shapes and compared.expected.largest_score <= LARGEST
        if compared.wrong is not None and is_clear and np.isfinite(compared.wrong.got).any():
            yield compared
