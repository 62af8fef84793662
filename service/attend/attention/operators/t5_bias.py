"""T5's biases by bucket of distance (Raffel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import select_heads
from attend.spec_parts import WHOLE, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Layer, Misfit
    from attend.spec_parts import WHOLE, Dimensions
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
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"bias": "S_ij = S_ij + relative_bias[bucket(j - i), h]"}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Few distances, so that many exceed the longest."""
        buckets, bidirectional = draw.one_of(4, 7, 8, 9, 32), draw.flag()
        longest = buckets // (4 if bidirectional else 2) + draw.integer(1, 12)
        return {"buckets": buckets, "bidirectional": bidirectional, "max_distance": longest}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._table = layer.weights["relative_bias"]

    def bias(self, query: Tensor, call: Call, rows: slice, keys: slice) -> Tensor:
        """The entry of each distance's bucket."""
        positions, j = call.masks.positions[:, rows], torch.arange(keys.start, keys.stop, device=query.device)
        table = select_heads(self._table, call.options.heads, axis=1)
        return table[_buckets(j - positions[:, :, None], getattr(self.spec, self.field))].movedim(-1, 1)


def _buckets(distance: Tensor, spec: RelativeBias) -> Tensor:
    """T5's bucket of key minus query position (Raffel et al. 2020): exact for short distances, logarithmic up to max_distance."""
    buckets = spec.buckets
    offset = torch.zeros_like(distance)
    if spec.bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # float32, as in T5: at the edges of buckets, another precision would choose the neighbouring bucket
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
