"""Axes, packing and causality, and what a kernel requires, found by calls on small cases.

The conventions that people have are tried in the order in which they are common. A row alone, whose softmax is 1, tells axes and the order
of packed values; and of what is left, the most common is taken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product, zip_longest
from typing import get_args

from attend.check.adapter import CallFailed
from attend.check.candidate import Candidate
from attend.check.convention import OF_MASKS, Ambiguous, Convention, Layout, mask_conventions, table_named
from attend.check.packed import INPUT
from attend.check.requirements import NOR, with_requirements
from attend.check.trial import Trial, changed_rows, perturbed
from attend.check.weights import names_speak_for

MOST_READINGS = 400  # of axes and weights together
MOST_REQUIRED = 20  # the same with what a kernel may require
ALL_AGREE = 5
NOTHING_AGREES = 1
GUESSED = ("sizes", "arguments", "weights")  # options of which most values fit no candidate


@dataclass(frozen=True, slots=True)
class Reading:
    """A convention that a candidate can be read as."""

    agreeing: int  # how much agrees with it
    convention: Convention
    instead: Convention | None = None  # one with fewer axes under which all agrees
    failures: Mapping[str | None, str] = field(default_factory=dict)  # framework -> what was raised with its arrays
    asked: Ambiguous | None = None  # the question that it answers by a guess

    @property
    def answer(self) -> Convention:
        """The convention. Ambiguous: it is a guess."""
        if (asked := self.asked) is not None:
            raise asked
        return self.convention


def read_by_calls(trial: Trial, convention: Convention) -> tuple[Convention, Convention | None]:
    """Axes, the order of packed weights and causality: the first reading that agrees, or else the first of those that agree most; and a
    dtype, a width of heads and a tile of rows, if a candidate raises with the usual ones.

    If it takes a batch of heads, readings with fewer axes count for nothing, since an axis that is taken for another one by mistake
    may be right in one of them. The second value is the first of those that agrees.
    """
    refused: list[Reading | Exception] = []
    for required in chain([convention], with_requirements(convention)):
        try:
            found = _reading(trial, required, MOST_READINGS if required is convention else MOST_REQUIRED)
        except Ambiguous:
            raise
        except Exception as error:
            refused.append(error)
            continue
        if found.agreeing:
            return found.answer, found.instead
        refused.append(found)
    first, *_ = refused
    if isinstance(first, Exception):
        raise first
    if first.asked is None and first.convention.framework != convention.framework:
        raised = "; ".join(first.failures.values())
        raise ValueError(f'cannot call it on NumPy arrays or torch tensors, {NOR}: pass framework="torch" or "numpy"; {raised}')
    return first.answer, first.instead


def _reading(trial: Trial, convention: Convention, most: int) -> "Reading":
    """The same with the convention's own dtype, width of heads and tile of rows."""
    best: tuple[int, Convention] | None = None
    most_axes, instead = 0, None
    failures: dict[str | None, str] = {}
    for _, reading in zip(range(most), _readings(trial, convention), strict=False):
        try:
            reading = _with_causality(trial, reading)
        except CallFailed as failure:
            failures.setdefault(reading.framework, f"with {reading.framework}, it raised {failure}")
            agreeing = 0
        else:
            agreeing = _agreement(trial, trial.prepare(reading))
            if _axes_of(reading) > most_axes and trial.takes_all(trial.prepare(reading)):
                most_axes = _axes_of(reading)
        if _axes_of(reading) < most_axes:
            instead = instead or (reading if agreeing == ALL_AGREE else None)
            continue
        if agreeing == ALL_AGREE:
            return Reading(agreeing, reading)
        if best is None or agreeing > best[0]:
            best = agreeing, reading
    assert best is not None  # there is a reading, or none can be prepared
    return Reading(*best, instead, failures, _unsupported(trial, convention, best[1]) if best[0] <= NOTHING_AGREES else None)


def _readings(trial: Trial, convention: Convention) -> Iterator[Convention]:
    """The conventions under which a candidate can be prepared, the most common first. Ambiguous: there is none."""
    refused: list[ValueError] = []
    fits = False
    for reading in _expanded(trial, convention):
        if isinstance(reading, ValueError):
            refused.append(reading)
        else:
            fits = True
            for windowed in trial.with_and_without_window(reading):
                prepared = trial.prepare(windowed)
                yield from _axes(prepared, windowed)
                if windowed.left_out:
                    yield from _axes(prepared, replace(windowed, residual=True))
                if (other := _otherwise(trial, prepared, windowed)) is not None:
                    for expanded in _expanded(trial, other):
                        if isinstance(expanded, Convention):
                            yield from _axes(trial.prepare(expanded), expanded)
    if not fits:
        first, *_ = refused
        raise first


