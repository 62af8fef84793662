"""Compares a candidate with the reference in every case, and explains the first disagreement."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np

from attend.check.adapter import CallFailed
from attend.check.alignment import WORDS
from attend.check.calls import Calls, CaseResult, ComparedCase, ComparedOutput, Failure, call, observe
from attend.check.candidate import Candidate, load_candidate, prepare
from attend.check.cases import CheckCase, Group, Repeatable, lengths_for
from attend.check.convention import make_convention
from attend.check.divergence import Divergence, FirstWrongStep, first_wrong_step
from attend.check.explanation import Explanation, Observation, OtherSizes, explain, explain_in_turn
from attend.check.families import layer_of
from attend.check.gradients import compare_gradients, has_own_backward
from attend.check.lengths import LONGEST
from attend.check.low_precision import HALF
from attend.check.report import Comparison, Disagreement
from attend.check.rounded_steps import rounded_steps
from attend.check.signatures import FUNCTIONS, function_like, with_signature
from attend.check.sizes import in_other_sizes, other_lengths
from attend.check.trace import Trace, recorded, source_folders
from attend.check.trial import try_conventions
from attend.spec import LayerSpec

NOT_FINITE = "no number is finite: a row may have no key that is not blocked, exp may overflow, or a number is divided by 0"
UNEXPLAINED = "no known mistake gives these numbers"
CHANGING = "a second call with the same inputs returns other numbers: dropout is active, or a call leaves something behind for the next one"
MOST_NAMES = 6  # of calls that a hint lists
FURTHER_SEEDS = 3  # draws of further cases


def compare(
    candidate: Any, *, spec: LayerSpec | str | None = None, seed: int = 0, longest: int = LONGEST, backward: bool = False, **options: Any
) -> Comparison:
    """Compare a candidate, or the one that "my_package:MyAttention" names, with the reference on a few cases of rising difficulty.

    The reference computes the layer `spec`, or that of a family such as "llama"; without it, multi-head attention with a bias wherever the
    candidate has one. Options are the fields of `Convention`; no call has more rows than `longest`, but for short ones. `backward`:
    gradients of the inputs are compared, too, as they are of a `torch.autograd.Function`.

    ValueError: how to construct or call the candidate, or to read its weights, is ambiguous, and the message names the option that decides;
    or the weights are not those of the spec. TypeError: no such option.
    """
    loaded = load_candidate(candidate) if isinstance(candidate, str) else candidate
    convention = with_signature(loaded, make_convention(options))
    spec, is_causal = layer_of(spec, takes_heads=convention.like is not None)
    tried = try_conventions(loaded, spec, convention, seed, is_causal=is_causal)
    convention = tried.convention
    prepared = prepare(loaded, spec, convention, seed)
    called = Calls(prepared)
    with prepared.evaluating():
        for case in prepared.draw_cases(seed):
            if case.group != "long" or case.key.shape[1] <= longest:
                called.compare(case)
        if called.agree:
            for sweep in prepared.draw_sweeps(seed, longest):
                called.compare_together(sweep)
            for cases in prepared.draw_alignments(seed):
                called.align(cases, prepared.adapter.aligned)
        backward = called.agree and (backward or has_own_backward(prepared, called.compared[0].right.case))
        wrong_gradient = _compare_gradients(called, seed) if backward else None
        comparison = replace(_compared(called), found=tried.found)
        failures = [_failure(x) for x in called.failures[:1]]
        if (changing := _changing(prepared, called.compared)) is not None:
            return replace(comparison, disagreements=(changing, *failures))
        if (in_sweep := _in_sweep(called)) is not None:
            return replace(comparison, disagreements=(in_sweep,))
        if (misaligned := _misaligned(called)) is not None:
            return replace(comparison, disagreements=(misaligned,))
        if wrong_gradient is not None:
            return replace(comparison, disagreements=(wrong_gradient,))
        evidence = _evidence(called.compared)
        groups = tuple({x.right.case.group: None for x in evidence})
        further = Repeatable(_observe_further(prepared, seed, groups))
        elsewhere = cache(
            partial(_in_other_sizes, prepared, partial(in_other_sizes, loaded, spec, convention, prepared, seed), seed, groups)
        )
        step = _first_wrong_step(prepared, seed, evidence) if any(_is_far(x) for x in evidence) else None
        explained = _explained(evidence, step, further, elsewhere)
    disagreements = (*explained, *failures)
    return replace(comparison, disagreements=disagreements, rounding="" if disagreements else _rounding(called.compared))


def _compared(called: Calls) -> Comparison:
    """What was looked at, without the disagreements."""
    adapter = called.prepared.adapter
    left = [*(name for name in adapter.roles.values() if name not in called.tried), *adapter.others]
    inputs = {adapter.roles.get(role) for role in ("query", "key", "value", "module", *adapter.matrices)}
    order = [*adapter.signature.parameters, *adapter.others]
    return Comparison(
        tuple(called.results),
        (),
        parameters=tuple(sorted(left, key=order.index)),
        tried=tuple(name for name in adapter.signature.parameters if name in called.tried and name not in inputs),
        keys=called.keys,
        widths=tuple(sorted(called.widths)),
        causality=_causality(called),
        spec=called.prepared.spec,
        dtype=adapter.dtype,
    )


def _failure(failure: Failure) -> Disagreement:
    return Disagreement(failure.case.name, "output", "a result", failure.message, hint=failure.hint)


def _evidence(compared: Sequence[ComparedCase]) -> Sequence[ComparedCase]:
    """The cases that a disagreement is explained by: the calls without further arguments, if one of them is wrong. A name for what those
    calls compute does not depend on what else the candidate ignores."""
    usual = [x for x in compared if x.right.case.group != "parameters"]
    return usual if any(x.wrong is not None for x in usual) else compared


def _compare_gradients(called: Calls, seed: int) -> Disagreement | None:
    """The first wrong gradient of an input; what came of all is added to the results."""
    found = [*compare_gradients(called.prepared, called.prepared.draw_cases(seed, ("short", "parameters")))]
    compared, skipped = [x for x in found if not x.skipped], [x for x in found if x.skipped]
    right = [CaseResult("gradients", x.error, x.tolerance) for x in compared if x.error <= x.tolerance]
    wrong = [x for x in compared if not x.error <= x.tolerance]
    if right:
        called.results.append(replace(max(right, key=lambda x: x.error / x.tolerance), calls=len(right)))
    called.results += [CaseResult(f"{x.name}, {x.case.name}", x.error, x.tolerance) for x in wrong]
    called.results += [CaseResult("gradients", skipped=f"since {x.skipped}", untried=True) for x in skipped[:1]]
    if not wrong:
        return None
    first = wrong[0]
    assert first.expected is not None and first.got is not None
    index = tuple(map(int, np.argwhere(~(np.abs(first.got - first.expected) <= first.tolerance))[0]))
    expected, got = (f"{x[index]:.9g}" for x in (first.expected, first.got))
    common = [hint for hint in first.hints if all(hint in x.hints for x in wrong if x.name == first.name)]
    hint = "the output is right, and its gradient is not" + (f": {common[0]}" if common else "")
    return Disagreement(first.case.name, first.name, expected, got, index, hint)


def _misaligned(called: Calls) -> Disagreement | None:
    """A causal call with q != k that has none of the two alignments, or not the one that it has to have."""
    if called.misaligned is None:
        return None
    hint = "with q = k it is causal; with q != k, its numbers are those of neither top-left nor bottom-right alignment"
    if called.alignments:
        found = called.alignments[0]
        known = FUNCTIONS[called.prepared.adapter.convention.like or "flash_attn"]
        hint = f"with q != k, causality is {WORDS[found]}; that of {known.title} is {WORDS[known.alignment or found]}"
    return replace(_disagreement(called.misaligned, Explanation()), hint=hint)


def _causality(called: Calls) -> str:
    """Which alignment causal calls have, and which one the candidate's signature stands for; empty if that was not tried."""
    if not called.alignments:
        return ""
    adapter, found = called.prepared.adapter, dict.fromkeys(called.alignments)
    words = " with q < k, ".join(WORDS[x] for x in found) + (" with q > k" if len(found) > 1 else "")
    of = FUNCTIONS[like] if (like := function_like(adapter.signature)) else None
    differs = of is not None and of.alignment is not None and [*found] != [of.alignment]
    expected = f"; that of {of.title}, whose parameters it has, is {WORDS[of.alignment]}" if of and of.alignment and differs else ""
    return f"with q != k, {adapter.roles['causal']} is {words}{expected}"


