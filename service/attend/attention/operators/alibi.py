"""ALiBi: biases linear in the distance (Press et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import select_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.masks import Masks
    from attend.attention.operators.operator import Layer
    from attend.spec_parts import Dimensions


class AlibiOperator(Operator):
    name, field, positional, per_head = "alibi", "alibi", True, True
    left_out = LeftOut("ALiBi", "softmax(S)", "softmax(S - slope · |i - j|)")

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"bias": "S_ij = S_ij - slope_h · |i - j|"}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._slopes = torch.tensor(slopes(layer.spec.num_heads), dtype=layer.dtype, device=layer.device)

    def bias(self, query: Tensor, call: Call, rows: slice, keys: slice) -> Tensor:
        """-slope · |position - j|, where positions outside of the keys count as the nearest key: `shift` has the rest."""
        j = torch.arange(keys.start, keys.stop, device=query.device)
        distance = (call.masks.clamped_positions(rows)[:, None, :, None] - j).abs().to(self.dtype)
        return -select_heads(self._slopes, call.options.heads)[:, None, None] * distance

    def shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> Tensor | None:
        """-slope times the distance of each query's position from the nearest key; None if all positions are those of keys."""
        distance = (masks.positions[:, rows] - masks.clamped_positions(rows)).abs()
        return -select_heads(self._slopes, heads).double()[:, None] * distance[:, None] if distance.any() else None


def slopes(heads: int) -> list[float]:
    """m_h of Press et al. 2022: 2^(-8h/n) for a power of two; else those of the power below n, then every other one of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
