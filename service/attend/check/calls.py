"""Calls a candidate on cases, and compares what it returns with the reference."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import thread_time

import numpy as np

from attend.check.adapter import NO_PARAMETER, NO_POSITIONS, CallFailed, NoCache
from attend.check.candidate import GROUPS, Candidate
from attend.check.cases import CheckCase, Group
from attend.check.computation import RELATIVE, Computation, Expected
from attend.check.convention import Alignment
from attend.check.explanation import Observation
from attend.check.layer import Known
from attend.check.low_precision import HALF
from attend.check.spread import Measure, Spread, spread_of
from attend.tensors import Array

RAISED = "it raised"  # the beginning of the reason why a case that it may refuse is left out
UNDEFINED = {  # what is undefined -> why wrong numbers of an undefined case are not wrong
    "numbers": "since its numbers are not those of a mask that is added to the scores, which this one need not be",
    "flag": "since its numbers are not those of both together, which some libraries exclude",
}
MOST_SECONDS = 5.0  # of this thread that a call of a sweep may take, so that another process's load changes nothing


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: the largest error of any output and its tolerance; or why it was skipped, or what the candidate raised."""

    case: str
    error: float = 0.0
    tolerance: float = 0.0
    skipped: str | None = None
    untried: bool = False  # whether it was skipped only because an option or a known parameter is missing
    impossible: bool = False  # and no parameter can be the one that is missing
    raised: str | None = None
    vague: bool = False  # whether rounding alone may change its numbers so much that hardly any are excluded
    calls: int = 1  # that agree, and are told together

    @property
    def name(self) -> str:
        """The case, and how many calls it stands for."""
        return self.case if self.calls == 1 else f"{self.case} ({self.calls} calls)"

    @property
    def agrees(self) -> bool | None:
        """Whether the case agrees with the reference; None if it was skipped, or its agreement says nothing."""
        if self.skipped:
            return None
        agrees = self.raised is None and self.error <= self.tolerance
        return None if agrees and self.vague else agrees

    @property
    def verdict(self) -> str:
        """Of a case with numbers."""
        return {True: "agrees", False: "DISAGREES", None: "shows nothing"}[self.agrees]

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.case:<28} not run: {self.skipped}"
        if self.raised is not None:
            return f"{self.case:<28} raised {self.raised}"
        return f"{self.name:<28} error {self.error:<9.3g} tolerance {self.tolerance:<9.3g} {self.verdict}"