def _in_sweep(called: Calls) -> Disagreement | None:
    """The first wrong call of a sweep, with those that are wrong in it and those that are right."""
    if called.wrong_in_sweep is None:
        return None
    sweep, first, wrong, right = called.wrong_in_sweep
    hint = f"all other kinds of calls agree; of the {sweep.name}, wrong: {_first_of(wrong)}; right: {_first_of(right)}"
    found = _divergence(called.prepared, first.right.case) if first.right.case.whole is None else None
    return replace(_disagreement(first, Explanation()), hint=hint, step=None if found is None else first_wrong_step(found))


def _first_of(names: Sequence[str]) -> str:
    """A list of names; of many, the first and the number of the others."""
    more = f", and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}" if names else "none"


def _rounding(compared: Sequence[ComparedCase]) -> str:
    """Which steps a half-precision candidate rounds; empty if its numbers do not show it, or in a higher precision."""
    clear = [(x.right, x.outputs[0].got) for x in compared if x.right.dtype in HALF and not x.outputs[0].vague]
    return rounded_steps(clear)


def _changing(prepared: Candidate, compared: Sequence[ComparedCase]) -> Disagreement | None:
    """The first disagreement, if a second call with the same inputs returns other numbers; then no mistake can explain them."""
    first = next((x for x in compared if x.wrong is not None and x.has_shapes), None)
    if first is None:
        return None
    with suppress(CallFailed):
        again = call(prepared, first.right.case)
        compared_twice = [(one, two) for one, two in zip(first.outputs, again.outputs, strict=True) if one.got.shape == two.got.shape]
        pairs = (replace(one, got=np.nan_to_num(one.got), expected=np.nan_to_num(two.got)) for one, two in compared_twice)  # NaN repeats
        if any(pair.error > pair.tolerance for pair in pairs):
            return replace(_disagreement(first, Explanation()), hint=CHANGING)
    return None


