"""Sigmoid attention: each score less ln n by itself, for n keys in the query's sequence (Ramapuram et al. 2024, equation 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attend.attention.operators.operator import Operator
from attend.attention.operators.step import SCORES, WEIGHTS, Step, Steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class SigmoidOperator(Operator):
    name, field = "sigmoid", "normalizer"
    conflicts: ClassVar[dict[str, str]] = {"sinks": "sigmoid weights do not depend on other scores"}

    @classmethod
    def is_active(cls, spec: Dimensions) -> bool:
        return bool(getattr(spec, cls.field) == cls.name)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        return cls.name

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The scores less ln n, and the sigmoid in place of the softmax."""
        formula = "S = S - ln n, for the n keys of the query's sequence that are no padding"
        subtract = Step("subtract_log_count", ("scores", "masks"), SCORES, formula, _subtract, all_keys=True)
        sigmoid = Step("sigmoid", ("scores",), WEIGHTS, "A = sigmoid(S)", lambda m, scores: m.sigmoid(scores))
        return {"scale_scores": (subtract,), "normalise": (sigmoid,)}


def _subtract(m: Arithmetic, scores: Any, masks: Any) -> Any:
    """n counts the keys that are neither padding nor of other segments; without such keys, nothing is subtracted."""
    count = masks.keys_in_sequence(len(scores)).sum(axis=-1)  # [b, q or 1]
    return scores - m.xp.log(m.wide(m.xp.clip(count, 1, None)))[:, None, :, None]
