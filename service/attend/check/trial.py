"""A candidate that is called under one convention after the other, on small cases.

A convention under which its numbers are those of the reference is right: random numbers agree to six digits by chance under no other one,
unless the two are the same. A wrong candidate agrees under none. What its numbers depend on then tells more.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attend.check.adapter import CallFailed, CandidateResult
from attend.check.candidate import OF_CALLS, Candidate
from attend.check.cases import CheckCase, Group, Repeatable
from attend.check.computation import Computation, Expected
from attend.check.convention import OF_MASKS, Convention
from attend.check.layer import Known
from attend.check.preparation import prepare
from attend.check.windows import with_and_without_window
from attend.spec import LayerSpec
from attend.tensors import Array

MOST_PREPARED = 4  # candidates that are looked at for one that differs in calls alone
LONGEST = 64  # rows that a class is constructed for until it is compared
CHANGED = 1e-3  # of the largest number: by how much an output differs that depends on a key


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that is called under one convention after the other, and compared with the layer `spec`."""

    candidate: Any
    spec: LayerSpec | None
    seed: int
    prepared: list[tuple[Convention, Candidate]] = field(default_factory=list)
    drawn: dict[tuple[object, ...], Repeatable[CheckCase]] = field(default_factory=dict)
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
        if key not in self.drawn:
            self.drawn[key] = Repeatable(prepared.draw_cases(self.seed, {group}))
        return self.drawn[key]

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

    def with_and_without_window(self, convention: Convention) -> Iterator[Convention]:
        """The convention with the windows that a candidate can be prepared with, and without one."""
        prepared = self.prepare(replace(convention, window=None))
        for other in with_and_without_window(self.candidate, prepared, convention):
            with suppress(Exception):  # a class may refuse the size
                self.prepare(other)
                yield other

    def all_agree(self, prepared: Candidate) -> bool:
        cases = self.cases_without_masks(prepared)
        first = next(cases, None)
        return first is not None and self.agrees(prepared, first) and all(self.agrees(prepared, case) for case in cases)

    def cases_without_masks(self, prepared: Candidate) -> Iterator[CheckCase]:
        """The short cases that it can be called on and that depend on no meaning of a mask."""
        adapter = prepared.adapter
        for case in self.cases_of(prepared):
            if not (case.chunks or case.name == "large logits" or adapter.skip_reason(case) or adapter.mask_role(case.kind) in OF_MASKS):
                yield case

    def takes_all(self, prepared: Candidate) -> bool:
        """Whether each of these calls returns an output of the right shape."""
        width = prepared.spec.output_dim
        with suppress(CallFailed, ValueError):
            return all(self.output(prepared, case).shape == (*case.query.shape[:2], width) for case in self.cases_without_masks(prepared))
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
