"""Compares a candidate with the reference in every case, and says what was looked at."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from attend.check.adapter import CallFailed, NoCache
from attend.check.alignment import WORDS
from attend.check.alternatives import alternatives, raises, unexplained, with_fewest_mistakes
from attend.check.calls import Calls, CaseResult, ComparedCase, Failure, call
from attend.check.candidate import GROUPS, Candidate
from attend.check.cases import Group
from attend.check.computation import RELATIVE
from attend.check.convention import make_convention
from attend.check.disagreements import IN_SWEEP, UNEXPLAINED, disagreement, divergence_of, explained
from attend.check.divergence import first_wrong_step
from attend.check.dropout import compare_dropout
from attend.check.explanation import Explanation
from attend.check.families import layer_of, sizes_in_words
from attend.check.gradients import compare_gradients, has_own_backward
from attend.check.lengths import LONGEST, is_known_in_others
from attend.check.loading import as_callable, load_candidate
from attend.check.log_sum_exp import compare_log_sum_exps
from attend.check.low_precision import HALF
from attend.check.preparation import prepare
from attend.check.report import Comparison, Disagreement
from attend.check.rounded_steps import rounded_steps
from attend.check.side_outputs import add_results
from attend.check.signatures import FUNCTIONS, function_like, with_signature
from attend.check.sizes import in_other_sizes
from attend.check.tried import Tried, try_conventions
from attend.check.unnamed import with_weights
from attend.check.windows import with_windows
from attend.spec import LayerSpec

CHANGING = "a second call with the same inputs returns other numbers: dropout is active, or a call leaves something behind for the next one"
MASK_ALONE = "since masks take its place, as in transformers, where they contain it; if they do, pass mask_replaces_causality=true"
OTHER_PAGES: dict[str, tuple[Any, str]] = {  # what is passed otherwise -> what is said if all is right then
    "unused": (1.0, "rows of pages that no item has change the output: it is right if they are 1, and not if they are NaN"),
    "in_order": (True, "it is right if the pages of an item follow one another, and not in another order"),
}
UNSEEN = 1e-12  # of a number: a change that float64 shows and float32 does not
LONGEST_BACKWARD = 130  # keys of a call whose gradients are compared
MOST_NAMES = 6  # of calls that a hint lists


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
    loaded = as_callable(load_candidate(candidate) if isinstance(candidate, str) else candidate)
    convention = with_signature(loaded, make_convention(options))
    given, is_causal = layer_of(spec, takes_heads=convention.like is not None)
    first, *others = try_conventions(loaded, given, convention, seed, is_causal=is_causal)
    look = partial(_compare, loaded, seed=seed, longest=longest, backward=backward)
    comparison = look(first)
    if len(comparison.disagreements) > (not unexplained(comparison)):
        others += alternatives(loaded, first, comparison, seed)
        compared = [(comparison, first)]
        for other in others:
            with suppress(ValueError):
                if not raises(another := look(other)) or raises(comparison):  # it can be called as the first
                    compared.append((another, other))
        comparison, first = with_fewest_mistakes(loaded, compared, seed)
    comparison = replace(comparison, layer=sizes_in_words(spec, given) if isinstance(spec, str) and given else "")
    return with_weights(loaded, first, comparison, seed, longest)


def _compare(loaded: Any, tried: Tried, *, seed: int, longest: int, backward: bool) -> Comparison:
    """The comparison of a candidate with the layer that it was tried as."""
    prepared = prepare(loaded, tried.spec, tried.convention, seed)
    with prepared.evaluating():
        called = _call_on_all(prepared, seed, longest)
        in_others = partial(in_other_sizes, loaded, tried.spec, tried.convention, prepared, seed)
        may_differ = called.agree and isinstance(loaded, type) and is_known_in_others(prepared.spec)
        in_another = None if not may_differ or (other := in_others()) is None else _call_in_evaluation(other, seed)
        if any(map(_has_digits_of_float32, filter(None, (called, in_another)))):
            convention = replace(tried.convention, dtype="float32")
            tried = replace(tried, convention=convention, found=(*tried.found, "its numbers have the digits of float32"))
            return _compare(loaded, tried, seed=seed, longest=longest, backward=backward)
        if (hint := _of_pages(called, seed, longest)) is not None:
            first = disagreement(next(x for x in called.compared if x.wrong is not None), Explanation())
            return replace(_compared(called), found=tried.found, disagreements=(replace(first, hint=hint),))
        backward = called.agree and (backward or has_own_backward(prepared, called.compared[0].right.case))
        wrong_sum = add_results(called, "log-sum-exps", compare_log_sum_exps(called.with_sums)) if called.agree else None
        wrong_dropout = add_results(called, "dropout", compare_dropout(prepared, seed)) if called.agree else None
        called.tried |= _with_dropout(called)
        wrong_gradient = _compare_gradients(called, seed, longest) if backward else None
        comparison = replace(_compared(called), found=tried.found)
        failures = [_failure(x) for x in called.failures[:1]]
        if (changing := _changing(prepared, called.compared)) is not None:
            return replace(comparison, disagreements=(changing, *failures))
        if (one := _in_sweep(called) or _misaligned(called) or wrong_sum or wrong_dropout or wrong_gradient) is not None:
            return replace(comparison, disagreements=(one,))
        if in_another is not None:
            disagreements = _in_another_size(called, in_another, seed)
            return replace(_compared(called), found=tried.found, disagreements=disagreements, rounding=_rounding(called.compared))
        found = explained(prepared, _evidence(called.compared), in_others, seed)
        disagreements = (*(_with_cases(x, called.compared) for x in found), *failures)
    return replace(comparison, disagreements=disagreements, rounding="" if disagreements else _rounding(called.compared))


def _call_on_all(prepared: Candidate, seed: int, longest: int) -> Calls:
    """What the calls of a candidate gave; of many lengths and alignments only if the others agree."""
    called = _call_on(prepared, seed, longest, GROUPS)
    if called.agree:
        for sweep in prepared.draw_sweeps(seed, longest):
            called.compare_together(sweep)
        for cases in prepared.draw_alignments(seed, longest):
            called.align(cases, prepared.adapter.aligned)
        for name, other in (*_with_other_values(prepared), *with_windows(prepared)) if called.agree else ():
            with suppress(ValueError):  # it returns no array with this value
                further = _call_on(other, seed, longest, GROUPS, until_wrong=True)
                is_flag = type(prepared.adapter.signature.parameters[name].default) is bool  # one that changes nothing may be ignored
                if further.agree and (further.with_sums or not is_flag):
                    called.tried[name] = None
                    called.with_sums += further.with_sums
    convention = prepared.adapter.convention
    if convention.mask_replaces_causality and "mask_replaces_causality" not in convention.given:
        name = f"causality beside {prepared.adapter.roles['mask']}"
        called.results.append(CaseResult(name, skipped=MASK_ALONE, untried=True))
    return called


def _has_digits_of_float32(called: Calls) -> bool:
    """Whether what is wrong in float64, which no option asks for, is right to the digits of float32, or knows no others: inputs that differ
    by less change nothing."""
    prepared, wrong = called.prepared, [x for x in called.results if x.agrees is False]
    if not wrong or called.failures or prepared.adapter.convention.dtype is not None or prepared.adapter.dtype != "float64":
        return False
    if all(x.error <= x.tolerance * RELATIVE["float32"] / RELATIVE["float64"] for x in wrong):
        return True
    first = called.compared[0]
    moved = {name: getattr(first.right.case, name) * (1 + UNSEEN) for name in ("query", "key", "value")}
    with suppress(CallFailed, NoCache):
        again = call(prepared, replace(first.right.case, **moved)).outputs[0].got
        return bool(again.any()) and np.array_equal(first.outputs[0].got, again, equal_nan=True)
    return False


def _of_pages(called: Calls, seed: int, longest: int) -> str | None:
    """What makes a wrong candidate that takes pages right; None if nothing does."""
    if called.agree or "page_table" not in called.prepared.adapter.roles or not any(x.wrong for x in called.compared):
        return None
    for name, (value, words) in OTHER_PAGES.items():
        adapter = replace(called.prepared.adapter, **{name: value})
        if _call_on_all(replace(called.prepared, adapter=adapter), seed, longest).agree:
            return words
    return None


def _with_dropout(called: Calls) -> dict[str, None]:
    """The parameters for dropout, if a call with it was right."""
    roles = called.prepared.adapter.roles
    if not any(result.case == "dropout" and result.agrees for result in called.results):
        return {}
    return {roles[role]: None for role in ("dropout", "training") if role in roles}


def _with_other_values(prepared: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Each parameter of unknown meaning that is a flag, or a number such as the size of a tile; and the candidate with the other value of
    the flag, or with half the number, which may leave the output right."""
    adapter = prepared.adapter
    for name in adapter.others:
        default = parameter.default if (parameter := adapter.signature.parameters.get(name)) else None
        if type(default) is bool or (type(default) is int and default > 1):
            other = not default if type(default) is bool else default // 2
            yield name, replace(prepared, adapter=replace(adapter, function=partial(adapter.function, **{name: other})))


