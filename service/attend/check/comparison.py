"""Compares a candidate with the reference in every case, and says what was looked at."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attend.check.adapter import CallFailed
from attend.check.alternatives import alternatives, in_wide_heads, unexplained, with_fewest_mistakes, with_flag_for_keys
from attend.check.calls import Calls, CaseResult, ComparedCase, call, call_on
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase
from attend.check.convention import OF_MASKS, make_convention
from attend.check.digits import has_digits_of_float32
from attend.check.disagreements import UNEXPLAINED, disagreement, explained, first_of
from attend.check.families import layer_of, sizes_in_words
from attend.check.further import LOOKS, Extent
from attend.check.further.alignment import causality
from attend.check.lengths import LONGEST, is_known_in_others
from attend.check.loading import as_callable, load_candidate
from attend.check.report import Comparison, Disagreement
from attend.check.rounded_steps import rounded_steps
from attend.check.signatures import with_signature
from attend.check.sizes import in_other_sizes
from attend.check.tried import Tried, try_conventions
from attend.check.unnamed import with_weights
from attend.spec import LayerSpec

CHANGING = "a second call with the same inputs returns other numbers: dropout is active, or a call leaves something behind for the next one"
KEEPING = "after a call with a mask, other masks of its shape change nothing: it keeps the first one"
MASK_ALONE = "since masks take its place, as in transformers, where they contain it; if they do, pass mask_replaces_causality=true"
OF_ANOTHER_CONVENTION = "no call agrees: its axes, matrices or positions may be others than calls found; if so, say them by options"
OTHER_PAGES: dict[str, tuple[Any, str]] = {  # what is passed otherwise -> what is said if all is right then
    "unused": (1.0, "rows of pages that no item has change the output: it is right if they are 1, and not if they are NaN"),
    "in_order": (True, "it is right if the pages of an item follow one another, and not in another order"),
}


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
    look = partial(_compare, longest=longest, backward=backward)
    comparison = look(first)
    if len(comparison.disagreements) > (not unexplained(comparison)):
        others += alternatives(first, comparison)
        if isinstance(loaded, type) and unexplained(comparison):
            with suppress(ValueError, CallFailed):
                others += with_flag_for_keys(first, convention)
        compared = [(comparison, first)]
        for other in others:
            with suppress(ValueError):
                if not (another := look(other)).has_raised or comparison.has_raised:  # it can be called as the first
                    compared.append((another, other))
        comparison, first = with_fewest_mistakes(compared)
    for other in in_wide_heads(first, comparison) if given is None else ():
        with suppress(ValueError):
            if (another := look(other)).agrees:
                comparison, first = another, other
    comparison = replace(comparison, layer=sizes_in_words(spec, given) if isinstance(spec, str) and given else "")
    return with_weights(first, comparison, longest)


def _compare(tried: Tried, *, longest: int, backward: bool) -> Comparison:
    """The comparison of a candidate with the layer that it was tried as."""
    prepared, seed = tried.prepare(), tried.seed
    in_others = partial(in_other_sizes, tried, prepared)
    with prepared.evaluating():
        called = call_on(prepared, seed, longest=longest)
        other = in_others() if called.agree and isinstance(tried.candidate, type) and is_known_in_others(prepared.spec) else None
        in_another = None if other is None else call_on(other, seed, ["short"])
        extent = Extent(tried, longest, backward, in_another)
        disagreements = [x for look in LOOKS if (x := look(called, extent)) is not None][:1] if called.agree else []
        if any(map(has_digits_of_float32, filter(None, (called, in_another)))):
            tried = tried.but("its numbers have the digits of float32", convention=replace(tried.convention, dtype="float32"))
            return _compare(tried, longest=longest, backward=backward)
        if not called.agree:
            disagreements = [*_wrong(called, in_others, seed, longest)]
    rounding = "" if disagreements else rounded_steps(called.compared)
    return replace(_compared(called), found=tried.found, disagreements=tuple(disagreements), rounding=rounding)


def _wrong(called: Calls, in_others: Callable[[], Candidate | None], seed: int, longest: int) -> Iterator[Disagreement]:
    """What is wrong in the usual calls. `in_others`: makes the candidate in other sizes."""
    failures = [_failure(*x) for x in called.failures[:1]]
    if (hint := _of_pages(called, seed, longest)) is not None:
        yield disagreement(next(x for x in called.compared if x.wrong is not None), hint=hint)
        return
    first = next((x for x in called.compared if x.wrong is not None and x.has_shapes), None)
    if first is not None and (hint := _keeping(called.prepared, first, seed) or _changing(called.prepared, first)):
        yield disagreement(first, hint=hint)
    else:
        yield from (_with_cases(x, called.compared) for x in explained(called.prepared, _evidence(called.compared), in_others, seed))
    yield from failures


def _of_pages(called: Calls, seed: int, longest: int) -> str | None:
    """What makes a wrong candidate that takes pages right; None if nothing does."""
    if "page_table" not in called.prepared.adapter.roles or not any(x.wrong for x in called.compared):
        return None
    for name, (value, words) in OTHER_PAGES.items():
        adapter = replace(called.prepared.adapter, **{name: value})
        if call_on(replace(called.prepared, adapter=adapter), seed, longest=longest).agree:
            return words
    return None


def _compared(called: Calls) -> Comparison:
    """What was looked at, without the disagreements."""
    adapter = called.prepared.adapter
    off = dict.fromkeys(adapter.convention.off)
    left = [name for name in (*adapter.roles.values(), *adapter.others, *off) if name not in called.tried]
    inputs = {adapter.roles.get(role) for role in ("query", "key", "value", "module", *adapter.matrices)}
    order = [*adapter.signature.parameters, *adapter.others, *off]
    left_to_masks = adapter.convention.mask_replaces_causality and "mask_replaces_causality" not in adapter.convention.given
    more = [CaseResult(f"causality beside {adapter.roles['mask']}", skipped=MASK_ALONE, untried=True)] if left_to_masks else []
    return Comparison(
        (*called.results, *more),
        (),
        parameters=tuple(sorted(left, key=order.index)),
        tried=tuple(name for name in adapter.signature.parameters if name in called.tried and name not in inputs),
        keys=called.keys,
        widths=tuple(sorted(called.widths)),
        causality=causality(called),
        spec=called.prepared.spec,
        dtype=called.compared[0].right.dtype if called.compared else adapter.dtype,  # it may return fewer digits than it gets
    )


def _failure(case: CheckCase, message: str) -> Disagreement:
    """An exception of the candidate, and what may have caused it."""
    hint = None if case.kind == "plain" else "if yours takes its mask in another shape or kind, see mask_shape and mask_dtype"
    if "Half without overflow" in message:  # torch's words
        hint = "a number such as -1e9, in place of -inf, is larger than float16 can hold: use -inf, or torch.finfo(x.dtype).min"
    return Disagreement(case.name, "output", "a result", message, hint=hint)


def _evidence(compared: Sequence[ComparedCase]) -> Sequence[ComparedCase]:
    """The cases that a disagreement is explained by: the calls without further arguments, if one of them is wrong. A name for what those
    calls compute does not depend on what else the candidate ignores."""
    usual = [x for x in compared if x.right.case.group != "parameters"]
    return usual if any(x.wrong is not None for x in usual) else compared


def _with_cases(found: Disagreement, compared: Sequence[ComparedCase]) -> Disagreement:
    """The disagreement; one that no mistake explains with the cases that are wrong, if others are right, or that none is."""
    wrong, right = ([x.right.case.name for x in compared if (x.wrong is None) is agrees] for agrees in (False, True))
    if not (found.hint or "").startswith(UNEXPLAINED):
        return found
    which = f"wrong: {first_of(wrong)}; right: {first_of(right)}" if right else OF_ANOTHER_CONVENTION
    return replace(found, hint=f"{found.hint}; {which}")


def _changing(prepared: Candidate, first: ComparedCase) -> str | None:
    """What is said if a second call with the same inputs returns other numbers; then no mistake can explain them."""
    with suppress(CallFailed):
        again = call(prepared, first.right.case)
        compared_twice = [(one, two) for one, two in zip(first.outputs, again.outputs, strict=True) if one.got.shape == two.got.shape]
        pairs = (replace(one, got=np.nan_to_num(one.got), expected=np.nan_to_num(two.got)) for one, two in compared_twice)  # NaN repeats
        if any(pair.error > pair.tolerance for pair in pairs):
            return CHANGING
    return None


def _keeping(prepared: Candidate, first: ComparedCase, seed: int) -> str | None:
    """What is said if an opposite mask changes no number after a call of that shape, whose numbers are those of its own mask."""
    if prepared.adapter.mask_role(kind := first.right.case.kind) not in OF_MASKS:
        return None
    case = next((x for x in prepared.draw_cases(seed, {"short"}, prepared.lengths(larger=True)) if x.kind == kind), None)
    with suppress(CallFailed):
        if case is not None:
            one, two = (call(prepared, x) for x in (case, replace(case, mask=~case.mask)))
            own = (replace(one.right, case=case.seeing(mask=mask)).run() for mask in (case.mask, ~case.mask))  # whatever true in it means
            is_own = any(x.agrees("output", one.outputs[0].got) for x in own)
            if is_own and replace(two.outputs[0], expected=one.outputs[0].got).error <= one.outputs[0].tolerance:
                return KEEPING
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
