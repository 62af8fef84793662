"""What a layer makes of projected queries and keys before the softmax: scale and softcap, then everything added, then everything blocked.

Takes any part of the problem: some query rows, and, where heads are chosen, queries and keys of these alone.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.masks import Masks
from service.attention.positions import alibi, alibi_slopes, relative_bias
from service.attention.weights import torch_dtype
from service.spec import LayerSpec


class Scores:
    """Scores of a layer, in float32 or better: softmax needs that. Immutable.

    With ALiBi, each row's scores are without `alibi_shift`: a bias common to all keys, which softmax ignores, would take their digits.
    """

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.weights = spec, weights
        dtype = torch_dtype(spec.dtype)
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._widens = dtype != self.dtype
        self._slopes = torch.tensor(alibi_slopes(spec.num_heads) if spec.alibi else [], dtype=self.dtype, device=device)
        self._nothing = torch.empty(1, 1, 1, dtype=self.dtype, device=device)  # what a product with beta=0 is added to

    def widened(self, tensor: Tensor) -> Tensor:
        """A tensor of the layer's dtype in that of the scores."""
        return tensor.to(self.dtype) if self._widens else tensor

    def sinks(self, chosen: Sequence[int] | None = None) -> Tensor | None:
        """[heads, 1]: the score that stands beside every row's; None where the layer has none."""
        return self._of_heads(self.widened(self.weights["sinks"]), chosen)[:, None] if self.spec.sinks else None

    def alibi_shift(self, masks: Masks, rows: slice, chosen: Sequence[int] | None = None) -> Tensor | None:
        """float64 [b|1, heads, rows]: ALiBi of the key nearest to each query, which its scores lack; None where all are 0."""
        if not self.spec.alibi:
            return None
        positions = masks.positions[:, rows]
        outside = (positions - masks.clamped_positions(rows)).abs()
        return -self._of_heads(self._slopes, chosen).double()[:, None] * outside[:, None] if outside.any() else None

    def __call__(
        self, call: Call, query: Tensor, key: Tensor, rows: slice, visible: Tensor | None, chosen: Sequence[int] | None = None
    ) -> Tensor:
        """[batch, heads, rows, keys], from the query of these rows; `visible` as `call.masks` has it for them.

        Query heads that share a key head are more rows of the same product, so keys are never repeated.
        """
        batch, heads, num_rows, head_dim = query.shape
        kv, num_keys = key.shape[1:3]
        q = self.widened(query).reshape(batch * kv, heads // kv * num_rows, head_dim)
        k = self.widened(key).flatten(0, 1)
        scores = torch.baddbmm(self._nothing, q, k.transpose(1, 2), beta=0, alpha=call.scale).view(batch, heads, num_rows, num_keys)
        if call.softcap:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if (bias := self.added(call.masks, rows, slice(0, num_keys), chosen)) is not None:
            scores = scores + bias
        return scores if visible is None else scores.masked_fill_(~visible, -torch.inf)

    def added(self, masks: Masks, rows: slice, keys: slice, chosen: Sequence[int] | None = None) -> Tensor | None:
        """Everything that is added to the scores, [b|1, h|1, rows|1, keys|1]: the call's bias, ALiBi without `alibi_shift`, T5's table."""
        added = masks.added(rows, keys)
        if self.spec.alibi:
            slopes = alibi(self._of_heads(self._slopes, chosen), masks.clamped_positions(rows), keys)
            added = slopes if added is None else added + slopes
        if self.spec.relative_bias is not None:
            table = self._of_heads(self.weights["relative_bias"].T, chosen).T
            relative = relative_bias(table, self.spec.relative_bias, masks.positions[:, rows], keys)
            added = relative if added is None else added + relative
        return added

    def _of_heads(self, per_head: Tensor, chosen: Sequence[int] | None) -> Tensor:
        """The rows of the chosen heads; all where none are chosen."""
        return per_head if chosen is None else per_head[list(chosen)]
