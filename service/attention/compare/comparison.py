"""Compares a candidate with the reference: the largest error of every case, and the first disagreement with its explanation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.attention.compare.adapter import CallFailed
from service.attention.compare.candidate import Candidate, load_candidate, prepare
from service.attention.compare.cases import RELATIVE, CheckCase, Computation
from service.attention.compare.convention import make_convention
from service.attention.compare.mistakes import explain
from service.spec import LayerSpec
from service.tensors import Array


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: the largest error of any output and its tolerance; or why it was skipped, or what the candidate raised."""

    case: str
    error: float = 0.0
    tolerance: float = 0.0
    skipped: str | None = None
    raised: str | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the case agrees with the reference; None if it was skipped."""
        return None if self.skipped else self.raised is None and self.error <= self.tolerance

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.case:<28} not run: {self.skipped}"
        if self.raised is not None:
            return f"{self.case:<28} raised {self.raised}"
        return f"{self.case:<28} error {self.error:<9.3g} tolerance {self.tolerance:<9.3g} {'agrees' if self.agrees else 'DISAGREES'}"


UNEXPLAINED = "no known mistake gives these numbers, nor do any two together"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first wrong number of a case; without an index, a wrong shape or an exception. `mistakes`: those that give its numbers."""

    case: str
    output: str
    expected: str
    got: str
    index: tuple[int, ...] | None = None
    hint: str | None = None
    mistakes: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"disagreement: {self.case}, {self.output}{place}: expected {self.expected}, got {self.got}{hint}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of `compare`; its string is the report. `disagreements`: the first, and later ones that show other mistakes."""

    results: tuple[CaseResult, ...]
    disagreements: tuple[Disagreement, ...]

    @property
    def first(self) -> Disagreement | None:
        return next(iter(self.disagreements), None)

    @property
    def agrees(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), self.conclusion])

    @property
    def conclusion(self) -> str:
        """The disagreements, if there are any."""
        return "\n".join(f"{'also' if i else 'first'} {x}" for i, x in enumerate(self.disagreements)) or "agrees with the reference"


def compare(candidate: Any, *, spec: LayerSpec | None = None, seed: int = 0, **options: Any) -> Comparison:
    """Compare a candidate, or the one that "my_package:MyAttention" names, with the reference on a few cases of rising difficulty.

    The reference computes the layer `spec`; without it, multi-head attention with a bias wherever the candidate has one. Options are the
    fields of `Convention`. ValueError: how to construct or call the candidate, or to read its weights, is ambiguous, and the message names
    the option that decides; or the weights are not those of the spec. TypeError: no such option.
    """
    convention = make_convention(options)
    prepared = prepare(load_candidate(candidate) if isinstance(candidate, str) else candidate, spec, convention, seed)
    results: list[CaseResult] = []
    disagreements: list[Disagreement] = []
    earlier_mistakes: set[str] = set()
    with prepared.evaluating():
        for case in prepared.draw_cases(seed):
            if reason := prepared.adapter.skip_reason(case):
                results.append(CaseResult(case.name, skipped=reason))
                continue
            unexplained = any(x.hint == UNEXPLAINED for x in disagreements)  # then later ones are too
            result, disagreement = _compare_case(prepared, case, None if unexplained else earlier_mistakes)
            results.append(result)
            if disagreement is not None:
                first_without_numbers = disagreement.index is None and all(x.index is not None for x in disagreements)
                if not disagreements or first_without_numbers or {*disagreement.mistakes} - earlier_mistakes:
                    disagreements.append(disagreement)
                earlier_mistakes |= {*disagreement.mistakes}
    return Comparison(tuple(results), tuple(disagreements))


def assert_agrees(candidate: Any, *, spec: LayerSpec | None = None, seed: int = 0, **options: Any) -> None:
    """`compare` for tests: AssertionError with the report if the candidate disagrees."""
    comparison = compare(candidate, spec=spec, seed=seed, **options)
    if not comparison.agrees:
        raise AssertionError(f"disagrees with the reference\n{comparison}")


@dataclass(frozen=True, slots=True)
class _ComparedOutput:
    """One output of one case, expected and got."""

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


def _compare_case(
    candidate: Candidate, case: CheckCase, earlier_mistakes: Collection[str] | None
) -> tuple[CaseResult, Disagreement | None]:
    """The result of one case, and what disagrees. `earlier_mistakes`: those of earlier cases; None: no explanation is searched."""
    adapter = candidate.adapter
    try:
        result = adapter.call(case)
    except CallFailed as failure:
        hint = "if yours takes its mask in another shape or kind, see mask_shape and mask_dtype" if case.kind != "plain" else None
        return CaseResult(case.name, np.inf, raised=str(failure)), Disagreement(case.name, "output", "a result", str(failure), hint=hint)
    dtype = max((adapter.dtype, result.dtype), key=lambda name: RELATIVE.get(name, 0.0))
    options = adapter.convention
    right = Computation(candidate.spec, candidate.weights, case, dtype, options.tolerance, options.average_weights)
    expected, got = right.run(), {"output": result.output, "attention_weights": result.attention_weights}
    outputs = [
        _ComparedOutput(name, x, y, expected.tolerances[name]) for name, x in expected.outputs.items() if (y := got[name]) is not None
    ]
    worst = max(outputs, key=lambda x: x.error / x.tolerance)
    wrong = next((x for x in outputs if x.error > x.tolerance), None)
    disagreement = None if wrong is None else _disagreement(right, wrong, outputs, earlier_mistakes)
    return CaseResult(case.name, worst.error, worst.tolerance), disagreement


def _disagreement(
    right: Computation, wrong: _ComparedOutput, outputs: Sequence[_ComparedOutput], earlier_mistakes: Collection[str] | None
) -> Disagreement:
    if wrong.got.shape != wrong.expected.shape:
        shapes = f"shape {list(wrong.expected.shape)}", f"shape {list(wrong.got.shape)}"
        return Disagreement(right.case.name, wrong.name, *shapes, hint=_explain_shape(wrong))
    index = tuple(np.argwhere(~(np.abs(wrong.got - wrong.expected) <= wrong.tolerance))[0].tolist())
    results = {x.name: x.got for x in outputs if x.got.shape == x.expected.shape}
    mistakes = () if earlier_mistakes is None else explain(right, results, earlier_mistakes)
    hint = f"this is what comes out when {', and when '.join(mistakes)}" if mistakes else UNEXPLAINED
    expected, got = (f"{x[index]:.{17 if right.dtype == 'float64' else 9}g}" for x in (wrong.expected, wrong.got))
    return Disagreement(right.case.name, wrong.name, expected, got, index, hint, mistakes)


def _explain_shape(wrong: _ComparedOutput) -> str | None:
    """A hint, if a known rearrangement of the expected array equals the received one; else None."""
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
