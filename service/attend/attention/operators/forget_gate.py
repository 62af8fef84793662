"""Forgetting attention (Lin et al. 2025, arXiv 2503.02130): forget gates that depend on the keys' inputs, as a bias on the scores.

    f_lh = sigmoid(w_h · x_l + b_h)        S_ij + Σ log f_l over the keys l with j < l ≤ i that query i may attend to

The sums are computed in float64, since they grow with the distance. There is nothing to forget between a query and later keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class ForgetGateOperator(Operator):
    name, field, positional, needs_projections = "forget_gate", "forget_gate", True, True
    left_out = LeftOut("the forget gate", "softmax(S)", "softmax(S + F), F_ij = Σ log f_l for j < l ≤ i")
    per_head = True
    matrices = ("forget_gate",)
    axes: ClassVar[Axes] = {"forget_gate.weight": ("heads", "in"), "forget_gate.bias": ("heads",)}
    identifying_weight = "forget_gate.weight"

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        return {"forget_gate.weight": (spec.num_heads, spec.key_dim), "forget_gate.bias": (spec.num_heads,)}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The logarithms of the gates, which a cache keeps, and the bias that is made of them."""
        gates = {"forget_gate": Value("b,h,k,1", "float64")}
        bias, formula = {"forget_bias": Value("b,h,q,k")}, "forget_bias_ij = Σ_l log f_lh over the visible keys l with j < l ≤ i"
        reads = ("forget_gate", "positions", "keys", "visible")
        return {
            "norm": (
                Step(
                    "forget_gate",
                    ("key",),
                    gates,
                    "log f = log sigmoid(z W_F + b_F)",
                    _log_gates,
                    products=("b,k,h,key_dim",),
                    scratch=("b,k,key_dim", "b,h,k", "b,h,k"),
                ),
            ),
            "visible_bias": (Step("forget", reads, bias, formula, _forget, all_keys=True, scratch=("b,h,q,k",) * 3),),
        }


def _log_gates(m: Arithmetic, key: Any) -> Any:
    """log sigmoid(x W^T + b) = -softplus(-(x W^T + b)) of the keys' inputs [b, k, key_dim], in float64: [b, heads, k, 1]."""
    return m.xp.swapaxes(-m.softplus(-m.project_exactly(m.exact(key), "forget_gate")), 1, 2)[..., None]


def _forget(m: Arithmetic, log_gates: Any, positions: Any, keys: Any, visible: Any) -> Any:
    """For each key the sum of the later ones up to the query's position, without masked ones: [b, h, q, k]."""
    counts = (keys <= positions[:, None, :, None]) & visible
    sums = m.xp.cumsum(m.where(counts, log_gates[:, :, None, :, 0], 0), axis=-1)
    return m.wide(sums[..., -1:] - sums)
