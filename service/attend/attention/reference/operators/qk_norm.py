"""Norms of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.tensors import Array


def norm(layer: Layer, x: Array, name: str) -> Array:
    """Heads [b, heads, n, d] of a query, key or value before RoPE, normalised if the layer does that here."""
    norm = layer.spec.qk_norm
    assert norm is not None
    return layer.norm(x, name, norm) if (norm.values if name == "value" else not norm.after_rope) else x


def rescale(layer: Layer, q: Array, k: Array, positions: Positions) -> tuple[Array, Array]:
    """Queries and keys after RoPE, normalised if the layer does that here."""
    norm = layer.spec.qk_norm
    assert norm is not None
    return (layer.norm(q, "query", norm), layer.norm(k, "key", norm)) if norm.after_rope else (q, k)
