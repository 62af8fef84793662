"""Factors on queries that grow with their position (Nakanishi 2025; Llama 4)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.spec_parts import WHOLE, Part, Positive, Width

if TYPE_CHECKING:
    from attend.attention.call import Call
    from attend.attention.masks import Masks
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.stages import Projected
    from attend.spec_parts import Dimensions


class QueryScale(Part):
    """Queries grow with their position p, by 1 + factor · ln(1 + ⌊(max(p, 0) + shift)/length⌋), after norm and RoPE.

    Nakanishi 2025 and Llama 4.
    """

    factor: Positive = Field(examples=[0.1], description="0.1 in Llama 4 and Ministral 3.")
    length: Width = Field(examples=[8192], description="Number of positions with the same factor.")
    shift: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True), WHOLE] = Field(default=0, description="1 in Llama 4, 0 in Ministral 3.")


class QueryScaleOperator(Operator):
    name, field, positional = "query_scale", "query_scale", True
    left_out = LeftOut("the factor on queries by their position", "q_i · k_j", "f(i) q_i · k_j")

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        return False

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"rescale": "Q_i = Q_i · (1 + factor · ln(1 + ⌊(i + shift) / length⌋))"}

    @classmethod
    def score_growth(cls, spec: Dimensions, masks: Masks) -> float:
        scale: QueryScale = getattr(spec, cls.field)
        last = max(0, int(masks.positions.max())) if masks.positions.numel() else 0
        return 1 + scale.factor * math.log1p((last + scale.shift) // scale.length)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Lengths of few positions, so that factors differ within a call."""
        return {"factor": draw.number(0.1, 1), "length": draw.integer(1, 4), "shift": draw.integer(0, 2)}

    def rescale(self, projected: Projected, call: Call) -> Projected:
        """Queries times the factors of their positions; before 0 they are those of 0."""
        (query, key, value), scale, positions = projected, getattr(self.spec, self.field), call.masks.positions
        lengths = torch.div(positions.clamp(min=0) + scale.shift, scale.length, rounding_mode="floor")
        factors = 1 + scale.factor * lengths.to(torch.float64).log1p()
        return (query * factors[:, None, :, None].to(self.dtype)).to(query.dtype), key, value
