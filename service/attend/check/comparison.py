"""Compares a candidate with the reference: the largest error of every case, and the first disagreement with its explanation."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from textwrap import fill
from typing import Any

import numpy as np

from attend.check.adapter import NO_PARAMETER, NO_POSITIONS, CallFailed
from attend.check.candidate import Candidate, load_candidate, prepare
from attend.check.cases import CheckCase
from attend.check.computation import RELATIVE, Computation
from attend.check.convention import make_convention
from attend.check.explanation import Explanation, Observation, explain
from attend.check.low_precision import HALF
from attend.check.rounded_steps import rounded_steps
from attend.spec import LayerSpec
from attend.tensors import Array


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: the largest error of any output and its tolerance; or why it was skipped, or what the candidate raised."""

    case: str
    error: float = 0.0
    tolerance: float = 0.0
    skipped: str | None = None
    untried: bool = False  # whether it was skipped only because an option or a known parameter is missing
    raised: str | None = None
    vague: bool = False  # whether rounding alone may change its numbers so much that hardly any are excluded

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
        return f"{self.case:<28} error {self.error:<9.3g} tolerance {self.tolerance:<9.3g} {self.verdict}"


NOT_FINITE = "no number is finite: a row may have no key that is not blocked, exp may overflow, or a number is divided by 0"
UNEXPLAINED = "no known mistake gives these numbers, nor do any two together"
CHANGING = "a second call with the same inputs returns other numbers: dropout is active, or a call leaves something behind for the next one"
AXES = {"output": ("item", "query", "number"), "attention_weights": ("item", "head", "query", "key")}
FURTHER_SEEDS = 3  # draws of further cases


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first wrong number of a case; without an index, a wrong shape or an exception."""

    case: str
    output: str
    expected: str
    got: str
    index: tuple[int, ...] | None = None
    hint: str | None = None
    explanation: Explanation = field(default_factory=Explanation)

    @property
    def mistakes(self) -> tuple[str, ...]:
        return self.explanation.mistakes

    def __str__(self) -> str:
        """The mistake with its arithmetic, and then the first wrong number."""
        place = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        axes = AXES.get(self.output, ())
        words = ""
        if self.index is not None and len(self.index) == len(axes):
            words = f" ({', '.join(f'{axis} {i}' for axis, i in zip(axes, self.index, strict=True))})"
        lines = [f"hint: {self.hint}"] if self.hint else []
        for computed, expected in self.explanation.arithmetic:
            lines += [f"  you compute: {computed}", f"  expected:    {expected}"]
        return "\n".join([*lines, f"disagreement: {self.case}, {self.output}{place}{words}: expected {self.expected}, got {self.got}"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of `compare`; its string is the report, which a notebook shows too.

    `disagreements`: the first, and later ones that show other mistakes. `rounding`: which steps a half-precision candidate that agrees
    rounds, if its numbers show it.
    """

    results: tuple[CaseResult, ...]
    disagreements: tuple[Disagreement, ...]
    rounding: str = ""

    @property
    def first(self) -> Disagreement | None:
        return next(iter(self.disagreements), None)

    @property
    def agrees(self) -> bool:
        return self.first is None

    @property
    def untried(self) -> tuple[str, ...]:
        """The cases that would show more, and were not run because an option or a known parameter is missing."""
        return tuple(result.case for result in self.results if result.untried)

    @property
    def vague(self) -> tuple[str, ...]:
        """The cases whose agreement says nothing, since rounding alone may change their numbers as much."""
        return tuple(result.case for result in self.results if result.vague and result.agrees is None)

    def __str__(self) -> str:
        about = [] if self.agrees else [self.verdict, self.omissions]
        cases = [str(result) for result in self.results if not result.untried]
        return "\n".join(_wrapped(line) for line in (*about[:1], *self.conclusion.splitlines(), *about[1:], *cases) if line)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def verdict(self) -> str:
        """In how many of the cases that say something it disagrees."""
        agree = [result.agrees for result in self.results if result.agrees is not None]
        return f"disagrees with the reference in {agree.count(False)} of {len(agree)} cases"

    @property
    def conclusion(self) -> str:
        """The disagreements; or in how many cases it agrees, which were not tried, and which say nothing.

        After it, on a line of its own, which steps a half-precision candidate rounds.
        """
        if not self.agrees:
            shown = [str(x) for x in self.disagreements]
            return "\n".join(x.replace("disagreement: ", f"{'also' if i else 'first'} disagreement: ", 1) for i, x in enumerate(shown))
        about_vague = f"nothing is shown by {', '.join(self.vague)}, whose numbers rounding alone may change as much" if self.vague else ""
        about_untried = f"{len(self.untried)} {'was' if len(self.untried) == 1 else 'were'} {self.omissions}" if self.untried else ""
        agreement = "; ".join(x for x in (self._agreement, about_untried, about_vague) if x)
        return f"{agreement}\nrounding: {self.rounding}" if self.rounding else agreement

    @property
    def _agreement(self) -> str:
        """That it agrees, and in how many cases if not all were tried or some show nothing."""
        if not (self.untried or self.vague):
            return "agrees with the reference"
        if (agreeing := sum(result.agrees is True for result in self.results)) == 0:
            return "neither agrees nor disagrees with the reference"
        is_one = agreeing == 1
        cases = "the only case" if is_one else f"all {agreeing} cases"
        verb = f"{'shows' if is_one else 'show'} anything" if self.vague else f"{'was' if is_one else 'were'} tried"
        return f"agrees with the reference in {cases} that {verb}"

    @property
    def omissions(self) -> str:
        """Which cases were not tried that would show more, and why; empty if there are none."""
        unknown = [result.case for result in self.results if result.untried and (result.skipped or "").startswith(NO_PARAMETER)]
        reasons = [f"{', '.join(unknown)}, since no parameter is known for them"] if unknown else []
        if positions := [name for name in self.untried if name not in unknown]:
            reasons.append(f"{', '.join(positions)}, since query_offset is not given")
        return f"not tried: {'; '.join(reasons)}" if reasons else ""


