"""A target against the reference: every trial's largest error, and the first disagreement with what explains it.

It judges; `caller.py` speaks to the target and `mistakes.py` explains. Tolerances grow with the scores, since the softmax turns an
absolute error in a score into a relative one in a weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from service.attention.compare.caller import CallFailed
from service.attention.compare.candidate import Candidate, load_candidate, prepare
from service.attention.compare.cases import CheckCase, draw_check_cases
from service.attention.compare.convention import Convention
from service.attention.compare.mistakes import explain
from service.attention.reference.forward import Reference
from service.tensors import Array

# The largest error that is rounding, times max(1, max|scores|) and max|output|; in float64 times max(1, max|output|).
RELATIVE = {"float64": 1e-10, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One trial: the largest error of any output and what was allowed, or why it was not run, or what the target raised."""

    case: str
    error: float = 0.0
    tolerance: float = 0.0
    skipped: str | None = None
    raised: str | None = None

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.case:<28} not run: {self.skipped}"
        if self.raised is not None:
            return f"{self.case:<28} {self.raised}"
        verdict = "agrees" if self.error <= self.tolerance else "DISAGREES"
        return f"{self.case:<28} error {self.error:<9.3g} tolerance {self.tolerance:<9.3g} {verdict}"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first number that is wrong, in the first trial that has one; without an index, what is wrong as a whole."""

    case: str
    output: str
    expected: str
    got: str
    index: tuple[int, ...] | None = None
    hint: str | None = None

    def __str__(self) -> str:
        place = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"first disagreement: {self.case}, {self.output}{place}: expected {self.expected}, got {self.got}{hint}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `compare` found; its string is the report."""

    results: tuple[CaseResult, ...]
    first: Disagreement | None

    @property
    def agrees(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), str(self.first) if self.first else "agrees with the reference"])


def compare(candidate: Any, *, seed: int = 0, **options: Any) -> Agreement:
    """Ask a target, or what "my_package:MyAttention" names, a few questions of rising difficulty and hold the answers to the reference.

    Options are the fields of `Convention`. ValueError: how to make or call the target, or to read its weights, cannot be told; it says what
    to pass. TypeError: no such option.
    """
    known = [field.name for field in fields(Convention)]
    for name in options:
        if name not in known:
            raise TypeError(f"expected an option among {', '.join(known)}, got {name!r}")
    mine = prepare(load_candidate(candidate) if isinstance(candidate, str) else candidate, Convention(**options), seed)
    results: list[CaseResult] = []
    first: Disagreement | None = None
    with mine.at_rest():
        for case in draw_check_cases(mine.spec, mine.weights, mine.caller.frame, seed):
            if refusal := mine.caller.refusal(case):
                results.append(CaseResult(case.name, skipped=refusal))
                continue
            result, disagreement = _hold(mine, case)
            results.append(result)
            first = first or disagreement
    return Agreement(tuple(results), first)


def tolerance(expected: Array, reference: Reference, dtype: str, relative: float | None = None) -> float:
    """The largest error of this output of the reference that is rounding in `dtype` (or in what `relative` says instead)."""
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    if dtype == "float64" and relative is None:
        return RELATIVE[dtype] * max(1.0, largest)
    scores = float(np.abs(reference.scores[np.isfinite(reference.scores)]).max(initial=0.0))
    return max((RELATIVE.get(dtype, 1e-10) if relative is None else relative) * max(1.0, scores) * largest, 1e-30)


def assert_agrees(candidate: Any, *, seed: int = 0, **options: Any) -> None:
    """`compare` for tests: AssertionError with the report where the target disagrees."""
    agreement = compare(candidate, seed=seed, **options)
    if not agreement.agrees:
        raise AssertionError(f"disagrees with the reference\n{agreement}")


@dataclass(frozen=True, slots=True)
class _Output:
    """One output of one trial, as expected and as it came."""

    name: str
    expected: Array
    got: Array
    tolerance: float

    @property
    def error(self) -> float:
        """max|got - expected|; infinite for another shape and for NaN."""
        if self.got.shape != self.expected.shape:
            return float("inf")
        error = float(np.abs(self.got - self.expected).max())
        return float("inf") if np.isnan(error) else error


def _hold(mine: Candidate, case: CheckCase) -> tuple[CaseResult, Disagreement | None]:
    reference = case.answer(mine.spec, mine.weights)
    try:
        answer = mine.caller.ask(case)
    except CallFailed as failure:
        hint = "if yours takes its mask in another shape or kind, see mask_shape and mask_dtype" if case.kind != "plain" else None
        return CaseResult(case.name, np.inf, raised=str(failure)), Disagreement(case.name, "output", "an answer", str(failure), hint=hint)
    dtype = max((mine.caller.dtype, answer.dtype), key=lambda name: RELATIVE.get(name, 0.0))
    relative = mine.caller.convention.tolerance
    outputs = [_Output("output", reference.output, answer.output, tolerance(reference.output, reference, dtype, relative))]
    if answer.attention_weights is not None:
        weights = reference.attention_weights
        weights = weights.mean(axis=1) if mine.caller.convention.average_weights else weights
        outputs.append(_Output("attention_weights", weights, answer.attention_weights, tolerance(weights, reference, dtype, relative)))
    worst = max(outputs, key=lambda x: x.error / x.tolerance)
    result = CaseResult(case.name, worst.error, worst.tolerance)
    wrong = next((x for x in outputs if x.error > x.tolerance), None)
    return result, None if wrong is None else _disagreement(mine, case, wrong, outputs, dtype)


def _disagreement(mine: Candidate, case: CheckCase, wrong: _Output, outputs: Sequence[_Output], dtype: str) -> Disagreement:
    if wrong.got.shape != wrong.expected.shape:
        shapes = f"shape {list(wrong.expected.shape)}", f"shape {list(wrong.got.shape)}"
        return Disagreement(case.name, wrong.name, *shapes, hint=_explain_shape(wrong))
    places = np.argwhere(~(np.abs(wrong.got - wrong.expected) <= wrong.tolerance))
    index = tuple(int(i) for i in places[0])
    answer = {x.name: (x.got, x.tolerance) for x in outputs if x.got.shape == x.expected.shape}
    if mine.caller.convention.average_weights:
        answer.pop("attention_weights", None)  # mistakes are made per head
    hint = explain(mine.spec, mine.weights, case, answer, dtype) if answer else None
    digits = 17 if dtype == "float64" else 9
    return Disagreement(case.name, wrong.name, f"{wrong.expected[index]:.{digits}g}", f"{wrong.got[index]:.{digits}g}", index, hint)


def _explain_shape(wrong: _Output) -> str | None:
    """What makes the one array of the other, if anything known does."""
    expected = wrong.expected
    known = [
        ("these are the weights averaged over the heads: return [b, h, q, k], or pass average_weights=True", expected.mean(axis=1)),
        ("batch and heads are one axis: return [b, h, q, k]", expected.reshape(-1, *expected.shape[2:])),
        ("queries and keys are exchanged, and the numbers are right", expected.swapaxes(-1, -2)),
        ("batch and queries are exchanged, and the numbers are right: return [b, q, d_model]", expected.swapaxes(0, 1)),
    ]
    for hint, made in known:
        if made.shape == wrong.got.shape and np.allclose(made, wrong.got, rtol=0, atol=wrong.tolerance):
            return hint
    return None
