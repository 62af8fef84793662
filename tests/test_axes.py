"""The tables of tensors are complete: schemas, calls and operators have the same names."""

import dataclasses
from typing import get_args

from attend.attention.call import Call
from attend.axes import CALL_TENSORS, TENSOR_FIELDS
from attend.spec import LayerSpec
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
    others = {field.name for field in dataclasses.fields(Call) if field.name not in ("options", "query", "key", "value", "masks", "cached")}
    assert others == set(CALL_TENSORS)


def test_what_a_field_needs_may_be_in_every_request_that_may_have_the_field() -> None:
    for name, field in TENSOR_FIELDS.items():
        if (needed := TENSOR_FIELDS.get(field.needs)) is not None:
            assert (needed.packed or not field.packed) and (needed.divisible or not field.divisible), name
