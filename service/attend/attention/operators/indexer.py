"""Selects the keys of each query by index scores (DeepSeek-AI 2025, "DeepSeek-V3.2", equations 1 and 2).

    I_ij = Σ_h w_ih · relu(q_ih · k_j)        over the small heads h of the indexer, which share their keys

Of the keys that a query may attend to, those with the `top_k` largest index scores are kept; ties go to the lower key. The models' factors
1/√head_dim and 1/√num_heads change no order and are left out. A rounding error could choose another key, so all of this is computed in
float64 from the inputs, whatever the layer's dtype: which keys are selected does not depend on the batch that a call is in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attend.attention.operators.declarations import CachedTensor, Cost
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.rope import frequencies, rotate
from attend.attention.rows import row_slices
from attend.spec_parts import Eps, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Layer
    from attend.attention.operators.stages import Product, Projected
    from attend.spec_parts import Dimensions


class Indexer(Part):
    """DeepSeek's indexer (DeepSeek-AI 2025, arXiv 2512.02556): a query attends only to the keys with its `top_k` largest index scores.

    I_ij = sum_h w_ih relu(q_ih · k_j) over small heads of its own. Queries are x W^T with `index_query.weight` [num_heads * head_dim, in],
    from the latent vector of queries if there is one; keys, the same for all of these heads, norm(x W^T) with `index_key.weight` [head_dim,
    key_dim] and a layer norm, `index_key_norm.weight` and `.bias`; w is x W^T with `index_head_weights.weight` [num_heads, d_model]. RoPE
    rotates these queries and keys as those of the layer.
    """

    num_heads: Width = Field(description="Number of heads of the indexer.")
    head_dim: Width = Field(description="Width of its heads.")
    top_k: Width = Field(description="Number of keys that each query keeps.")
    interleaved: Flag = Field(default=False, description="Whether RoPE rotates interleaved pairs here (GLM-5), or halves (DeepSeek-V3.2).")
    eps: Eps = Field(default=1e-6, description="Of the layer norm of its keys.")


class IndexerOperator(Operator):
    name, field, needs_projections = "indexer", "indexer", True
    matrices = ("index_query", "index_key", "index_head_weights")
    query_matrices = ("index_query", "index_head_weights")
    key_matrices = ("index_key",)
    axes: ClassVar[Axes] = {
        **{f"{name}.weight": ("out", "in") for name in ("index_key", "index_query", "index_head_weights")},
        **dict.fromkeys(("index_key_norm.weight", "index_key_norm.bias"), ("n",)),
    }
    identifying_weight = "index_key.weight"
    own_outputs = ("indexer_mask",)

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        indexer, rope = getattr(spec, cls.field), getattr(spec, "rope", None)
        if rope and (dims := rope.dims or 0) > indexer.head_dim:
            raise field_error("/indexer/head_dim", f"at least {dims}, which RoPE rotates", str(indexer.head_dim))

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        indexer, latent = getattr(spec, cls.field), getattr(spec, "latent", None)
        query_width = (latent and latent.query_rank) or spec.d_model
        return {
            "index_query.weight": (indexer.num_heads * indexer.head_dim, query_width),
            "index_key.weight": (indexer.head_dim, spec.key_dim),
            "index_key_norm.weight": (indexer.head_dim,),
            "index_key_norm.bias": (indexer.head_dim,),
            "index_head_weights.weight": (indexer.num_heads, spec.d_model),
        }

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        index = "I_ij = Σ_h w_ih relu(q_ih · k_j)"
        return {"select": f"S_ij = -∞ unless j is among the top_k visible keys by {index}  ([operators.md](../operators.md))"}

    @classmethod
    def widest(cls, spec: Dimensions) -> int:
        indexer: Indexer = getattr(spec, cls.field)
        return indexer.num_heads * indexer.head_dim

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """In float64, which takes twice as long; its projections are counted with the others."""
        indexer, queries, keys = getattr(spec, cls.field), options.num_queries, options.num_keys
        width, heads, pairs = indexer.num_heads * indexer.head_dim, indexer.num_heads, queries * keys
        elements = queries * (spec.d_model + 3 * width) + keys * (spec.key_dim + 3 * indexer.head_dim)
        elements += 3 * min(heads * pairs, max(1 << 20, heads * keys))
        return Cost(operations=4 * pairs * width + 6 * heads * pairs + 40 * pairs, memory_bytes=8 * elements + 2 * pairs)

    @classmethod
    def cached(cls, spec: Dimensions) -> dict[str, CachedTensor]:
        """Its keys, in float64."""
        return {"index_key": CachedTensor(1, getattr(spec, cls.field).head_dim, "float64", shared=True)}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Fewer keys than most calls have."""
        dims = (fields.get("rope") or {}).get("dims", fields.get("head_dim", fields["d_model"] // fields["num_heads"]))
        indexer = {"num_heads": draw.integer(1, 4), "head_dim": dims + draw.integer(1, 4), "top_k": draw.integer(1, 8)}
        return {**indexer, "interleaved": draw.flag(), "eps": draw.one_of(1e-6, 0.1)}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.config: Indexer = getattr(layer.spec, self.field)
        rope, self.latent = getattr(layer.spec, "rope", None), getattr(layer.spec, "latent", None)
        self.rope = rope and rope.model_copy(update={"interleaved": self.config.interleaved})
        if self.rope is not None:
            self.frequencies = frequencies(self.rope, self.config.head_dim).to(layer.device)
        self._weights = {name: x.double() for name, x in layer.weights.items() if name.startswith(("index_", "query_down"))}

    def rows_to_cache(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        """Its keys, [b, 1, k, head_dim]."""
        return {"index_key": self.keys(call)}

    def select(self, call: Call) -> Call:
        """The call with a mask of the selected keys, bool [b, 1, q, k]; it may have no other mask with an axis of heads."""
        from attend.attention.call import top_k

        if call.options.num_keys <= self.config.top_k and "indexer_mask" not in call.options.outputs:
            return call  # all keys are selected
        key = self.keys(call) if call.cached is None else call.cached["index_key"][None]
        query, factors = self.queries(call)
        (batch, heads, num_queries, _), num_keys = query.shape, key.shape[2]
        selected = torch.zeros(batch, 1, num_queries, num_keys, dtype=torch.bool, device=query.device)
        for rows in row_slices(batch * heads * num_keys, num_queries):
            products = torch.nn.functional.relu(query[:, :, rows] @ key.transpose(2, 3))  # [b, heads, rows, k]
            scores = (factors[:, rows, None] @ products.transpose(1, 2))[:, None, :, 0]  # [b, 1, rows, k]
            visible = call.masks.visible(rows)
            if visible is not None:
                scores = scores.masked_fill(~visible, -torch.inf)
            _, best = top_k(scores, min(self.config.top_k, num_keys))
            kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
            selected[:, :, rows] = kept if visible is None else kept & visible
        return replace(call, masks=replace(call.masks, attend_mask=selected))

    def outputs(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        """The mask of `select`."""
        mask = call.masks.attend_mask
        return {} if mask is None else {"indexer_mask": mask[:, 0]}

    def keys(self, call: Call) -> Tensor:
        """The indexer's keys of the call's keys, [b, 1, k, head_dim], in float64."""
        norm = self._weights["index_key_norm.weight"], self._weights["index_key_norm.bias"]
        key = self._product(call.key.double(), "index_key")
        key = torch.nn.functional.layer_norm(key, key.shape[-1:], *norm, self.config.eps)[:, None]
        return key if self.rope is None else rotate(key, call.coordinates[1], self.rope, self.frequencies)

    def queries(self, call: Call) -> tuple[Tensor, Tensor]:
        """Queries [b, heads, q, head_dim] and the heads' factors [b, q, heads], in float64."""
        query = call.query.double()
        factors = self._product(query, "index_head_weights")
        if self.latent is not None and self.latent.query_rank is not None:
            query = self._product(query, "query_down")
            query = torch.nn.functional.rms_norm(query, query.shape[-1:], self._weights["query_down_norm.weight"], self.latent.eps)
        query = self._product(query, "index_query")
        query = query.view(*query.shape[:2], self.config.num_heads, self.config.head_dim).transpose(1, 2)
        return query if self.rope is None else rotate(query, call.coordinates[0], self.rope, self.frequencies), factors

    def _product(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))