def _call_on(candidate: Candidate, seed: int, longest: int, groups: Sequence[Group], *, until_wrong: bool = False) -> Calls:
    """What the calls of these groups gave; `until_wrong`: the first of them, up to a wrong one."""
    called = Calls(candidate)
    for case in candidate.draw_cases(seed, groups):
        if case.group != "long" or case.key.shape[1] <= longest:
            called.compare(case)
        if until_wrong and called.compared and not called.agree:
            break
    return called


def _compared(called: Calls) -> Comparison:
    """What was looked at, without the disagreements."""
    adapter = called.prepared.adapter
    left = [name for name in (*adapter.roles.values(), *adapter.others) if name not in called.tried]
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
        dtype=called.compared[0].right.dtype if called.compared else adapter.dtype,  # it may return fewer digits than it gets
    )


def _call_in_evaluation(candidate: Candidate, seed: int) -> Calls:
    """What the short calls gave."""
    with candidate.evaluating():
        return _call_on(candidate, seed, 0, ["short"])


def _in_another_size(called: Calls, calls: Calls, seed: int) -> tuple[Disagreement, ...]:
    """What is wrong in the short calls of a class that agrees and is constructed with other heads and widths; what came of them is added to
    the results."""
    other = calls.prepared
    sizes = [f"{x.num_heads} heads of {x.head_dim} numbers" for x in (called.prepared.spec, other.spec)]
    if not calls.agree and calls.compared and not calls.failures:
        with other.evaluating():
            first, *_ = explained(other, calls.compared, lambda: None, seed)
        called.results += [replace(x, case=f"{x.case}, {sizes[1]}") for x in calls.results if x.agrees is False]
        return (replace(first, case=f"{first.case}, {sizes[1]}", hint=f"with {sizes[0]} it agrees: {first.hint}"),)
    if calls.agree:
        called.add_together(sizes[1], [x for x in calls.results if x.agrees])
    return ()


