"""ALiBi: biases linear in the distance (Press et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class AlibiOperator(Operator):
    name, field, positional, per_head = "alibi", "alibi", True, True
    left_out = LeftOut("ALiBi", "softmax(S)", "softmax(S - slope · |i - j|)")

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The slopes, and the biases."""
        constant = Step("alibi_slopes", (), {"alibi_slopes": Value("h")}, "", lambda m: m.wide(m.constant(slopes(spec.num_heads))))
        reads, formula = ("positions", "keys", "alibi_slopes"), "alibi_bias_ij = -slope_h · |i - j|"
        return {"constants": (constant,), "bias": (Step("alibi", reads, {"alibi_bias": Value("b,h,q,k")}, formula, _bias),)}


def slopes(heads: int) -> list[float]:
    """m_h of Press et al. 2022: 2^(-8h/n) for a power of two; else those of the power below n, then every other one of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def _bias(m: Arithmetic, positions: Any, keys: Any, slopes: Any) -> Any:
    distance = abs(positions[:, None, :, None] - keys)
    return -slopes[:, None, None] * m.wide(distance)
