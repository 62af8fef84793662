"""Soft capping of scores: c · tanh(s / c), before biases and masks (Gemma 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import SCORES, Step, Steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class SoftcapOperator(Operator):
    name, field, of_calls = "softcap", "softcap", True
    left_out = LeftOut("the softcap", "softmax(S)", "softmax(c · tanh(S / c))")

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """`softcap` is the call's, or else the layer's."""
        formula = "S = softcap · tanh(S / softcap)"
        return {"cap": (Step("softcap", ("scores", "softcap"), SCORES, formula, _cap),)}

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """A softcap of 0 is none."""
        if fields.get(cls.field) == 0 and fields[cls.field] is not False:
            fields[cls.field] = None

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """A softcap so small that it changes scores of unit variance."""
        return draw.number(0.5, 5)


def _cap(m: Arithmetic, scores: Any, softcap: float) -> Any:
    return m.xp.tanh(scores / softcap) * softcap
