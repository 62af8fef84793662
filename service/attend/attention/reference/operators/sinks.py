"""Attention sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def sinks(layer: Layer) -> Array:
    """The score of each head's sink: [h, 1]."""
    return layer.weights["sinks"][:, None]