@dataclass(slots=True)
class Calls:
    """What the calls of a candidate gave."""

    prepared: Candidate
    results: list[CaseResult] = field(default_factory=list)
    compared: list["ComparedCase"] = field(default_factory=list)  # cases that the candidate answered with numbers
    with_sums: list["ComparedCase"] = field(default_factory=list)  # those of them with a number for each row
    failures: list[tuple[CheckCase, str]] = field(default_factory=list)  # with what the candidate raised
    tried: dict[str, None] = field(default_factory=dict)  # parameters that got another value than their default
    refused: dict[str, str] = field(default_factory=dict)  # parameter -> what the candidate raised for its value
    alignments: list[Alignment] = field(default_factory=list)  # of causal calls with fewer, and with more queries than keys
    keys: int = 0  # of the longest case
    widths: set[int] = field(default_factory=set)  # of heads
    slowest: tuple[int, float] = (1, 0.0)  # pairs of rows of the largest call, and its seconds

    @property
    def agree(self) -> bool:
        """Whether no call was wrong, and one was right."""
        return bool(self.compared) and not self.failures and all(x.wrong is None for x in self.compared)

    def add_together(self, name: str, agreeing: Sequence[CaseResult]) -> None:
        """One result of those that agree, if there are some: the worst."""
        if agreeing:
            worst = max(agreeing, key=lambda result: result.error / result.tolerance)
            self.results.append(replace(worst, case=name, calls=len(agreeing)))

    def result_of(self, case: CheckCase) -> CaseResult:
        """Calls the candidate on a case. What came of it is not yet among the results."""
        adapter = self.prepared.adapter
        if reason := adapter.skip_reason(case.call):
            untried = case.group == "short" and (reason.startswith(NO_PARAMETER) or reason == NO_POSITIONS)
            impossible = untried and reason.startswith(NO_PARAMETER) and not adapter.may_take_more
            return CaseResult(case.name, skipped=reason, untried=untried, impossible=impossible)
        if (seconds := self._seconds_of(case.call)) > MOST_SECONDS:
            return CaseResult(case.name, skipped=f"it would take about {seconds:.0f} s")
        if case.group == "lengths" and (names := [name for role in case.passed if (name := adapter.roles[role]) in self.refused]):
            return CaseResult(case.name, skipped=f"it refused {', '.join(names)} before")
        try:
            compared = call(self.prepared, case)
        except NoCache:
            reason = "since it does not return its cache last; pass new_cache=… if calls change one in place"
            return CaseResult(case.name, skipped=reason, untried=True)
        except CallFailed as failure:
            if not case.may_raise and adapter.mask_role(case.kind) != "causal":  # a flag may be refused, too
                self.failures.append((case, str(failure)))
                return CaseResult(case.name, np.inf, raised=str(failure))
            changed = adapter.changed_by(case.call)
            together = (case.kind == "plain" or case.chunks) and changed <= self.tried.keys()  # values that it took in other calls
            self.refused |= {} if together or case.is_optional else {name: str(failure) for name in changed}
            return CaseResult(
                case.name, skipped=f"{RAISED} {failure}", untried=not case.is_optional and (together or case.group != "parameters")
            )
        if case.is_optional and compared.wrong is not None and not self._is_wrong_alike(compared):
            return CaseResult(case.name, skipped="since its output has another shape, or changes with what is beyond its inputs")
        if case.undefined and compared.wrong is not None:
            reason = UNDEFINED["numbers" if case.kind == "numbers" else "flag"]
            return CaseResult(case.name, skipped=reason, untried=not adapter.is_torch)
        self.slowest = max(self.slowest, (_pairs(case.call), compared.seconds))
        if not self.tried.keys() >= {*adapter.roles.values()}:
            self.tried |= dict.fromkeys(adapter.changed_by(case.call))
        self.keys = max(self.keys, case.key.shape[1])
        self.widths.add(compared.right.spec.head_dim)
        self.compared.append(compared)
        self.with_sums += [] if compared.sums is None else [compared]
        return compared.result

    def _is_wrong_alike(self, compared: "ComparedCase") -> bool:
        """Whether a wrong output has the right shape and finite numbers, the same in a second call: else it may be of other memory."""
        with suppress(CallFailed, NoCache):
            again = call(self.prepared, compared.right.case)
            pairs = zip(compared.outputs, again.outputs, strict=True)
            return compared.has_shapes and all(np.isfinite(one.got).all() and np.array_equal(one.got, two.got) for one, two in pairs)
        return False

    def _seconds_of(self, case: CheckCase) -> float:
        """About how long a call would take, by the largest one before."""
        pairs, seconds = self.slowest
        return seconds * _pairs(case) / pairs if _pairs(case) > pairs > 1000 else 0.0


def _pairs(case: CheckCase) -> int:
    return int(case.query.shape[0] * case.query.shape[1] * case.key.shape[1])


@dataclass(frozen=True)
class ComparedOutput:
    """One output of one case, expected and got."""

    name: str
    expected: Array
    got: Array
    tolerance: float
    vague: bool
    spread: Spread | None = None  # of a candidate in half precision

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """Its errors and their bounds: the largest error, and in half precision others."""
        if self.spread is None or not np.isfinite(self.error):
            return (Measure(self.error, self.tolerance),)
        return self.spread.measures(self.name, self.got)

    @property
    def is_wrong(self) -> bool:
        return any(measure.error > measure.bound for measure in self.measures)

    @property
    def has_shape(self) -> bool:
        return self.got.shape == self.expected.shape

    @cached_property
    def error(self) -> float:
        """max|got - expected|; infinite for another shape and for NaN."""
        if not self.has_shape:
            return float("inf")
        error = float(np.abs(self.got - self.expected).max())
        return float("inf") if np.isnan(error) else error


