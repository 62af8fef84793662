"""Attention sinks: a learnt score for each head that takes part in the softmax and has no value (gpt-oss)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import WEIGHTS, Step, Steps, Value

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.step import Arithmetic
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
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """exp(sink_h) more in the sum of each row: its weights are multiplied by Σ exp(S) / (exp(sink) + Σ exp(S)) = sigmoid(L - sink)."""
        share = Step(
            "sinks",
            ("attention_weights", "log_sum_exp", "sinks"),
            WEIGHTS,
            "A_ij = A_ij · exp(L_i) / (exp(sink_h) + exp(L_i))",
            lambda m, weights, total, sinks: weights * m.sigmoid(total - m.wide(sinks)[:, None])[..., None],
        )
        reads, formula = ("log_sum_exp", "sinks"), "L_i = ln(exp(sink_h) + exp(L_i)); -∞ in fully masked rows"
        return {"sinks": (share, Step("sum_with_sinks", reads, {"log_sum_exp": Value("b,h,q")}, formula, sum_with_sinks))}


def sum_with_sinks(m: Arithmetic, total: Any, sinks: Any) -> Any:
    """Log-sum-exps [b, h, q] with those of sinks [h]."""
    return m.xp.where(m.xp.isneginf(total), total, m.xp.logaddexp(total, m.like(sinks, total)[:, None]))