def _otherwise(trial: Trial, prepared: Candidate, reading: Convention) -> Convention | None:
    """The convention with pages, with optional tables of RoPE, or without keys and values of their own, if the candidate can be called so
    and raises as it is."""
    adapter = prepared.adapter
    tables = {name: role for name in adapter.others if (role := table_named(name)) is not None}
    optional = {name: "unused" for role, name in adapter.roles.items() if role in ("key", "value") and role not in adapter.required}
    try:
        trial.output(prepared, trial.first_case(prepared))
    except CallFailed:
        if "page_table" in adapter.roles:
            return reading.tried(paged=True)
        arguments = tables or optional
        return reading.tried(arguments={**reading.arguments, **arguments}) if arguments else None
    return None


def _expanded(trial: Trial, convention: Convention) -> Iterator[Convention | ValueError]:
    """The convention with each value of what is ambiguous; an error instead of one that fits no candidate."""
    try:
        trial.prepare(convention)
    except Ambiguous as ambiguous:
        values = () if ambiguous.option == "weights" and convention.weights is not None else ambiguous.values
        if not values:
            yield ambiguous
        readings = [_expanded(trial, replace(convention, **{ambiguous.option: value})) for value in values]
        in_turn = chain.from_iterable(zip_longest(*readings)) if ambiguous.option == "framework" else chain.from_iterable(readings)
        for reading in filter(None, in_turn):
            yield ambiguous if isinstance(reading, ValueError) and ambiguous.option in GUESSED else reading
    except ValueError as error:
        yield error
    except Exception as error:
        if not convention.sizes:
            raise
        yield ValueError(f"{type(error).__name__}: {error}")
    else:
        yield convention


def _unsupported(trial: Trial, before: Convention, best: Convention) -> Ambiguous | None:
    """The question whose answer was guessed, if no name speaks for the guess; None if there is none."""
    packed = trial.prepare(best).adapter.packed
    if packed and before.like is None and "layout" not in before.given:
        known = "[b,n,3,h,d] nor [b,3,h,n,d]" if INPUT in packed else "query, key, value nor key, value"
        return Ambiguous(f"the order in {', '.join(packed)}, which is neither {known}; pass a function that takes them apart", "arguments")
    if best.arguments != before.arguments or (best.weights != before.weights and not names_speak_for(best.weights or {})):
        try:
            trial.prepare(replace(best, arguments=before.arguments, weights=before.weights))
        except Ambiguous as asked:
            return asked
    return None


def _with_causality(trial: Trial, convention: Convention) -> Convention:
    """Causal if the last row depends on the key before, and the first rows not on the last key. CallFailed: it cannot be called."""
    prepared = trial.prepare(convention)
    case = trial.first_case(prepared)
    before = trial.output(prepared, case)
    if "causal" in convention.given or before.shape[:2] != case.query.shape[:2]:
        return convention
    changed = changed_rows(before, trial.output(prepared, perturbed(case, -1, prepared)))
    is_causal = changed[-1] and not changed[: max(1, len(changed) - 2)].any()
    if is_causal and len(changed) > 1:  # and no row is a copy of its own input
        is_causal = changed_rows(before, trial.output(prepared, perturbed(case, -2, prepared)))[-1]
    limited = prepared.spec.positional and any(interval.right is not None for interval in prepared.spec.intervals)
    return convention if limited else convention.tried(causal=bool(is_causal))


def _agreement(trial: Trial, prepared: Candidate) -> int:
    """How much agrees: ALL_AGREE if all cases do that depend on no meaning of a mask; less if the first does, one less if the candidate
    takes the others; or only one row; 0 if there are none."""
    if (first := next(trial.cases_without_masks(prepared), None)) is None:
        return 0
    if not trial.agrees(prepared, first):
        return NOTHING_AGREES + any(trial.agrees(prepared, case) for case in trial.cases_of(prepared, "one row"))
    if trial.all_agree(prepared):
        return ALL_AGREE
    return ALL_AGREE - 1 if trial.takes_all(prepared) else ALL_AGREE - 2


def _axes_of(reading: Convention) -> int:
    """How many of the axes of batch and heads the inputs have."""
    return reading.batched + (reading.layout != "b,n,d")


def _axes(prepared: Candidate, convention: Convention) -> Iterator[Convention]:
    """The convention with the usual orders of the inputs' axes; and what a mask may mean that has to be passed."""
    if prepared.adapter.heads_given and {"key", "boundaries"} <= prepared.adapter.roles.keys():  # as in FlashAttention's varlen functions
        yield convention.tried(layout="b,n,h,d", batched=False)
    yield convention
    for role in OF_MASKS:
        if role in prepared.adapter.required:
            yield from mask_conventions(role, convention)
    if prepared.adapter.heads_given:
        for layout, batched in product(get_args(Layout), (True, False)):
            if (layout, batched) != (convention.layout, convention.batched):
                yield convention.tried(layout=layout, batched=batched)
    else:
        yield convention.tried(batch_first=not prepared.adapter.batch_first)
        yield convention.tried(batched=False)
