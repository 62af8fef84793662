"""Each operator over HTTP against the float64 reference: random calls, selected weights and gradients of layers that have it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from attend import spec_properties
from attend.attention.initialization import in_dtype
from attend.attention.operators import OPERATORS
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step
from attend.attention.program import PLACES, SINGLE
from attend.attention.reference import forward
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.check.random_cases import Draw
from attend.client import Client
from attend.spec import LayerSpec
from attend.tensors import BY_NUMPY
from support.cases import weights_of
from support.operator_cases import LAYER, agree, agree_with_finite_differences, case_with, put

SEEDS = st.integers(0, 2**32 - 1)
OUTPUTS = ["output", "attention_weights", "scores", "log_sum_exp", "head_outputs"]
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)


@cache
def active_specs(operator: type[Operator]) -> list[LayerSpec]:
    """Random specs of layers with the operator."""
    return [spec for seed in range(40) if operator.is_active(spec := case_with(operator, seed).spec)]


@each_operator
def test_every_step_has_a_formula_and_a_place(operator: type[Operator]) -> None:
    """Over random specs, since a norm may be before or after RoPE. Windows and chunks have no step, but bound an interval."""
    found: set[str] = set()
    for spec in active_specs(operator):
        steps = operator.steps(spec, {operator.field})
        assert {*steps} <= {*PLACES}
        found |= {*steps} | ({"interval"} if str(operator.interval(spec)) else set())
        names = [step.name for step in spec.program]
        assert len(names) == len({*names})
        for place, more in steps.items():
            for step in more:
                assert step.formula or place == "constants" or step.name in ("distance_vectors", "indexer_mask")
                assert step.name in names
    assert found


def test_every_place_of_the_program_is_that_of_an_operator() -> None:
    specs = [case_with(operator, seed).spec for operator in OPERATORS for seed in range(12)]
    places = {place for spec in specs for operator in spec.operators for place in operator.steps(spec, {operator.field})}
    assert places == {*PLACES}


@each_operator
def test_the_summary_in_tables_of_layers_names_the_field_or_its_value(operator: type[Operator]) -> None:
    assert active_specs(operator)
    for one in active_specs(operator):
        assert operator.summary(one).split()[0] in (operator.field, getattr(one, operator.field))


@pytest.mark.parametrize("place", sorted(SINGLE))
def test_two_operators_at_a_place_of_one_are_refused(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """At each place that only one operator of a layer can have, a second operator is added."""
    fields = {"d_model": 24, "num_heads": 2}
    drawn = {**LayerSpec(**fields).model_dump(), "drawn": (), "num_softmaxes": 1}
    values = {operator: operator.random(Draw(np.random.default_rng(0)), drawn) for operator in OPERATORS}
    specs = {operator: LayerSpec.model_validate({**fields, operator.field: value}) for operator, value in values.items()}
    owner = next(operator for operator, spec in specs.items() if place in operator.steps(spec, {operator.field}))

    class Second(Operator):
        field = "scale"

        @classmethod
        def steps(cls, spec: Any, features: Any = ()) -> Any:
            return {place: ()}

    monkeypatch.setattr(spec_properties, "OPERATORS", (*OPERATORS, Second))
    with pytest.raises(ValidationError, match=f"none, since {owner.field} is computed in its place"):
        LayerSpec.model_validate({**fields, owner.field: values[owner]})


CONFLICTS = [(operator, field) for operator in OPERATORS for field in operator.conflicts]


@pytest.mark.parametrize(("operator", "field"), CONFLICTS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_a_spec_with_two_operators_that_conflict_is_refused(operator: type[Operator], field: str) -> None:
    """Each of the two alone is not."""
    fields = {"d_model": 24, "num_heads": 2}
    drawn = {**LayerSpec(**fields).model_dump(), "drawn": (), "num_softmaxes": operator.num_softmaxes}
    other = next(each for each in OPERATORS if each.field == field)
    values = {each.field: each.random(Draw(np.random.default_rng(0)), drawn) for each in (operator, other)}
    for name, value in values.items():
        LayerSpec(**fields, **{name: value})
    with pytest.raises(ValidationError, match=f"since {operator.conflicts[field]}, got {other.name}"):
        LayerSpec(**fields, **values)


@each_operator
@given(seed=SEEDS, dtype=st.sampled_from(["float64", "float32"]), data=st.data())
def test_random_calls_agree_with_the_reference(
    client: Client, operator: type[Operator], dtype: str, seed: int, data: st.DataObject
) -> None:
    """Outputs together, the output alone, and the weights of some heads and queries alone."""
    case = case_with(operator, seed, dtype)
    assume(operator.is_active(case.spec))
    exact = put(client, case)
    for outputs in ([name for name in OUTPUTS if name in case.spec.outputs()], ["output"]):
        result = client.attend(**case.request, layer=LAYER, outputs=outputs)
        for name in outputs:
            agree(case, name, result[name], getattr(exact, name))
    select = {
        name: data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
        for name, n in zip(("heads", "queries"), exact.attention_weights.shape[-3:-1], strict=True)
        if data.draw(st.booleans())
    }
    ours = client.attend(**case.request, layer=LAYER, outputs=["attention_weights"], select=select or None).attention_weights
    heads, queries = (select.get(name, slice(None)) for name in ("heads", "queries"))
    agree(case, "attention_weights", ours, exact.attention_weights[..., heads, :, :][..., queries, :])


@each_operator
@settings(max_examples=8)
@given(seed=SEEDS)
def test_every_value_that_a_step_writes_is_an_output(client: Client, operator: type[Operator], seed: int) -> None:
    """It is that of the reference, with the shape, datatype and bytes that the plan says."""
    case = case_with(operator, seed)
    assume(operator.is_active(case.spec))
    weights = in_dtype(case.spec, weights_of(case))
    client.put_layer(LAYER, case.spec, case.weights)
    exact = forward.every_output(case.spec, weights, **case.request)
    planned = client.plan(**case.request, layer=LAYER, outputs=[*exact]).outputs
    result = client.attend(**case.request, layer=LAYER, outputs=[*exact])
    for name, expected in exact.items():
        assert [*result[name].shape] == planned[name].shape and BY_NUMPY[result[name].dtype].name == planned[name].datatype
        assert result[name].nbytes == planned[name].bytes
        agree(case, name, result[name], expected)


@each_operator
def test_no_step_changes_what_it_reads(operator: type[Operator], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are reused: those of constants in every call of a layer, those before a mistake in every mistake that `attend check` tries."""
    run_steps = forward.run_steps

    def run_read_only(m: NumpyArithmetic, steps: Sequence[Step], values: dict[str, Any]) -> None:
        for step in steps:
            for x in values.values():
                if isinstance(x, np.ndarray):
                    x.flags.writeable = False
            run_steps(m, (step,), values)

    monkeypatch.setattr(forward, "run_steps", run_read_only)
    for seed in range(5):
        case = case_with(operator, seed)
        assert forward.every_output(case.spec, weights_of(case), **case.request)


@each_operator
@settings(max_examples=settings.default.max_examples // 3)  # each number is two calls
@given(seed=SEEDS)
def test_gradients_agree_with_finite_differences(client: Client, operator: type[Operator], seed: int) -> None:
    case = case_with(operator, seed)
    assume(operator.is_active(case.spec))
    agree_with_finite_differences(client, case, seed)
