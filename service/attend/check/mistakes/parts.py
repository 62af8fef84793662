"""Operators of a layer that are left out."""

from attend.attention.operators import OPERATORS
from attend.check.changes import change_spec
from attend.check.mistakes.mistake import Mistake

MISTAKES: dict[str, dict[str, Mistake]] = {
    operator.field: {
        f"{left_out.name} is left out": Mistake(
            change_spec(**{operator.field: lambda spec, field=operator.field: False if getattr(spec, field) is True else None}),
            left_out.computed,
            left_out.expected,
        )
    }
    for operator in OPERATORS
    if (left_out := operator.left_out) is not None
}
