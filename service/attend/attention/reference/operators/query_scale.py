"""Factors on queries that grow with their position (Nakanishi 2025; Llama 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.query_scale import QueryScale

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.tensors import Array


def rescale(layer: Layer, q: Array, k: Array, positions: Positions) -> tuple[Array, Array]:
    """Queries times their factors."""
    assert layer.spec.query_scale is not None
    return q * query_factors(positions.indices, layer.spec.query_scale), k


def query_factors(positions: Array, scale: QueryScale) -> Array:
    """1 + factor · ln(1 + ⌊(p + shift)/length⌋), Nakanishi 2025 as Llama 4 has it; p is at least 0: [b, q] -> [b, 1, q, 1]."""
    factors: Array = 1 + scale.factor * np.log(1 + (np.maximum(positions, 0) + scale.shift) // scale.length)
    return factors[:, None, :, None]
