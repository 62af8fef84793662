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
    """Such numbers of one case."""

    case: CheckCase
    name: str
    expected: Array
    got: Array
    tolerance: float
    hints: tuple[str, ...] = ()  # what wrong ones are

    @property
    def error(self) -> float:
        error = float(np.abs(self.got - self.expected).max(initial=0.0))
        return float("inf") if np.isnan(error) else error


def add_results(called: Calls, name: str, found: Iterable[SideOutput | str]) -> Disagreement | None:
    """The first wrong one; what came of all, or why they are not compared, is added to the results, as `name`."""
    outputs = [*found]
    compared, reasons = [x for x in outputs if isinstance(x, SideOutput)], [x for x in outputs if isinstance(x, str)]
    called.add_together(name, [CaseResult(name, x.error, x.tolerance) for x in compared if x.error <= x.tolerance])
    wrong = [x for x in compared if not x.error <= x.tolerance]
    called.results += [CaseResult(f"{x.name}, {x.case.name}", x.error, x.tolerance) for x in wrong]
    called.results += [CaseResult(name, skipped=f"since {reason}", untried=True) for reason in reasons[:1]]
    if not wrong:
        return None
    first = wrong[0]
    index = tuple(map(int, np.argwhere(~(np.abs(first.got - first.expected) <= first.tolerance))[0]))
    expected, got = (f"{x[index]:.9g}" for x in (first.expected, first.got))
    common = [hint for hint in first.hints if all(hint in x.hints for x in wrong if x.name == first.name)]
    hint = f"the output is right, and its {name.removesuffix('s')} is not" + (f": {common[0]}" if common else "")
    return Disagreement(first.case.name, first.name, expected, got, index, hint)
