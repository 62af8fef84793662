"""Selects the keys of each query by index scores (DeepSeek-AI 2025, "DeepSeek-V3.2", equations 1 and 2).

    I_ij = Σ_h w_ih · relu(q_ih · k_j)        over the small heads h of the indexer, which share their keys

Of the keys that a query may attend to, those with the `top_k` largest index scores are kept; ties go to the lower key. The models' factors
1/√head_dim and 1/√num_heads change no order and are left out. A rounding error could choose another key, so all of this is computed in
float64 from the inputs, whatever the layer's dtype: which keys are selected does not depend on the batch that a call is in.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.call import Call, top_k
from service.attention.eager import row_slices
from service.attention.positions import rotate
from service.spec import LayerSpec


class KeyIndexer:
    """The indexer of one layer. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        assert spec.indexer is not None
        self.config, self.latent = spec.indexer, spec.latent
        self.rope = spec.rope and spec.rope.model_copy(update={"interleaved": spec.indexer.interleaved})
        self._weights = {name: x.double() for name, x in weights.items() if name.startswith(("index_", "query_down"))}
        self._cached: Tensor | None = None

    def with_keys(self, key: Tensor) -> "KeyIndexer":
        """The indexer with these keys, from `keys`, in place of those of the call."""
        indexer = copy(self)
        indexer._cached = key
        return indexer

    @torch.no_grad()
    def select_keys(self, call: Call) -> Call:
        """The call with a mask of the selected keys, bool [b, 1, q, k]; it may have no other mask with an axis of heads."""
        if call.key.shape[1] <= self.config.top_k and "indexer_mask" not in call.outputs:
            return call  # all keys are selected
        key = self.keys(call) if self._cached is None else self._cached
        query, factors = self.queries(call)
        (batch, heads, num_queries, _), num_keys = query.shape, key.shape[2]
        selected = torch.zeros(batch, 1, num_queries, num_keys, dtype=torch.bool, device=query.device)
        for rows in row_slices(batch * heads * num_keys, num_queries):
            products = F.relu(query[:, :, rows] @ key.transpose(2, 3))  # [b, heads, rows, k]
            scores = (factors[:, rows, None] @ products.transpose(1, 2))[:, None, :, 0]  # [b, 1, rows, k]
            visible = call.masks.visible(rows)
            if visible is not None:
                scores = scores.masked_fill(~visible, -torch.inf)
            _, best = top_k(scores, min(self.config.top_k, num_keys))
            kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
            selected[:, :, rows] = kept if visible is None else kept & visible
        return replace(call, masks=replace(call.masks, attend_mask=selected))

    @torch.no_grad()
    def keys(self, call: Call) -> Tensor:
        """The indexer's keys of the call's keys, [b, 1, k, head_dim], in float64."""
        norm = self._weights["index_key_norm.weight"], self._weights["index_key_norm.bias"]
        key = self._product(call.key.double(), "index_key")
        key = F.layer_norm(key, key.shape[-1:], *norm, self.config.eps)[:, None]
        return key if self.rope is None else rotate(key, call.rope_positions[1], self.rope)

    def queries(self, call: Call) -> tuple[Tensor, Tensor]:
        """Queries [b, heads, q, head_dim] and the heads' factors [b, q, heads], in float64."""
        query = call.query.double()
        factors = self._product(query, "index_head_weights")
        if self.latent is not None and self.latent.query_rank is not None:
            query = self._product(query, "query_down")
            query = F.rms_norm(query, query.shape[-1:], self._weights["query_down_norm.weight"], self.latent.eps)
        query = self._product(query, "index_query")
        query = query.view(*query.shape[:2], self.config.num_heads, self.config.head_dim).transpose(1, 2)
        return query if self.rope is None else rotate(query, call.rope_positions[0], self.rope), factors

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))
