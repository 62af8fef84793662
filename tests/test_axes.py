"""The tables of tensors are complete: schemas, calls and operators have the same names."""

from typing import Any, get_args

import numpy as np
import pytest
import torch

from attend.attention.call import Call
from attend.attention.program import program_of
from attend.axes import FEATURES, PROGRAM_TENSORS, TENSOR_FIELDS
from attend.check.random_cases import REQUEST_FEATURES
from attend.limits import ServingLimits
from attend.serving.calls import make_call
from attend.serving.layers.registry import LayerRegistry
from attend.serving.rounding import may_amplify_rounding
from attend.spec import LayerSpec
from attend.wire.problems import validate
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendReply, AttendRequest, BySequence

LATENT = {"key_value_rank": 3, "rope_key_dim": 2}
INDEXER = {"num_heads": 2, "head_dim": 3, "top_k": 2}


def test_outputs_that_the_schema_describes_are_values_of_programs_with_the_axes_that_it_says() -> None:
    """Those with an axis of queries and one of keys may be given for each sequence."""
    specs = [LayerSpec.model_validate({"d_model": 8, "num_heads": 2, **part}) for part in ({}, {"latent": LATENT}, {"indexer": INDEXER})]
    every = {name: value for spec in reversed(specs) for name, value in spec.every_output.items()}
    for name, field in [*AttendReply.model_fields.items()][2:]:
        assert (field.description or "").startswith(f"[{','.join(every[name].output_axes)}]"), name
        assert (BySequence in get_args(field.annotation)) == every[name].by_sequence


def test_every_tensor_of_a_request_has_a_row_whose_elements_are_those_of_its_schema() -> None:
    kinds = {**AttendRequest.tensor_kinds, **AnalysisRequest.tensor_kinds}
    assert {name: field.kind for name, field in TENSOR_FIELDS.items()} == kinds


def test_rows_name_fields_and_tensors_that_exist() -> None:
    fields = {name for field in TENSOR_FIELDS.values() for name in (field.needs, field.excludes) if name}
    assert fields <= AttendRequest.model_fields.keys()


def test_what_a_field_needs_may_be_in_every_request_that_may_have_the_field() -> None:
    for name, field in TENSOR_FIELDS.items():
        if (needed := TENSOR_FIELDS.get(field.needs)) is not None:
            assert (needed.packed or not field.packed) and (needed.divisible or not field.divisible), name


def test_each_tensor_that_steps_read_is_read_by_one_and_is_in_random_cases() -> None:
    """A tensor that only its row declares would be accepted and have no effect. One without random cases would be compared with nothing:
    these are compared with the loops (`attention/reference/test_loops.py`), as those of `attention/test_replaced_heads.py` are."""
    spec = LayerSpec(d_model=8, num_heads=2)
    read = {name for step in program_of(spec, FEATURES) for name in step.reads}
    assert {field.value for field in PROGRAM_TENSORS.values()} <= read
    assert {*FEATURES.values()} == {name for name in REQUEST_FEATURES if name in PROGRAM_TENSORS} | {"pattern", "head_outputs"}


@pytest.mark.parametrize("name", [name for name, field in PROGRAM_TENSORS.items() if field.kind == "number"])
def test_rule_7_a_call_with_a_tensor_that_enlarges_its_scores_runs_alone(name: str) -> None:
    """Whether it enlarges them is seen in the scores, not in its row."""
    spec, rng = LayerSpec(d_model=10, num_heads=5, seed=3), np.random.default_rng(7)
    field, sizes = PROGRAM_TENSORS[name], {"b": 1, "h": 5, "q": 3, "k": 3, "value_head_dim": 2}
    tensor = rng.choice([-1e5, 1e5], [sizes[axis] for axis in field.unbatched[0] if axis != "b"])
    layer = LayerRegistry(torch.device("cpu"), ServingLimits()).make("layer", spec)
    query = rng.standard_normal((3, 10))

    def call(**tensors: Any) -> Call:
        return make_call(validate(AttendRequest, {"query": query, "outputs": ["scores"], **tensors}), spec)

    alone = may_amplify_rounding(spec, layer.score_deviation, call(**{name: tensor}))
    largest = [layer.attention.forward(each).tensors["scores"].abs().max() for each in (call(), call(**{name: tensor}))]
    assert alone == bool(largest[1] > 2 * largest[0])
