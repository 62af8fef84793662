"""Where a candidate leaves the reference: the first step of the layer's program whose numbers do not occur in what the candidate makes.

A step occurs if an array, or all that one line of the candidate made, has its numbers in any order. One whose numbers do not occur is right
all the same if those of a later step that depends on it do: correct implementations take other ways to the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, permutations
from typing import Any

import numpy as np

from attend.attention.operators.step import Step
from attend.check.low_precision import HALF
from attend.check.trace import LARGE, Line, Made, Trace, in_order
from attend.tensors import Array

FEWEST = 4  # numbers of a value that is looked for
# How near equal numbers are, as a part of the largest, or in half precision of the root mean square.
EXACT = {"float64": 1e-9, "float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step of the reference, what it wrote, and the places of the steps in the program whose values it read."""

    step: Step
    value: Array
    parents: frozenset[int]


@dataclass(frozen=True, slots=True)
class FirstWrongStep:
    """Where a candidate leaves the reference."""

    names: tuple[str, ...]  # of the step, or of several, if the candidate has no arrays between them
    formula: str
    line: Line | None  # of the candidate, where it makes the next array
    found: str = ""  # what it has in place of the step's numbers, if that is clear

    def __str__(self) -> str:
        several = len(self.names) > 1
        steps = f"s: {self.names[0]} to {self.names[-1]}" if several else f": {self.names[0]}"
        formula = f": {self.formula}" if self.formula and not several else ""
        lines = [f"first wrong step{steps}{formula}{f' ({self.found})' if self.found else ''}"]
        if self.line is not None:
            lines.append(f"  {self.line}: {self.line.text}".rstrip(": "))
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """For --json."""
        line = {"file": self.line.file, "line": self.line.number, "source": self.line.text} if self.line else {}
        return {"name": self.names[0], "formula": self.formula, "last": self.names[-1], "found": self.found} | line


class Divergence:
    """One call of a candidate beside the steps of the reference."""

    def __init__(self, steps: Sequence[RunStep], trace: Trace, dtype: str) -> None:
        self.steps, self.dtype = steps, dtype
        self.made = trace.made
        self.parts, self.begins = _by_line(trace)
        self.wanted = [in_order(x.value) for x in steps]

    @cached_property
    def exact(self) -> list[int | None]:
        """For each step, the first array with its numbers in any order, None if there is none; -1 for one that is not looked for."""
        return [
            self._first(wanted, step) if len(wanted) >= FEWEST and wanted.any() else -1
            for wanted, step in zip(self.wanted, self.steps, strict=True)
        ]

    @property
    def occurring(self) -> int:
        """How many steps have numbers that occur, in any order."""
        return sum(at is not None and at >= 0 for at in self.exact)

    @cached_property
    def right(self) -> list[bool]:
        """Whether each step is right: it occurs in its order, or a step that depends on it is."""
        right = [i is not None and (i < 0 or self.disordered(step) is None) for step, i in zip(self.steps, self.exact, strict=True)]
        shown = [x and i != -1 for x, i in zip(right, self.exact, strict=True)]
        for i in reversed(range(len(self.steps))):
            if shown[i]:
                for parent in self.steps[i].parents:
                    right[parent] = shown[parent] = True
        return right

    def factor(self, i: int) -> tuple[float, int] | None:
        """The factor by which an array has the numbers of a step, with either sign, and the place of that array."""
        wanted = self.wanted[i]
        for at in reversed(range(len(self.made))):
            values = self.made[at].values
            if len(values) != len(wanted) or not values.any():
                continue
            factor = float(np.sqrt((values**2).sum() / (wanted**2).sum()))
            for signed in (factor, -factor):
                if self._near(np.sort(wanted * signed), values):
                    return signed, at
        return None

    def disordered(self, step: RunStep) -> int | None:
        """The place of the first array with the axes of a step's value whose numbers are in another order; None if the last one is not."""
        axes, wanted, found = sorted(step.value.shape), in_order(step.value), None
        for at, made in enumerate(self.made):
            if sorted(made.numbers.shape) == axes and self._near(wanted, made.values):
                value, numbers = (np.where(np.abs(x) < LARGE, x, 0.0) for x in (step.value, made.numbers))
                ways = (value.transpose(order) for order in permutations(range(value.ndim)))
                close = any(way.shape == numbers.shape and self._near(way.ravel(), numbers.ravel()) for way in ways)
                found = None if close else at if found is None else found
        return found

    def line_after(self, i: int) -> Line | None:
        """Where the first new array is made after those of the steps before a wrong one, of its size if there is one."""
        start = 1 + max((at for at in self.exact[:i] if at is not None), default=-1)
        own = [x for x in self.made[start:] if x.line is not None]
        new = [x for x in own if self._is_new(x)] or [x for x in self.made if x.line is not None and self._is_new(x)]
        of_size = [x for x in new if x.numbers.size == self.steps[i].value.size]
        return next((x.line for x in of_size or new or own), None)

    def is_observed(self, i: int) -> bool:
        """Whether the candidate makes an array of the size of a step's value that has not the numbers of a right step."""
        size = self.steps[i].value.size
        return any(x.numbers.size == size and self._is_new(x) for x in (*self.made, *self.parts))

    def _is_new(self, x: Made) -> bool:
        """Whether an array has several numbers, and not those of a right step."""
        known = (wanted for wanted, at in zip(self.wanted, self.exact, strict=True) if at is not None and at >= 0)
        return len(x.values) > 0 and x.values[0] != x.values[-1] and not any(self._near(wanted, x.values) for wanted in known)

    def _first(self, wanted: Array, step: RunStep) -> int | None:
        """The place of the first array with these numbers, or of the first part of it."""
        parts = ((i, x) for x, i in zip(self.parts, self.begins, strict=True))
        for at, made in chain(enumerate(self.made), parts):
            if self._near(wanted, made.values) or self._is_masked(step, wanted, made):
                return at
        return None

    def _is_masked(self, step: RunStep, wanted: Array, made: Made) -> bool:
        """Whether an array has the numbers of a step, but for those that are blocked: some implementations block them at once."""
        if made.numbers.size != step.value.size or not 0 < len(made.values) < len(wanted) == step.value.size:
            return False
        near = np.clip(np.searchsorted(wanted, made.values), 1, len(wanted) - 1)
        distance = np.minimum(np.abs(wanted[near] - made.values), np.abs(wanted[near - 1] - made.values))
        return self.dtype not in HALF and float(distance.max()) <= EXACT.get(self.dtype, EXACT["float64"]) * float(np.abs(wanted).max())

    def _near(self, wanted: Array, got: Array) -> bool:
        """Whether two arrays in ascending order have the same numbers, as far as the dtype shows."""
        if len(wanted) != len(got) or not len(wanted):
            return False
        bound, largest = EXACT.get(self.dtype, EXACT["float64"]), float(np.abs(wanted).max())
        if self.dtype in HALF:
            return float(np.mean((wanted - got) ** 2)) <= bound**2 * float(np.mean(wanted**2))
        return float(np.abs(wanted - got).max()) <= bound * largest


