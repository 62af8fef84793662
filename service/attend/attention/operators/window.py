"""Windows: a query attends to the keys around its position. The masks of a call combine that of the layer and its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attend.attention.operators.declarations import Interval, LeftOut
from attend.attention.operators.operator import Operator

if TYPE_CHECKING:
    from attend.attention.operators.operator import Draw, Fields
    from attend.spec_parts import Dimensions


class WindowOperator(Operator):
    name, field, positional, of_calls = "window", "window", True, True
    left_out = LeftOut("the window", "all keys (that no mask blocks) are seen", "keys outside the window are blocked")

    @classmethod
    def interval(cls, spec: Dimensions) -> Interval:
        window = getattr(spec, cls.field)
        return Interval(window.left, window.right)

    @classmethod
    def summary(cls, spec: Dimensions) -> str:
        """`window 4095 before, 0 after`"""
        window = getattr(spec, cls.field)
        sides = {"before": window.left, "after": window.right}
        return " ".join([cls.field, ", ".join(f"{bound} {side}" for side, bound in sides.items() if bound is not None)]).rstrip()

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Either side may be unbounded."""
        left, right = (draw.integer(0, 5) if draw.flag(0.7) else None for _ in range(2))
        return {"left": left, "right": right}
