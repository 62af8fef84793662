"""The tables of tensors are complete: schemas, calls and operators have the same names."""

import dataclasses
from typing import get_args

from attend.attention.call import Call
from attend.attention.operators import OPERATORS
from attend.axes import CALL_TENSORS, OUTPUTS, TENSOR_FIELDS, outputs_from
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendReply, AttendRequest, BySequence, Output


def test_every_output_has_one_row_in_the_order_of_the_schemas() -> None:
    assert get_args(Output) == tuple(OUTPUTS) == tuple(AttendReply.model_fields)[2:]


def test_operators_make_the_outputs_of_which_the_table_says_so() -> None:
    own = [name for operator in OPERATORS for name in operator.own_outputs]
    assert sorted(own) == sorted(outputs_from("operator"))


def test_outputs_with_an_axis_of_queries_and_one_of_keys_may_be_given_for_each_sequence() -> None:
    fields = AttendReply.model_fields
    assert {name for name, field in fields.items() if BySequence in get_args(field.annotation)} == {
        name for name, output in OUTPUTS.items() if output.by_sequence
    }


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
