"""Sigmoid attention (Ramapuram et al. 2024, equation 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def normalise_input(layer: Layer, request: Request, scores: Array, blocked: Array) -> Array:
    """Scores less ln n for the n real keys of the query's segment."""
    n: Array = (request.real_keys()[:, None] & ~request.other_segments()).sum(axis=-1)  # [b, 1 or q]
    return scores - np.log(np.maximum(n, 1))[:, None, :, None]


def normalise(layer: Layer, scores: Array) -> Array:
    """Each weight by itself."""
    return sigmoid(scores)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))
