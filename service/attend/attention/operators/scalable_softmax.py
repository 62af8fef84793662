"""Softmax of the scores times ln n, for a row that may attend to n keys (Nakanishi 2025, equation 3, with s in the scale)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attend.attention.operators.operator import Operator
from attend.attention.operators.step import SCORES, Step, Steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.masks import Masks
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class ScalableSoftmaxOperator(Operator):
    name, field = "scalable_softmax", "normalizer"

    @classmethod
    def is_active(cls, spec: Dimensions) -> bool:
        return bool(getattr(spec, cls.field) == cls.name)

    @classmethod
    def score_growth(cls, spec: Dimensions, masks: Masks) -> float:
        return max(1.0, math.log(max(1, masks.num_keys)))

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        return cls.name

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        reads = ("scores", "visible", "keys")
        formula = "S_ij = S_ij · ln n_i, for the n_i keys that are visible to i"
        return {"scale_scores": (Step("scale_by_count", reads, SCORES, formula, _scale, all_keys=True),)}


def _scale(m: Arithmetic, scores: Any, visible: Any, keys: Any) -> Any:
    """Scores times ln n, which is 0 in fully masked rows."""
    count = m.xp.broadcast_to(visible, (*visible.shape[:-1], len(keys))).sum(axis=-1, keepdims=True)
    return scores * m.xp.log(m.wide(m.xp.clip(count, 1, None)))