@dataclass(frozen=True, slots=True)
class ComparedCase:
    """A case, what the reference computes for it, and the candidate's outputs."""

    right: Computation
    expected: Expected
    outputs: Sequence[ComparedOutput]
    seconds: float = 0.0  # of this thread, that the candidate took
    sums: Array | None = None  # a number for each row, if it returned some beside the output

    @property
    def wrong(self) -> ComparedOutput | None:
        """The first output with a wrong number, or of a wrong shape."""
        return next((x for x in self.outputs if x.is_wrong), None)

    @property
    def has_shapes(self) -> bool:
        """Whether the wrong output, if there is one, has the right shape."""
        return self.wrong is None or self.wrong.has_shape

    @property
    def result(self) -> CaseResult:
        worst = max((x.measures[0] for x in self.outputs), key=lambda x: x.ratio)
        if self.wrong is not None:
            worst = max(self.wrong.measures, key=lambda x: x.ratio)
        return CaseResult(self.right.case.name, worst.error, worst.bound, vague=all(x.vague for x in self.outputs))

    @property
    def observation(self) -> Observation:
        return Observation(self.right, {x.name: x.got for x in self.outputs}, self.wrong is None)


def call(candidate: Candidate, case: CheckCase) -> ComparedCase:
    """Call the candidate on a case. Raises CallFailed if it raises, and NoCache."""
    start, options = thread_time(), candidate.adapter.convention
    result = candidate.adapter.call(case.call)
    seconds = thread_time() - start
    got = {"output": result.output, "attention_weights": result.attention_weights}
    if case.whole is not None:
        last = slice(case.whole.query.shape[1] - case.query.shape[1], None)
        got = {name: None if x is None or x.ndim < 3 else x[:, last] if name == "output" else x[..., last, :] for name, x in got.items()}
    averaged = result.has_averaged_weights or bool(case.passed.get("average"))
    relative = options.tolerance if options.tolerance or not case.relative else RELATIVE.get(result.dtype, 0.0) + case.relative
    known = Known(is_complete=case.group in ("lengths", "widths"))  # which are many and large, and no mistake is looked for in them
    right = Computation(case.layer(candidate.spec), candidate.weights, case, result.dtype, relative, averaged, known=known)
    expected = right.run()
    moved = None
    if result.dtype in HALF and options.tolerance is None and case.relative <= HALF[result.dtype]:  # else its steps move less than that
        moved = spread_of(right, expected, rounds_inputs=candidate.adapter.dtype != result.dtype)
    bounds = moved or expected
    outputs = [
        ComparedOutput(name, x, y, bounds.largest_tolerance(name), bounds.is_vague_in(name), moved)
        for name, x in expected.outputs.items()
        if (y := got[name]) is not None
    ]
    return ComparedCase(right, expected, outputs, seconds, result.sums if case.whole is None else None)


def call_on(candidate: Candidate, seed: int, groups: Collection[Group] = GROUPS, *, longest: int = 0, until_wrong: bool = False) -> Calls:
    """What the calls of these groups gave, of at most `longest` keys in long ones; `until_wrong`: the first of them, up to a wrong one."""
    called = Calls(candidate)
    with candidate.evaluating():
        for case in candidate.draw_cases(seed, groups):
            if case.group != "long" or case.key.shape[1] <= longest:
                called.results.append(called.result_of(case))
            if until_wrong and called.compared and not called.agree:
                break
    return called


def observe(candidate: Candidate, cases: Iterable[CheckCase]) -> Iterator[Observation]:
    """What the candidate returns for those of the cases that it can be called on and does not raise for, and whose numbers are defined."""
    for case in cases:
        with suppress(CallFailed, NoCache):
            if not case.undefined and not candidate.adapter.skip_reason(case.call):
                yield call(candidate, case).observation