def _explained(
    compared: Sequence[ComparedCase],
    step: FirstWrongStep | None,
    further: Iterable[Observation],
    elsewhere: Callable[[], OtherSizes],
) -> Sequence[Disagreement]:
    """The first disagreement with the explanation of all; without one, a wrong shape is a disagreement of its own."""
    wrong = [x for x in compared if x.wrong is not None]
    if not wrong:
        return ()
    if not any(_is_far(x) for x in wrong):  # only as many small errors show it, which mistakes are not told apart by
        return (replace(_disagreement(wrong[0], Explanation()), hint=_words([x.wrong for x in wrong])),)
    observed = [x.observation for x in compared]
    observed_shaped = [observation for x, observation in zip(compared, observed, strict=True) if x.has_shapes]
    if explanation := explain(observed, further, elsewhere, () if step is None else step.names):
        return (_disagreement(wrong[0], explanation, step),)
    if in_turn := explain_in_turn(observed_shaped, further, elsewhere):
        first = [next(x for x in wrong if x.observation.is_unmasked == is_unmasked) for is_unmasked in (True, False)]
        return tuple(map(_disagreement, first, in_turn, (step, None)))
    shaped, misshaped = ([x for x in wrong if x.has_shapes == has_shapes] for has_shapes in (True, False))
    if shaped and misshaped:
        explanation = explain(observed_shaped, further, elsewhere)
    return [_disagreement(x, explanation, step) for x in (*shaped[:1], *misshaped[:1])]


def _first_wrong_step(prepared: Candidate, seed: int, compared: Sequence[ComparedCase]) -> FirstWrongStep | None:
    """Where the candidate leaves the reference in the first wrong case, and in another draw of it; None if no array can be recorded."""
    if (case := next((x.right.case for x in compared if x.wrong is not None and x.has_shapes), None)) is None:
        return None
    again = (x for x in prepared.draw_cases(seed + 1, (case.group,)) if x.name == case.name)
    calls = [divergence for x in (case, *islice(again, 1)) if (divergence := _divergence(prepared, x)) is not None]
    return first_wrong_step(*calls) if calls else None


def _divergence(prepared: Candidate, case: CheckCase) -> Divergence | None:
    """What a candidate makes in a call beside the steps of the reference; None if it is right, or cannot be recorded."""
    adapter = prepared.adapter
    if not (folders := source_folders(adapter.function)):
        return None
    trace = Trace(folders)
    with suppress(Exception):  # what it makes of arrays that record may differ from what it makes of others
        called = call(replace(prepared, adapter=replace(adapter, function=recorded(adapter.function, trace))), case)
        if called.wrong is not None and trace.is_complete:
            return Divergence(called.right.steps(), trace, called.right.dtype)
    return None


