"""Scalable softmax (Nakanishi 2025, equation 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def normalise_input(layer: Layer, request: Request, scores: Array, blocked: Array) -> Array:
    """Scores times ln n."""
    return log_num_keys(blocked) * scores


def log_num_keys(blocked: Array) -> Array:
    """ln n for the n keys that a row may attend to: [b, h, q, k] -> [b, h, q, 1]."""
    n: Array = (~blocked).sum(axis=-1, keepdims=True)
    return np.log(np.maximum(n, 1))
