"""Talking heads (Shazeer et al. 2020, arXiv 2003.02436): heads mix their scores before the softmax, and their weights after it (CaiT).

S'_h = Σ_m P_hm S_m + b_h        A_h = Σ_m W_hm softmax(S')_m + c_h
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import SCORES, WEIGHTS, Step, Steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.step import Arithmetic
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
    def initial_weights(cls, spec: Dimensions) -> dict[str, Array]:
        return {name: np.eye(spec.num_heads, dtype=np.float32) for name in ("score_mixing.weight", "weight_mixing.weight")}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        scores = Step("mix_scores", ("scores",), SCORES, "S_h = Σ_m P_hm S_m + b_h", _mix_scores, all_heads=True, products=("b,h,q,k,h",))
        reads, formula = ("attention_weights", "visible", "fully_masked"), "A_h = Σ_m W_hm A_m + c_h, 0 where a key is masked"
        weights = Step(
            "mix_weights",
            reads,
            WEIGHTS,
            formula,
            _mix_weights,
            all_keys=True,
            all_heads=True,
            signed=True,
            products=("b,h,q,k,h",),
        )
        return {"mix_scores": (scores,), "mix_weights": (weights,)}


def _mix_scores(m: Arithmetic, scores: Any) -> Any:
    return _mix(m, "score_mixing", scores)


def _mix_weights(m: Arithmetic, weights: Any, visible: Any, fully_masked: Any) -> Any:
    """Fully masked rows of a head add nothing to the other heads."""
    weights = weights if fully_masked is None else m.where(~fully_masked[..., None], weights, 0)
    return m.where(visible, _mix(m, "weight_mixing", weights), 0)


def _mix(m: Arithmetic, name: str, x: Any) -> Any:
    """A matrix [h, h] and a bias [h], applied to the heads of x [b, h, q, k]."""
    matrix, bias = m.weight(f"{name}.weight"), m.weight(f"{name}.bias")
    mixed = (m.wide(matrix) @ x.reshape(*x.shape[:2], -1)).reshape(x.shape)
    return mixed + m.wide(bias)[:, None, None]
