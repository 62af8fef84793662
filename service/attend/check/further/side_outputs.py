"""Numbers besides the output in which a candidate that agrees is compared: gradients, log-sum-exps, and weights that dropout leaves."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from attend.check.calls import Calls, CaseResult
from attend.check.cases import CheckCase
from attend.check.report import Disagreement
from attend.tensors import Array


@dataclass(frozen=True, slots=True)
class SideOutput:
    """Such numbers of one case; or why they are not compared."""

    case: CheckCase
    name: str = ""
    expected: Array | None = None
    got: Array | None = None
    tolerance: float = 0.0
    hints: tuple[str, ...] = ()  # what wrong ones are
    skipped: str = ""

    @property
    def error(self) -> float:
        if self.expected is None or self.got is None:
            return 0.0
        error = float(np.abs(self.got - self.expected).max(initial=0.0))
        return float("inf") if np.isnan(error) else error


def add_results(called: Calls, name: str, found: Iterable[SideOutput]) -> Disagreement | None:
    """The first wrong one; what came of all is added to the results, as `name`."""
    outputs = [*found]
    compared, skipped = [x for x in outputs if not x.skipped], [x for x in outputs if x.skipped]
    called.add_together(name, [CaseResult(name, x.error, x.tolerance) for x in compared if x.error <= x.tolerance])
    wrong = [x for x in compared if not x.error <= x.tolerance]
    called.results += [CaseResult(f"{x.name}, {x.case.name}", x.error, x.tolerance) for x in wrong]
    called.results += [CaseResult(name, skipped=f"since {x.skipped}", untried=True) for x in skipped[:1]]
    if not wrong:
        return None
    first = wrong[0]
    assert first.expected is not None and first.got is not None
    index = tuple(map(int, np.argwhere(~(np.abs(first.got - first.expected) <= first.tolerance))[0]))
    expected, got = (f"{x[index]:.9g}" for x in (first.expected, first.got))
    common = [hint for hint in first.hints if all(hint in x.hints for x in wrong if x.name == first.name)]
    hint = f"the output is right, and its {name.removesuffix('s')} is not" + (f": {common[0]}" if common else "")
    return Disagreement(first.case.name, first.name, expected, got, index, hint)
