"""Calls a candidate under the conventions that people have for axes, packing, causality and positions, on small cases.

Each is tried in the order in which they are common. One under which the candidate's numbers are those of the reference is right: random
numbers agree to six digits by chance under no other one, unless the two are the same. A wrong candidate agrees under none. What its numbers
depend on then tells causality; a row alone, whose softmax is 1, tells axes and the order of packed values; and of what is left, the most
common.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, product, zip_longest
from typing import Any, get_args

import numpy as np

from attend.check.adapter import CallFailed, CandidateResult
from attend.check.candidate import OF_CALLS, Candidate
from attend.check.cases import CheckCase, Group, Repeatable
from attend.check.computation import Computation, Expected
from attend.check.convention import OF_MASKS, ROPE_TABLES, Ambiguous, Convention, Layout, mask_conventions
from attend.check.families import with_positions
from attend.check.layer import Known
from attend.check.preparation import prepare
from attend.check.requirements import NOR, with_requirements
from attend.check.weights import names_speak_for
from attend.check.windows import with_and_without_window
from attend.spec import LayerSpec
from attend.tensors import Array

MOST_READINGS = 400  # of axes and weights together
MOST_REQUIRED = 20  # the same with what a kernel may require
MOST_PREPARED = 4  # candidates that are looked at for one that differs in calls alone
ALL_AGREE = 5
NOTHING_AGREES = 1
LONGEST = 64  # rows that a class is constructed for until it is compared
CHANGED = 1e-3  # of the largest number: by how much an output differs that depends on a key
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


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that is called under one convention after the other, and compared with the layer `spec`."""

    candidate: Any
    spec: LayerSpec | None
    seed: int
    prepared: list[tuple[Convention, Candidate]] = field(default_factory=list)
    cases: dict[tuple[object, ...], Repeatable[CheckCase]] = field(default_factory=dict)
    results: Known = field(default_factory=Known)  # of calls
    expected: dict[tuple[int, str], tuple[CheckCase, Expected]] = field(default_factory=dict)  # by the identity of the case, and the dtype

    def prepare(self, convention: Convention) -> Candidate:
        """The candidate with this convention; the same object as one of the last, if it differs from that in calls alone."""
        for before, prepared in self.prepared[: -MOST_PREPARED - 1 : -1]:
            if replace(convention, **{name: getattr(before, name) for name in OF_CALLS}) == before:
                return prepared if convention == before else self._keep(convention, prepared.called_by(convention))
        return self._keep(convention, prepare(self.candidate, self.spec, replace(convention, longest=LONGEST), self.seed))

    def _keep(self, convention: Convention, prepared: Candidate) -> Candidate:
        self.prepared.append((convention, prepared))
        return prepared

    def first_case(self, prepared: Candidate) -> CheckCase:
        """The first of its cases."""
        return next(iter(self.cases_of(prepared)))

    def cases_of(self, prepared: Candidate, group: Group = "short") -> Iterable[CheckCase]:
        """The cases for a candidate, which are the same for all that they are drawn for alike."""
        draw = prepared.draw(self.seed)
        convention = prepared.adapter.convention
        key = group, id(draw.weights), draw, convention.takes_one_query, convention.batched
        if key not in self.cases:
            self.cases[key] = Repeatable(prepared.draw_cases(self.seed, {group}))
        return self.cases[key]

    def output(self, prepared: Candidate, case: CheckCase) -> Array:
        """The output of the candidate. CallFailed: it raised."""
        return self._result(prepared, case).output

    def _result(self, prepared: Candidate, case: CheckCase) -> CandidateResult:
        """What the candidate returns for a case; it is called once."""

        def call() -> CandidateResult:
            with prepared.evaluating():
                return prepared.adapter.call(case)

        result: CandidateResult = self.results.result(call, prepared, case)
        return result

    def reading(self, convention: Convention) -> tuple[Convention, Convention | None]:
        """Axes, the order of packed weights and causality: the first reading that agrees, or else the first of those that agree most; and a
        dtype, a width of heads and a tile of rows, if a candidate raises with the usual ones.

        If it takes a batch of heads, readings with fewer axes count for nothing, since an axis that is taken for another one by mistake
        may be right in one of them. The second value is the first of those that agrees.
        """
        refused: list[Reading | Exception] = []
        for required in chain([convention], with_requirements(convention)):
            try:
                found = self._reading(required, MOST_READINGS if required is convention else MOST_REQUIRED)
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

    def _reading(self, convention: Convention, most: int) -> "Reading":
        """The same with the convention's own dtype, width of heads and tile of rows."""
        best: tuple[int, Convention] | None = None
        most_axes, instead = 0, None
        failures: dict[str | None, str] = {}
        for _, reading in zip(range(most), self._readings(convention), strict=False):
            try:
                reading = self._with_causality(reading)
            except CallFailed as failure:
                failures.setdefault(reading.framework, f"with {reading.framework}, it raised {failure}")
                agreeing = 0
            else:
                agreeing = self._agreement(self.prepare(reading))
                if _axes_of(reading) > most_axes and self._takes_all(self.prepare(reading)):
                    most_axes = _axes_of(reading)
            if _axes_of(reading) < most_axes:
                instead = instead or (reading if agreeing == ALL_AGREE else None)
                continue
            if agreeing == ALL_AGREE:
                return Reading(agreeing, reading)
            if best is None or agreeing > best[0]:
                best = agreeing, reading
        assert best is not None  # there is a reading, or none can be prepared
        return Reading(*best, instead, failures, self._unsupported(convention, best[1]) if best[0] <= NOTHING_AGREES else None)

    def _readings(self, convention: Convention) -> Iterator[Convention]:
        """The conventions under which a candidate can be prepared, the most common first. Ambiguous: there is none."""
        refused: list[ValueError] = []
        fits = False
        for reading in self._expanded(convention):
            if isinstance(reading, ValueError):
                refused.append(reading)
            else:
                fits = True
                for windowed in self._with_and_without_window(reading):
                    prepared = self.prepare(windowed)
                    yield from _axes(prepared, windowed)
                    if windowed.left_out:
                        yield from _axes(prepared, replace(windowed, residual=True))
                    if (other := self._otherwise(prepared, windowed)) is not None:
                        yield from _axes(self.prepare(other), other)
        if not fits:
            first, *_ = refused
            raise first

    def _with_and_without_window(self, convention: Convention) -> Iterator[Convention]:
        """The convention with the windows that a candidate can be prepared with, and without one."""
        prepared = self.prepare(replace(convention, window=None))
        for other in with_and_without_window(self.candidate, prepared, convention):
            with suppress(Exception):  # a class may refuse the size
                self.prepare(other)
                yield other

    def _otherwise(self, prepared: Candidate, reading: Convention) -> Convention | None:
        """The convention with pages, or without keys and values of their own, if the candidate can be called so and raises as it is."""
        adapter = prepared.adapter
        optional = {name: "unused" for role, name in adapter.roles.items() if role in ("key", "value") and role not in adapter.required}
        try:
            self.output(prepared, self.first_case(prepared))
        except CallFailed:
            if "page_table" in adapter.roles:
                return reading.tried(paged=True)
            return reading.tried(arguments={**reading.arguments, **optional}) if optional else None
        return None

    def _expanded(self, convention: Convention) -> Iterator[Convention | ValueError]:
        """The convention with each value of what is ambiguous; an error instead of one that fits no candidate."""
        try:
            self.prepare(convention)
        except Ambiguous as ambiguous:
            values = () if ambiguous.option == "weights" and convention.weights is not None else ambiguous.values
            if not values:
                yield ambiguous
            readings = [self._expanded(replace(convention, **{ambiguous.option: value})) for value in values]
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

    def _unsupported(self, before: Convention, best: Convention) -> Ambiguous | None:
        """The question whose answer was guessed, if no name speaks for the guess; None if there is none."""
        if best.arguments != before.arguments or (best.weights != before.weights and not names_speak_for(best.weights or {})):
            try:
                self.prepare(replace(best, arguments=before.arguments, weights=before.weights))
            except Ambiguous as asked:
                return asked
        return None

    def _with_causality(self, convention: Convention) -> Convention:
        """Causal if the last row depends on the key before, and the first rows not on the last key. CallFailed: it cannot be called."""
        prepared = self.prepare(convention)
        case = self.first_case(prepared)
        before = self.output(prepared, case)
        if "causal" in convention.given or before.shape[:2] != case.query.shape[:2]:
            return convention
        changed = changed_rows(before, self.output(prepared, perturbed(case, -1, prepared)))
        is_causal = changed[-1] and not changed[: max(1, len(changed) - 2)].any()
        if is_causal and len(changed) > 1:  # and no row is a copy of its own input
            is_causal = changed_rows(before, self.output(prepared, perturbed(case, -2, prepared)))[-1]
        limited = prepared.spec.positional and any(interval.right is not None for interval in prepared.spec.intervals)
        return convention if limited else convention.tried(causal=bool(is_causal))

    def _agreement(self, prepared: Candidate) -> int:
        """How much agrees: ALL_AGREE if all cases do that depend on no meaning of a mask; less if the first does, one less if the candidate
        takes the others; or only one row; 0 if there are none."""
        if (first := next(self._cases(prepared), None)) is None:
            return 0
        if not self.agrees(prepared, first):
            return NOTHING_AGREES + any(self.agrees(prepared, case) for case in self.cases_of(prepared, "one row"))
        if self._all_agree(prepared):
            return ALL_AGREE
        return ALL_AGREE - 1 if self._takes_all(prepared) else ALL_AGREE - 2

    def _all_agree(self, prepared: Candidate) -> bool:
        cases = self._cases(prepared)
        first = next(cases, None)
        return first is not None and self.agrees(prepared, first) and all(self.agrees(prepared, case) for case in cases)

    def _cases(self, prepared: Candidate) -> Iterator[CheckCase]:
        """The short cases that it can be called on and that depend on no meaning of a mask."""
        adapter = prepared.adapter
        for case in self.cases_of(prepared):
            if not (case.chunks or case.name == "large logits" or adapter.skip_reason(case) or adapter.mask_role(case.kind) in OF_MASKS):
                yield case

    def _takes_all(self, prepared: Candidate) -> bool:
        """Whether each of these calls returns an output of the right shape."""
        width = prepared.spec.output_dim
        with suppress(CallFailed, ValueError):
            return all(self.output(prepared, case).shape == (*case.query.shape[:2], width) for case in self._cases(prepared))
        return False

    def agrees(self, prepared: Candidate, case: CheckCase) -> bool:
        """Whether the output is the reference's; in float64 to the digits of float32, of which constants may be."""
        with suppress(CallFailed, ValueError):
            result = self._result(prepared, case)
            dtype = "float32" if result.dtype == "float64" else result.dtype
            if (key := (id(case), dtype)) not in self.expected:
                self.expected[key] = case, Computation(case.layer(prepared.spec), prepared.weights, case, dtype).run()
            _, expected = self.expected[key]
            return bool(np.isfinite(result.output).all()) and expected.agrees("output", result.output) and len(result.output[0]) > 0
        return False

    def positions(self, convention: Convention) -> tuple[Convention, tuple[str, LayerSpec] | None]:
        """The convention with the window under which everything agrees, or without one; and the positions, in words, and the layer with
        them, if it does not agree without any."""
        plain = self.prepare(convention)
        agrees = self._all_agree(plain)
        if agrees and ROPE_TABLES.isdisjoint(plain.adapter.roles):
            return convention, None
        for windowed in self._with_and_without_window(convention):
            for words, spec in with_positions(self.prepare(windowed).spec):
                trial = Trial(self.candidate, spec, self.seed)
                with suppress(ValueError, CallFailed):
                    if trial._all_agree(trial.prepare(windowed)):
                        return windowed, (words, spec)
        return convention if agrees else replace(convention, window=None), None

    def one_length(self, convention: Convention) -> Convention:
        """The convention, with `one_length` if the candidate raises where there are more keys than queries."""
        prepared = self.prepare(convention)
        case = self._cross_attention(prepared)
        try:
            if case is not None and not prepared.adapter.skip_reason(case):
                self.output(prepared, case)
        except CallFailed:
            return replace(convention, one_length=True)
        return convention

    def _cross_attention(self, prepared: Candidate) -> CheckCase | None:
        """The short case with more keys than queries, if there is one."""
        return next((case for case in self.cases_of(prepared) if case.name == "cross-attention"), None)

    def offset(self, convention: Convention) -> Convention:
        """Where the queries of an always causal candidate are, if there are more keys: the last query sees the last key, or does not."""
        prepared = self.prepare(convention)
        if "query_offset" in convention.given or not convention.causal or "key" not in prepared.adapter.roles:
            return convention
        at_start = convention.tried(query_offset="start")
        prepared = self.prepare(at_start)
        case = self._cross_attention(prepared)
        with suppress(CallFailed, ValueError):
            if case is not None:
                before, after = (self.output(prepared, x) for x in (case, perturbed(case, -1, prepared)))
                return convention.tried(query_offset="end") if changed_rows(before, after)[-1] else at_start
        return convention


