"""Soft capping of scores: c · tanh(s / c), before biases and masks (Gemma 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.operators.operator import Draw, Fields
    from attend.spec_parts import Dimensions


class SoftcapOperator(Operator):
    name, field, of_calls = "softcap", "softcap", True
    left_out = LeftOut("the softcap", "softmax(S)", "softmax(c · tanh(S / c))")

    def score(self, scores: Tensor, call: Call) -> Tensor:
        """`call.options.softcap` is the layer's, unless the request has one."""
        return (scores / call.options.softcap).tanh() * call.options.softcap if call.options.softcap else scores

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"score": "S = softcap · tanh(S / softcap)"}

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """A softcap of 0 is none."""
        if fields.get(cls.field) == 0 and fields[cls.field] is not False:
            fields[cls.field] = None

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """A softcap so small that it changes scores of unit variance."""
        return draw.number(0.5, 5)
