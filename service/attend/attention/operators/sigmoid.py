"""Sigmoid attention: each score less ln n by itself, for n keys in the query's sequence (Ramapuram et al. 2024, equation 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attend.attention.operators.operator import Operator

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.masks import Masks
    from attend.attention.operators.operator import Draw, Fields
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
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        return {"normalise_input": "S = S - ln n, for the n keys that are no padding", "normalise": "A = sigmoid(S)"}

    @classmethod
    def undefined_outputs(cls, spec: Dimensions) -> dict[str, str]:
        return {"log_sum_exp": "whose sigmoid weights are not divided by a sum"}

    def normalise_input(
        self, scores: Tensor, shift: Tensor | None, call: Call, rows: slice, visible: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The shift is added to the scores, since a sigmoid depends on it."""
        if shift is not None:
            scores = scores + shift[..., None].to(self.dtype)
        return scores - self._log_count(call.masks, rows, scores.shape[0]), None

    def normalise(self, scores: Tensor) -> Tensor:
        return scores.sigmoid()

    def _log_count(self, masks: Masks, rows: slice, batch: int) -> Tensor:
        """ln of the number of keys that are neither padding nor of other segments, [b, 1, rows|1, 1]; 0 without such keys."""
        keys = masks.real_keys(batch)[:, None]
        if (queries := masks.query_segments) is not None and masks.key_segments is not None:
            queries = queries[:, rows] if queries.shape[1] > 1 else queries
            keys = keys & (queries[:, :, None] == masks.key_segments[:, None])
        return keys.sum(-1).clamp(min=1).to(self.dtype).log()[:, None, :, None]