def _axes_of(reading: Convention) -> int:
    """How many of the axes of batch and heads the inputs have."""
    return reading.batched + (reading.layout != "b,n,d")


def _axes(prepared: Candidate, convention: Convention) -> Iterator[Convention]:
    """The convention with the usual orders of the inputs' axes; and what a mask may mean that has to be passed."""
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


def perturbed(case: CheckCase, key: int, prepared: Candidate) -> CheckCase:
    """The case with other numbers in one row of the inputs of keys and values, which are those of the queries for some candidates."""
    added = np.zeros((case.key.shape[1], 1))
    added[key] = 1.0
    alike = case.query if "key" not in prepared.adapter.roles else None
    query = case.query if alike is None else case.query + added * np.sin(1.0 + np.arange(case.query.shape[-1]))
    inputs = {name: x + added * np.sin(1.0 + np.arange(x.shape[-1])) for name, x in (("key", case.key), ("value", case.value))}
    return replace(case, query=query, **inputs)


def changed_rows(before: Array, after: Array) -> Array:
    """Which rows of queries differ: [q]."""
    if before.shape != after.shape:
        return np.ones(before.shape[1], bool)
    differences = np.abs(np.nan_to_num(after) - np.nan_to_num(before)).max(axis=(0, *range(2, before.ndim)))
    return np.asarray(differences > CHANGED * np.abs(np.nan_to_num(before)).max())