def _by_line(trace: Trace) -> tuple[list[Made], list[int]]:
    """All that each line made in parts, as loops do, and the place of the first part of each.

    The parts are made by one operation, have one name, or are at one place among what the line makes before the next line.
    """
    made = trace.made
    parts: dict[tuple[Line, int, int | str], list[int]] = {}
    line, place = None, 0
    for at, x in enumerate(made):
        line, place = x.line, place + 1 if x.line == line else 0
        if line is not None:
            for key in (x.by, place):
                parts.setdefault((line, x.numbers.ndim, key), []).append(at)
    for at, line, by in trace.again:
        parts.setdefault((line, made[at].numbers.ndim, by), []).append(at)
    several = {tuple(places): line for (line, *_), places in parts.items() if len(places) > 1}
    joined = [Made(np.concatenate([made[at].numbers.ravel() for at in places]), line) for places, line in several.items()]
    return joined, [places[0] for places in several]


def first_wrong_step(one: Divergence, two: Divergence | None = None) -> FirstWrongStep | None:
    """The first step that is not right in both calls; None if the candidate makes no arrays between its inputs and its outputs."""
    others = {} if two is None else {x.step.name: right for x, right in zip(two.steps, two.right, strict=True)}
    right = [x and others.get(run.step.name, True) for run, x in zip(one.steps, one.right, strict=True)]
    if all(right):
        step, found = one.steps[-1].step, "its numbers occur, as those of all steps before, and are changed afterwards"
        return FirstWrongStep((step.name,), step.formula, one.made[-1].line, found=found)
    wrong = [i for i, x in enumerate(right) if not x]
    first = next((i for i in wrong if all(right[parent] for parent in one.steps[i].parents)), wrong[0])
    step, made = one.steps[first].step, one.made
    if (at := one.disordered(one.steps[first])) is not None:
        return FirstWrongStep((step.name,), step.formula, made[at].line, found="its numbers are in another order")
    if one.exact[first] is None and (times := one.factor(first)) is not None:
        return FirstWrongStep((step.name,), step.formula, made[times[1]].line, found=f"its numbers occur times {times[0]:.4g}")
    if (last := next((i for i in wrong if i >= first and one.is_observed(i)), None)) is None:
        return None
    return FirstWrongStep(tuple(run.step.name for run in one.steps[first : last + 1]), step.formula, one.line_after(first))
