"""Chunks of positions (Llama 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.tensors import Array


def blocked(layer: Layer, positions: Positions) -> Array:
    """The pairs of different chunks: [b, 1, q, k]."""
    size = layer.spec.chunk_size
    assert size is not None
    different: Array = positions.indices[:, None, :, None] // size != np.arange(positions.ahead.shape[3]) // size
    return different
