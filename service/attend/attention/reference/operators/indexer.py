"""Keys selected by an indexer (DeepSeek-AI 2025, arXiv 2512.02556, equations 1 and 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.qk_norm import QKNorm
from attend.attention.reference.operators.rope import rotate_part

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def select(layer: Layer, request: Request, positions: Positions, allowed: Array) -> Array:
    """Whether a key is among the top_k allowed ones by index score: bool [b, q, k].

    I_ij = Σ_h w_ih relu(q_ih · k_j). Ties go to the lower key. The models' positive factors on scores change no order.
    """
    indexer, rope = layer.spec.indexer, layer.spec.rope
    assert indexer is not None
    k = layer.norm(layer.project(request.key, "index_key")[:, None], "index_key", QKNorm(kind="layer", eps=indexer.eps))
    q = layer.split_heads(layer.project(layer.compress("query", request.query), "index_query"), indexer.num_heads)
    if rope:
        rope = rope.model_copy(update={"interleaved": indexer.interleaved})
        q, k = rotate_part(q, positions.coordinates["query"], rope), rotate_part(k, positions.coordinates["key"], rope)
    head_weights = layer.project(request.query, "index_head_weights")
    scores = np.einsum("bqh,bhqk->bqk", head_weights, np.maximum(q @ k.swapaxes(-1, -2), 0))
    best = np.argsort(np.where(allowed, -scores, np.inf), axis=-1, kind="stable")[..., : indexer.top_k]
    selected = np.zeros(scores.shape, bool)
    np.put_along_axis(selected, best, True, axis=-1)
    return selected
