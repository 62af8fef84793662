"""Forgetting attention (Lin et al. 2025, arXiv 2503.02130): forget gates that depend on the keys' inputs, as a bias on the scores.

    f_lh = sigmoid(w_h · x_l + b_h)        S_ij + Σ log f_l over the keys l with j < l ≤ i that query i may attend to

The sums are computed in float64, since they grow with the distance. There is nothing to forget between a query and later keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attend.attention.operators.declarations import CachedTensor, Cost, LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import select_heads

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.masks import Masks
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Layer
    from attend.attention.operators.stages import Product, Projected
    from attend.spec_parts import Dimensions


class ForgetGateOperator(Operator):
    name, field, positional, needs_projections = "forget_gate", "forget_gate", True, True
    left_out = LeftOut("the forget gate", "softmax(S)", "softmax(S + F), F_ij = Σ log f_l for j < l ≤ i")
    per_head = True
    matrices = key_matrices = ("forget_gate",)
    axes: ClassVar[Axes] = {"forget_gate.weight": ("heads", "in"), "forget_gate.bias": ("heads",)}
    identifying_weight = "forget_gate.weight"

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        return {"forget_gate.weight": (spec.num_heads, spec.key_dim), "forget_gate.bias": (spec.num_heads,)}

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"bias_of_visible": "S_ij = S_ij + Σ_l log f_lh over the visible keys l with j < l ≤ i,  f = sigmoid(z W_F + b_F)"}

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """Sums of float64 numbers for each score; the projection is counted with the others."""
        keys = options.num_keys
        pairs = spec.num_heads * options.num_queries * keys
        elements = keys * (spec.key_dim + 3 * spec.num_heads) + 4 * min(pairs, max(1 << 20, spec.num_heads * keys))
        return Cost(operations=12 * pairs, memory_bytes=8 * elements)

    @classmethod
    def cached(cls, spec: Dimensions) -> dict[str, CachedTensor]:
        """The logarithms of the gates, in float64."""
        return {"forget_gate": CachedTensor(spec.num_heads, 1, "float64")}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._weight, self._bias = (layer.weights[name].double() for name in self.axes)

    def rows_to_cache(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        """[b, heads, k, 1]."""
        return {"forget_gate": self._log_gates(call.key)}

    def bias_of_visible(self, call: Call) -> ForgottenSums:
        gates = self._log_gates(call.key) if call.cached is None else call.cached["forget_gate"][None]
        return ForgottenSums(select_heads(gates, call.options.heads, axis=1).transpose(2, 3), call.masks, self.dtype)

    def _log_gates(self, key: Tensor) -> Tensor:
        """log sigmoid(x W^T + b) of the keys' inputs [b, k, key_dim], in float64: [b, heads, k, 1]."""
        logits = torch.nn.functional.linear(key.double(), self._weight, self._bias)
        return torch.nn.functional.logsigmoid(logits).transpose(1, 2)[..., None]


@dataclass(frozen=True)
class ForgottenSums:
    """The biases of one call."""

    log_gates: Tensor  # float64 [b, h, 1, k]
    masks: Masks
    dtype: torch.dtype

    def terms_of_rows(self, query: Tensor, rows: slice) -> Tensor:
        """For each key the sum of the later ones up to the query's position, without masked ones: [b, h, rows, k]."""
        counts = torch.arange(self.masks.num_keys, device=query.device) <= self.masks.positions[:, None, rows, None]
        if (visible := self.masks.visible(rows)) is not None:
            counts = counts & visible
        sums = torch.where(counts, self.log_gates, 0.0).cumsum(-1)
        return (sums[..., -1:] - sums).to(self.dtype)