def _failure(failure: Failure) -> Disagreement:
    return Disagreement(failure.case.name, "output", "a result", failure.message, hint=failure.hint)


def _evidence(compared: Sequence[ComparedCase]) -> Sequence[ComparedCase]:
    """The cases that a disagreement is explained by: the calls without further arguments, if one of them is wrong. A name for what those
    calls compute does not depend on what else the candidate ignores."""
    usual = [x for x in compared if x.right.case.group != "parameters"]
    return usual if any(x.wrong is not None for x in usual) else compared


def _compare_gradients(called: Calls, seed: int, longest: int) -> Disagreement | None:
    """The first wrong gradient of an input; what came of all is added to the results."""
    cases = called.prepared.draw_cases(seed, ("short", "parameters", "long"))
    short = (case for case in cases if case.group != "long" or case.key.shape[1] <= min(longest, LONGEST_BACKWARD))
    pairs = zip(called.alignments, called.prepared.draw_alignments(seed, LONGEST_BACKWARD), strict=False)
    aligned = (case for alignment, pair in pairs if (case := pair[alignment]).whole is None)
    return add_results(called, "gradients", compare_gradients(called.prepared, chain(short, aligned)))


def _misaligned(called: Calls) -> Disagreement | None:
    """A causal call with q != k that has none of the two alignments, or not the one that it has to have."""
    if called.misaligned is None:
        return None
    hint = "with q = k it is causal; with q != k, its numbers are those of neither top-left nor bottom-right alignment"
    if called.alignments:
        found = called.alignments[0]
        known = FUNCTIONS[called.prepared.adapter.convention.like or "flash_attn"]
        hint = f"with q != k, causality is {WORDS[found]}; that of {known.title} is {WORDS[known.alignment or found]}"
        if known.alignment in (found, None):
            hint = f"with fewer rows, causality is {WORDS[found]}, and here it is not"
    return replace(disagreement(called.misaligned, Explanation()), hint=hint)


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
    keys = {case.name: case.key.shape[1] for case in sweep.cases}
    tile = math.gcd(*(keys[name] for name in wrong))
    are_whole = len(wrong) > 1 < tile and all(keys[name] % tile for name in right)
    which = f"those with whole tiles of {tile} keys, " if are_whole else ""
    listed = f"; of the {sweep.name}, wrong: {which}{_first_of(wrong)}; right: {_first_of(right)}" if len(sweep.cases) > 1 else ""
    hint = f"{IN_SWEEP}{listed}"
    found = divergence_of(called.prepared, first.right.case) if first.right.case.whole is None else None
    return replace(disagreement(first, Explanation()), hint=hint, step=None if found is None else first_wrong_step(found))


def _with_cases(found: Disagreement, compared: Sequence[ComparedCase]) -> Disagreement:
    """The disagreement; one that no mistake explains with the cases that are wrong, if others are right."""
    wrong, right = ([x.right.case.name for x in compared if (x.wrong is None) is agrees] for agrees in (False, True))
    if found.hint != UNEXPLAINED or not right:
        return found
    return replace(found, hint=f"{UNEXPLAINED}; wrong: {_first_of(wrong)}; right: {_first_of(right)}")


def _first_of(names: Sequence[str]) -> str:
    """A list of names; of many, the first and the number of the others."""
    more = f", and {len(names) - MOST_NAMES} other{'s' * (len(names) > MOST_NAMES + 1)}" if len(names) > MOST_NAMES else ""
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
            return replace(disagreement(first, Explanation()), hint=CHANGING)
    return None


def assert_agrees(
    candidate: Any, *, spec: LayerSpec | str | None = None, seed: int = 0, allow_skipped: bool = False, **options: Any
) -> None:
    """`compare` for tests: AssertionError with the report if the candidate disagrees.

    A warning names the cases and parameters that can be tried and were not, unless `allow_skipped`.
    """
    comparison = compare(candidate, spec=spec, seed=seed, **options)
    if not comparison.agrees:
        raise AssertionError(str(comparison))
    if not comparison.is_complete and not allow_skipped:
        warnings.warn(comparison.conclusion, stacklevel=2)
