"""Softmax of the scores times ln n, for a row that may attend to n keys (Nakanishi 2025, equation 3, with s in the scale)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.masks import Masks
    from attend.attention.operators.operator import Draw, Fields
    from attend.spec_parts import Dimensions


class ScalableSoftmaxOperator(Operator):
    name, field = "scalable_softmax", "normalizer"

    @classmethod
    def is_active(cls, spec: Dimensions) -> bool:
        return bool(getattr(spec, cls.field) == cls.name)

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"normalise_input": "S_ij = S_ij · ln n_i, for the n_i keys that are visible to i"}

    @classmethod
    def score_growth(cls, spec: Dimensions, masks: Masks) -> float:
        return max(1.0, math.log(max(1, masks.num_keys)))

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        return cls.name

    def normalise_input(
        self, scores: Tensor, shift: Tensor | None, call: Call, rows: slice, visible: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Both times ln n, which is 0 in fully masked rows."""
        num_keys = call.masks.num_keys
        if visible is None:
            count = torch.full((1, 1, 1, 1), num_keys, device=scores.device)
        else:
            count = visible.expand(*visible.shape[:-1], num_keys).sum(-1, keepdim=True)
        factor = count.clamp(min=1).to(self.dtype).log()  # [b|1, h|1, rows|1, 1]
        return scores * factor, None if shift is None else shift * factor[..., 0]
