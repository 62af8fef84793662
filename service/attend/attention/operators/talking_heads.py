"""Talking heads (Shazeer et al. 2020, arXiv 2003.02436): heads mix their scores before the softmax, and their weights after it (CaiT).

S'_h = Σ_m P_hm S_m + b_h        A_h = Σ_m W_hm softmax(S')_m + c_h
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from attend.attention.operators.declarations import Cost, LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Layer
    from attend.spec_parts import Dimensions
    from attend.tensors import Array


class TalkingHeadsOperator(Operator):
    """Heads mix their scores and their weights, by matrices that are the identity unless they are given."""

    name, field = "talking_heads", "talking_heads"
    left_out = LeftOut("the mixing of heads (talking heads)", "softmax(S)", "W · softmax(P · S + b) + c over the heads")
    per_head = True
    amplifies_rounding = True  # heads may cancel out
    axes: ClassVar[Axes] = {
        **dict.fromkeys(("score_mixing.weight", "weight_mixing.weight"), ("heads", "heads")),
        **dict.fromkeys(("score_mixing.bias", "weight_mixing.bias"), ("heads",)),
    }
    identifying_weight = "score_mixing.weight"
    conflicts: ClassVar[dict[str, str]] = {"differential": "talking_heads mixes the weights of one softmax"}

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        return {name: (spec.num_heads,) * len(axes) for name, axes in cls.axes.items()}

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"score": "S_h = Σ_m P_hm S_m + b_h", "mix_weights": "A_h = Σ_m W_hm A_m + c_h, 0 where a key is masked"}

    @classmethod
    def constants(cls, spec: Dimensions) -> dict[str, Array]:
        return {name: np.eye(spec.num_heads, dtype=np.float32) for name in ("score_mixing.weight", "weight_mixing.weight")}

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """Two matrices for each pair of a query and a key."""
        pairs = options.num_queries * options.num_keys
        return Cost(multiplications=2 * spec.num_heads**2 * pairs, wide_elements=2 * min(spec.num_heads * pairs, 1 << 20))

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._weights = {name: layer.weights[name].to(layer.dtype) for name in self.axes}

    def score(self, scores: Tensor, call: Call) -> Tensor:
        """Scores of all heads."""
        return self._mixed("score_mixing", scores)

    def mix_weights(self, weights: Tensor) -> Tensor:
        return self._mixed("weight_mixing", weights)

    def _mixed(self, name: str, x: Tensor) -> Tensor:
        """A matrix and a bias applied to the heads of x [b, h, rows, k]."""
        mixed = torch.matmul(self._weights[f"{name}.weight"], x.flatten(2)).view(x.shape)
        return mixed + self._weights[f"{name}.bias"][:, None, None]
