"""Each operator over HTTP against the float64 reference: random calls, selected weights and gradients of layers that have it."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from attend import spec
from attend.attention.operators import OPERATORS, stages
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import STAGES, Stages, stages_of
from attend.attention.reference import operators as reference
from attend.check.random_cases import Draw
from attend.client import Client
from attend.spec import LayerSpec
from support.cases import weights_of
from support.gradients import gradients
from support.operator_cases import LAYER, agree, case_with, put

ONLY_TORCH = {"outputs", "rows_to_cache", "expand", "shift"}  # stages of outputs, caches and rounding, which the reference needs not have
SEEDS = st.integers(0, 2**32 - 1)
OUTPUTS = ["output", "attention_weights", "scores", "log_sum_exp", "head_outputs"]
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)


@each_operator
def test_the_reference_has_the_same_stages(operator: type[Operator]) -> None:
    if not operator.of_calls:
        functions = vars(import_module(f"{reference.__name__}.{operator.name}"))
        assert functions.keys() & {*STAGES} == stages_of(operator) - ONLY_TORCH


def test_every_stage_is_in_the_table_and_explained_with_an_example() -> None:
    assert [name for name in vars(Stages) if not name.startswith("_")] == [*STAGES]
    lines = [line.split() for line in str(stages.__doc__).splitlines() if line.startswith("    ")][1:]
    examples = {line[0]: line[-1] for line in lines}
    assert [*examples] == [*STAGES]
    named = {operator.name: operator for operator in OPERATORS}
    for stage, example in examples.items():
        assert stage in stages_of(named[example])


@each_operator
def test_every_stage_has_a_formula(operator: type[Operator]) -> None:
    """Over random specs, since a norm may be before or after RoPE. Windows and chunks have no stage, but bound an interval."""
    specs = [case_with(operator, seed).spec for seed in range(40)]
    found = {stage for spec in specs if operator.is_active(spec) for stage in operator.formula(spec)}
    assert found - {"interval"} == stages_of(operator) - ONLY_TORCH
    assert ("interval" in found) is (operator.interval.__func__ is not Operator.interval.__func__)  # type: ignore[attr-defined]


@each_operator
def test_the_summary_in_tables_of_layers_names_the_field_or_its_value(operator: type[Operator]) -> None:
    specs = [spec for seed in range(40) if operator.is_active(spec := case_with(operator, seed).spec)]
    assert specs
    for one in specs:
        assert operator.summary(one).split()[0] in (operator.field, getattr(one, operator.field))


@pytest.mark.parametrize("stage", [name for name, stage in STAGES.items() if stage.single])
def test_two_operators_with_a_stage_of_one_are_refused(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """With each stage that only one operator of a layer can have, a second operator with it is added."""
    (owner,) = [operator for operator in OPERATORS if stage in stages_of(operator)]

    class Second(Operator):
        field = "scale"

    setattr(Second, stage, lambda *_: None)
    monkeypatch.setattr(spec, "OPERATORS", (*OPERATORS, Second))
    fields = {"d_model": 24, "num_heads": 2}
    own = owner.random(Draw(np.random.default_rng(0)), {**LayerSpec(**fields).model_dump(), "drawn": (), "num_softmaxes": 1})
    with pytest.raises(ValidationError, match=f"none, since {owner.field} is computed in its place"):
        LayerSpec.model_validate({**fields, owner.field: own})


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
@given(seed=SEEDS, dtype=st.sampled_from(["float64", "float32"]))
def test_random_calls_agree_with_the_reference(client: Client, operator: type[Operator], dtype: str, seed: int) -> None:
    case = case_with(operator, seed, dtype)
    assume(operator.is_active(case.spec))
    exact = put(client, case)
    for outputs in ([name for name in OUTPUTS if name not in case.spec.undefined_outputs], ["output"]):
        result = client.attend(**case.request, layer=LAYER, outputs=outputs)
        for name in outputs:
            agree(case, name, result[name], getattr(exact, name))


@each_operator
@given(seed=SEEDS, data=st.data())
def test_selected_weights_agree_with_the_reference(client: Client, operator: type[Operator], seed: int, data: st.DataObject) -> None:
    case = case_with(operator, seed)
    assume(operator.is_active(case.spec))
    exact = put(client, case).attention_weights
    select = {
        name: data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
        for name, n in zip(("heads", "queries"), exact.shape[-3:-1], strict=True)
        if data.draw(st.booleans())
    }
    ours = client.attend(**case.request, layer=LAYER, outputs=["attention_weights"], select=select or None).attention_weights
    heads, queries = (select.get(name, slice(None)) for name in ("heads", "queries"))
    agree(case, "attention_weights", ours, exact[..., heads, :, :][..., queries, :])


@each_operator
@given(seed=SEEDS)
def test_gradients_agree_with_hand_derived_formulas(client: Client, operator: type[Operator], seed: int) -> None:
    case = case_with(operator, seed)
    assume(operator.is_active(case.spec))
    direction = np.random.default_rng(seed).standard_normal(put(client, case).output.shape)
    exact = gradients(case.spec, weights_of(case), direction, **case.request)
    result = client.attend(**case.request, layer=LAYER, outputs=list(exact), output_gradient=direction)
    for name, gradient in exact.items():
        agree(case, name, result[name], gradient)
