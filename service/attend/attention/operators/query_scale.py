"""Factors on queries that grow with their position (Nakanishi 2025; Llama 4)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value
from attend.spec_parts import WHOLE, Part, Positive, Width

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.masks import Masks
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
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
    def score_growth(cls, spec: Dimensions, masks: Masks) -> float:
        scale: QueryScale = getattr(spec, cls.field)
        last = max(0, int(masks.positions.max())) if masks.positions.numel() else 0
        return 1 + scale.factor * math.log1p((last + scale.shift) // scale.length)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Lengths of few positions, so that factors differ within a call."""
        return {"factor": draw.number(0.1, 1), "length": draw.integer(1, 4), "shift": draw.integer(0, 2)}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        reads, writes = ("query_projection", "positions"), {"query_projection": Value("b,h,q,head_dim")}
        formula = "Q_i = Q_i · (1 + factor · ln(1 + ⌊(max(i, 0) + shift) / length⌋))"
        return {"rescale": (Step("scale_query", reads, writes, formula, partial(_scale, scale=getattr(spec, cls.field))),)}


def _scale(m: Arithmetic, query: Any, positions: Any, *, scale: QueryScale) -> Any:
    lengths = m.xp.floor_divide(m.xp.clip(positions, 0, None) + scale.shift, scale.length)
    factors = 1 + scale.factor * m.xp.log1p(m.exact(lengths))
    return m.like(m.wide(query) * m.wide(factors[:, None, :, None]), query)
