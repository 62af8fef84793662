"""The table of outputs is complete: schemas and operators have the same names."""

from typing import get_args

from attend.attention.operators import OPERATORS
from attend.axes import OUTPUTS, outputs_from
from attend.wire.schemas.attend import AttendReply, BySequence, Output


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
