"""T5's biases by bucket of distance (Raffel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value
from attend.spec_parts import WHOLE, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Misfit
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions
    from attend.tensors import Array


class RelativeBias(Part):
    """T5's biases by bucket of distance (Raffel et al. 2020), from the weight `relative_bias` [buckets, num_heads]."""

    buckets: Annotated[int, Field(ge=4, le=65536, strict=True), WHOLE] = Field(default=32, examples=[32])
    max_distance: Width = Field(default=128, examples=[128])
    bidirectional: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact = self.buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= exact:
            raise field_error(
                "/max_distance", f"more than {exact}, the number of distances with a bucket of their own", str(self.max_distance)
            )
        return self


class T5BiasOperator(Operator):
    name, field, positional = "t5_bias", "relative_bias", True
    left_out = LeftOut("the relative bias", "softmax(S)", "softmax(S + B), B_ij by the bucket of j - i")
    per_head = True
    axes: ClassVar[Axes] = {"relative_bias": ("buckets", "heads")}
    identifying_weight = "relative_bias"

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        return {"relative_bias": (getattr(spec, cls.field).buckets, spec.num_heads)}

    @classmethod
    def infer_fields(cls, weights: Mapping[str, Array], num_heads: int, misfit: Misfit) -> Fields:
        return {cls.field: {"buckets": len(weights["relative_bias"])}}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Few distances, so that many exceed the longest."""
        buckets, bidirectional = draw.one_of(4, 7, 8, 9, 32), draw.flag()
        longest = buckets // (4 if bidirectional else 2) + draw.integer(1, 12)
        return {"buckets": buckets, "bidirectional": bidirectional, "max_distance": longest}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The entry of the table for the bucket of each distance."""
        reads, formula = ("positions", "keys", "relative_bias"), "t5_bias_ij = relative_bias[bucket(j - i), h]"
        compute = partial(_bias, settings=getattr(spec, cls.field))
        return {"bias": (Step("t5_bias", reads, {"t5_bias": Value("b,h,q,k")}, formula, compute),)}


def _bias(m: Arithmetic, positions: Any, keys: Any, table: Any, *, settings: RelativeBias) -> Any:
    return m.wide(m.xp.moveaxis(table[relative_buckets(m, keys - positions[:, :, None], settings)], -1, 1))


def relative_buckets(m: Arithmetic, ahead: Any, settings: RelativeBias) -> Any:
    """The bucket of each distance of key and query (Raffel et al. 2020): half of the buckets are single distances, the others ranges.

    If bidirectional, keys ahead of the query use the second half of the table; otherwise they count as distance 0. The logarithm is in
    float32 as in T5, since rounding decides on the edge of a bucket.
    """
    buckets, start = settings.buckets, 0
    if settings.bidirectional:
        buckets //= 2
        start, distance = (ahead > 0) * buckets, abs(ahead)
    else:
        distance = m.xp.clip(-ahead, 0, None)
    exact = buckets // 2
    share = m.xp.log(m.single(m.xp.clip(distance, exact, None)) / exact) / math.log(settings.max_distance / exact)
    wide = exact + m.xp.clip(m.integer(share * (buckets - exact)), 0, buckets - exact - 1)
    return start + m.xp.where(distance < exact, distance, wide)