def _wrapped(text: str) -> str:
    """The text in lines of at most 80 columns, with the indentation of the first."""
    indent = " " * (len(text) - len(text.lstrip()))
    return fill(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def compare(candidate: Any, *, spec: LayerSpec | None = None, seed: int = 0, **options: Any) -> Comparison:
    """Compare a candidate, or the one that "my_package:MyAttention" names, with the reference on a few cases of rising difficulty.

    The reference computes the layer `spec`; without it, multi-head attention with a bias wherever the candidate has one. Options are the
    fields of `Convention`. ValueError: how to construct or call the candidate, or to read its weights, is ambiguous, and the message names
    the option that decides; or the weights are not those of the spec. TypeError: no such option.
    """
    convention = make_convention(options)
    prepared = prepare(load_candidate(candidate) if isinstance(candidate, str) else candidate, spec, convention, seed)
    results: list[CaseResult] = []
    comparable: list[_ComparedCase] = []  # cases that the candidate answered with numbers
    failures: list[Disagreement] = []  # exceptions and wrong shapes
    with prepared.evaluating():
        for case in prepared.draw_cases(seed):
            if reason := prepared.adapter.skip_reason(case):
                results.append(CaseResult(case.name, skipped=reason, untried=reason.startswith(NO_PARAMETER) or reason == NO_POSITIONS))
                continue
            try:
                compared = _call(prepared, case)
            except CallFailed as failure:
                results.append(CaseResult(case.name, np.inf, raised=str(failure)))
                failures.append(Disagreement(case.name, "output", "a result", str(failure), hint=_hint_of_exception(str(failure), case)))
                continue
            results.append(compared.result)
            comparable.append(compared)
        parts = _observe(prepared, prepared.draw_cases(seed, partial=True))
        if (changing := _changing(prepared, comparable)) is not None:
            return Comparison(tuple(results), (changing, *failures[:1]))
        disagreements = (*_explained(comparable, _observe_further(prepared, seed), parts), *failures[:1])
    return Comparison(tuple(results), disagreements, "" if disagreements else _rounding(comparable))


def _hint_of_exception(message: str, case: CheckCase) -> str | None:
    """What may have caused the exception that a candidate raised; None if nothing is known."""
    if "Half without overflow" in message:  # torch's words
        return "a number such as -1e9, in place of -inf, is larger than float16 can hold: use -inf, or torch.finfo(x.dtype).min"
    return None if case.kind == "plain" else "if yours takes its mask in another shape or kind, see mask_shape and mask_dtype"


def _rounding(compared: Sequence["_ComparedCase"]) -> str:
    """Which steps a half-precision candidate rounds; empty if its numbers do not show it, or in a higher precision."""
    clear = [(x.right, x.outputs[0].got) for x in compared if x.right.dtype in HALF and not x.outputs[0].vague]
    return rounded_steps(clear)


def _changing(prepared: Candidate, compared: Sequence["_ComparedCase"]) -> Disagreement | None:
    """The first disagreement, if a second call with the same inputs returns other numbers; then no mistake can explain them."""
    first = next((x for x in compared if x.wrong is not None and x.has_shapes), None)
    if first is None:
        return None
    with suppress(CallFailed):
        again = _call(prepared, first.right.case)
        compared_twice = [(one, two) for one, two in zip(first.outputs, again.outputs, strict=True) if one.got.shape == two.got.shape]
        pairs = (replace(one, got=np.nan_to_num(one.got), expected=np.nan_to_num(two.got)) for one, two in compared_twice)  # NaN repeats
        if any(pair.error > pair.tolerance for pair in pairs):
            return replace(first.disagreement(Explanation()), hint=CHANGING)
    return None


def _explained(compared: Sequence["_ComparedCase"], further: Iterator[Observation], parts: Iterator[Observation]) -> Sequence[Disagreement]:
    """The first disagreement with the explanation of all; without one, a wrong shape is a disagreement of its own."""
    wrong = [x for x in compared if x.wrong is not None]
    if not wrong:
        return ()
    if explanation := explain([x.observation for x in compared], further, parts):
        return (wrong[0].disagreement(explanation),)
    shaped, misshaped = ([x for x in wrong if x.has_shapes == has_shapes] for has_shapes in (True, False))
    if shaped and misshaped:
        explanation = explain([x.observation for x in compared if x.has_shapes], further)
    return [x.disagreement(explanation) for x in (*shaped[:1], *misshaped[:1])]


def _observe_further(prepared: Candidate, seed: int) -> Iterator[Observation]:
    """More cases that the candidate can be called on, which tell explanations apart that agree in all earlier ones."""
    for other in range(seed + 1, seed + 1 + FURTHER_SEEDS):
        yield from _observe(prepared, prepared.draw_cases(other * 1_000_003, larger=other % 2 != seed % 2))


def _observe(prepared: Candidate, cases: Iterable[CheckCase]) -> Iterator[Observation]:
    """What the candidate returns for those of the cases that it can be called on and does not raise for."""
    for case in cases:
        with suppress(CallFailed):
            if not prepared.adapter.skip_reason(case):
                yield _call(prepared, case).observation


def assert_agrees(candidate: Any, *, spec: LayerSpec | None = None, seed: int = 0, allow_skipped: bool = False, **options: Any) -> None:
    """`compare` for tests: AssertionError with the report if the candidate disagrees.

    A warning names the cases that were not tried, since no parameter is known for them, unless `allow_skipped`.
    """
    comparison = compare(candidate, spec=spec, seed=seed, **options)
    if not comparison.agrees:
        raise AssertionError(str(comparison))
    if comparison.untried and not allow_skipped:
        warnings.warn(comparison.conclusion, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _ComparedOutput:
    """One output of one case, expected and got."""

    name: str
    expected: Array
    got: Array
    tolerance: float
    vague: bool

    @property
    def has_shape(self) -> bool:
        return self.got.shape == self.expected.shape

    @property
    def error(self) -> float:
        """max|got - expected|; infinite for another shape and for NaN."""
        if not self.has_shape:
            return float("inf")
        error = float(np.abs(self.got - self.expected).max())
        return float("inf") if np.isnan(error) else error


@dataclass(frozen=True, slots=True)
class _ComparedCase:
    """A case, what the reference computes for it, and the candidate's outputs."""

    right: Computation
    outputs: Sequence[_ComparedOutput]

    @property
    def wrong(self) -> _ComparedOutput | None:
        """The first output with a wrong number, or of a wrong shape."""
        return next((x for x in self.outputs if x.error > x.tolerance), None)

    @property
    def has_shapes(self) -> bool:
        """Whether the wrong output, if there is one, has the right shape."""
        return self.wrong is None or self.wrong.has_shape

    @property
    def result(self) -> CaseResult:
        worst = max(self.outputs, key=lambda x: x.error / x.tolerance)
        return CaseResult(self.right.case.name, worst.error, worst.tolerance, vague=all(x.vague for x in self.outputs))

    @property
    def observation(self) -> Observation:
        return Observation(self.right, {x.name: x.got for x in self.outputs}, self.wrong is None)

    def disagreement(self, explanation: Explanation) -> Disagreement:
        """The first wrong number, or the wrong shape, with its explanation."""
        wrong, case = self.wrong, self.right.case.name
        assert wrong is not None
        if not wrong.has_shape:
            shapes = f"shape {list(wrong.expected.shape)}", f"shape {list(wrong.got.shape)}"
            hint, explanation = (str(explanation), explanation) if explanation else (_explain_shape(wrong), Explanation())
            return Disagreement(case, wrong.name, *shapes, hint=hint, explanation=explanation)
        index = tuple(np.argwhere(~(np.abs(wrong.got - wrong.expected) <= wrong.tolerance))[0].tolist())
        expected, got = (f"{x[index]:.{17 if self.right.dtype == 'float64' else 9}g}" for x in (wrong.expected, wrong.got))
        unexplained = UNEXPLAINED if np.isfinite(wrong.got).any() else NOT_FINITE
        return Disagreement(case, wrong.name, expected, got, index, str(explanation) or unexplained, explanation)


def _call(candidate: Candidate, case: CheckCase) -> _ComparedCase:
    """Call the candidate on a case. Raises CallFailed if it raises."""
    result, options = candidate.adapter.call(case), candidate.adapter.convention
    dtype = max((candidate.adapter.dtype, result.dtype), key=lambda name: RELATIVE.get(name, 0.0))
    right = Computation(candidate.spec, candidate.weights, case, dtype, options.tolerance, options.average_weights)
    expected, got = right.run(), {"output": result.output, "attention_weights": result.attention_weights}
    outputs = [
        _ComparedOutput(name, x, y, expected.largest_tolerance(name), expected.is_vague_in(name))
        for name, x in expected.outputs.items()
        if (y := got[name]) is not None
    ]
    return _ComparedCase(right, outputs)


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
