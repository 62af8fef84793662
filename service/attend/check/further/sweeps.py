"""Calls of many lengths and widths, of which those that agree have one result."""

import math
from collections.abc import Sequence
from dataclasses import replace

from attend.check.calls import Calls, CaseResult, ComparedCase
from attend.check.disagreements import IN_SWEEP, disagreement, divergence_of, first_of
from attend.check.divergence import first_wrong_step
from attend.check.further.look import Extent
from attend.check.lengths import Sweep
from attend.check.report import Disagreement


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """The first wrong call of the first wrong sweep."""
    found = [_compare(called, sweep) for sweep in called.prepared.draw_sweeps(extent.tried.seed, extent.longest)]
    return next(filter(None, found), None)


def _compare(called: Calls, sweep: Sweep) -> Disagreement | None:
    """The first wrong call of a sweep, with those that are wrong in it and those that are right. Those that agree, and those that the
    candidate refuses, have one result."""
    kept = len(called.compared)
    results = [called.result_of(case) for case in sweep.cases]
    wrong = [x for x in called.compared[kept:] if x.wrong is not None]
    del called.compared[kept:]
    agreeing = [result for result in results if result.agrees is not False and result.skipped is None]
    if wrong and not agreeing and wrong[0].right.case.group == "widths":  # a function may be made for one width, with its scale
        width = called.prepared.spec.head_dim
        called.results.append(of_one_width(sweep.name, width))
        results, wrong, called.widths = [], [], {width}
    called.add_together(sweep.name, agreeing)
    called.results += [result for result in results if result.agrees is False]
    skipped = [result for result in results if result.skipped is not None]
    for untried in (True, False):
        if alike := [result for result in skipped if result.untried is untried]:
            names = [result.case for result in alike]
            name = names[0] if len(names) == 1 else f"{len(names)} of the {sweep.name} ({names[0]} to {names[-1]})"
            called.results.append(replace(alike[0], case=name))
    return _disagreement(called, sweep, wrong, [result.case for result in agreeing]) if wrong else None


def of_one_width(name: str, width: int) -> CaseResult:
    """What came of other widths of heads than the one that a candidate has the scale of."""
    reason = f"since its numbers are those of heads of {width} alone, as with a fixed scale"
    return CaseResult(name, skipped=reason, untried=True)


def _disagreement(called: Calls, sweep: Sweep, compared: Sequence[ComparedCase], right: Sequence[str]) -> Disagreement:
    """The first of the wrong calls, with the names of all, and of the right ones."""
    first, wrong = compared[0], [x.right.case.name for x in compared]
    keys = {case.name: case.key.shape[1] for case in sweep.cases}
    tile = math.gcd(*(keys[name] for name in wrong))
    are_whole = len(wrong) > 1 < tile and all(keys[name] % tile for name in right)
    which = f"those with whole tiles of {tile} keys, " if are_whole else ""
    listed = f"; of the {sweep.name}, wrong: {which}{first_of(wrong)}; right: {first_of(right)}" if len(sweep.cases) > 1 else ""
    found = divergence_of(called.prepared, first.right.case) if first.right.case.whole is None else None
    step = None if found is None else first_wrong_step(found)
    return replace(disagreement(first, hint=f"{IN_SWEEP}{listed}"), step=step)
