"""Attention sinks: a learnt score for each head that takes part in the softmax and has no value (gpt-oss)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import select_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Layer
    from attend.spec_parts import Dimensions


class SinksOperator(Operator):
    name, field = "sinks", "sinks"
    left_out = LeftOut("the sink of the softmax", "exp(S) / Σ exp(S)", "exp(S) / (exp(sink) + Σ exp(S))")
    per_head = True
    axes: ClassVar[Axes] = {"sinks": ("heads",)}
    identifying_weight = "sinks"
    zeros_without_weights = True  # add_zero_attn of torch.nn.MultiheadAttention, softmax1

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        return {"sinks": (spec.num_heads,)}

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"sinks": "A_ij = exp(S_ij) / (exp(sink_h) + Σ_j exp(S_ij))"}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._sinks = layer.weights["sinks"].to(layer.dtype)

    def sinks(self, heads: Sequence[int] | None) -> Tensor:
        return select_heads(self._sinks, heads)[:, None]