def _in_other_sizes(prepared: Candidate, make: Callable[[], Candidate | None], seed: int, groups: Collection[Group]) -> OtherSizes:
    """What the candidate returns in other sizes; an instance has its own heads and widths alone, and is called with other lengths."""
    other = make()
    if other is not None and other.module is not None:
        other.module.eval()
    drawn = other or prepared
    lengths = other_lengths(drawn.spec, batched=drawn.adapter.convention.batched)
    observed = observe(drawn, drawn.draw_cases(seed + 7_000_003, groups, lengths))
    heads, width = prepared.spec.num_heads, prepared.spec.head_dim
    return OtherSizes(Repeatable(observed), "" if other is not None else f"{heads} head{'s' if heads > 1 else ''} of {width} numbers")


def _observe_further(prepared: Candidate, seed: int, groups: Collection[Group]) -> Iterator[Observation]:
    """More cases that the candidate can be called on, which tell explanations apart that agree in all earlier ones."""
    for other in range(seed + 1, seed + 1 + FURTHER_SEEDS):
        larger = lengths_for(prepared.spec, batched=prepared.adapter.convention.batched, larger=other % 2 != seed % 2)
        yield from observe(prepared, prepared.draw_cases(other * 1_000_003, groups, larger))


def assert_agrees(
    candidate: Any, *, spec: LayerSpec | str | None = None, seed: int = 0, allow_skipped: bool = False, **options: Any
) -> None:
    """`compare` for tests: AssertionError with the report if the candidate disagrees.

    A warning names the cases and parameters that were not tried, unless `allow_skipped`.
    """
    comparison = compare(candidate, spec=spec, seed=seed, **options)
    if not comparison.agrees:
        raise AssertionError(str(comparison))
    if (comparison.untried or comparison.parameters) and not allow_skipped:
        warnings.warn(comparison.conclusion, stacklevel=2)


def _disagreement(compared: ComparedCase, explanation: Explanation, step: FirstWrongStep | None = None) -> Disagreement:
    """The first wrong number, or the wrong shape, with its explanation."""
    wrong, case = compared.wrong, compared.right.case.name
    assert wrong is not None
    if not wrong.has_shape:
        shapes = f"shape {list(wrong.expected.shape)}", f"shape {list(wrong.got.shape)}"
        hint, explanation = (str(explanation), explanation) if explanation else (_explain_shape(wrong), Explanation())
        return Disagreement(case, wrong.name, *shapes, hint=hint, explanation=explanation)
    errors = np.abs(wrong.got - wrong.expected)
    far = np.argwhere(~(errors <= wrong.tolerance))
    index = tuple(map(int, far[0] if len(far) else np.unravel_index(errors.argmax(), errors.shape)))
    expected, got = (f"{x[index]:.{17 if compared.right.dtype == 'float64' else 9}g}" for x in (wrong.expected, wrong.got))
    unexplained = _words([wrong]) or (UNEXPLAINED if np.isfinite(wrong.got).any() else NOT_FINITE)
    return Disagreement(case, wrong.name, expected, got, index, str(explanation) or unexplained, explanation, step)


def _is_far(compared: ComparedCase) -> bool:
    """Whether a number is so wrong that no rounding of the dtype explains it."""
    wrong = compared.wrong
    return wrong is not None and not compared.expected.agrees(wrong.name, wrong.got)


def _words(wrong: Sequence[ComparedOutput | None]) -> str:
    """What the errors of outputs in half precision have in common, though each is small."""
    measures = [x for output in wrong if output is not None for x in output.measures if x.error > x.bound and x.words]
    return max(measures, key=lambda x: x.ratio).words if measures else ""


def _explain_shape(wrong: ComparedOutput) -> str | None:
    """A hint, if a known rearrangement of the expected array equals the received one; else None."""
    expected = wrong.expected
    known = [
        ("batch and heads are one axis: return [b, h, q, k]", expected.reshape(-1, *expected.shape[2:])),
        ("queries and keys are exchanged, and the numbers are right", expected.swapaxes(-1, -2)),
        ("batch and queries are exchanged, and the numbers are right: return [b, q, d_model]", expected.swapaxes(0, 1)),
    ]
    for hint, made in known:
        if made.shape == wrong.got.shape and np.allclose(made, wrong.got, rtol=0, atol=wrong.tolerance):
            return hint
    return None
