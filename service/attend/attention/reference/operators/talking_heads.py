"""Talking heads (Shazeer et al. 2020, arXiv 2003.02436)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def score(layer: Layer, scores: Array) -> Array:
    """Σ_m P_hm S_m + b_h: [b, h, q, k]."""
    return mixed(layer, "score_mixing", scores)


def mix_weights(layer: Layer, weights: Array, blocked: Array) -> Array:
    """Σ_m W_hm A_m + c_h, and 0 where a pair is blocked for head h: [b, h, q, k]."""
    return np.where(blocked, 0.0, mixed(layer, "weight_mixing", weights))


def mixed(layer: Layer, name: str, x: Array) -> Array:
    """The matrix [h, h] and the bias [h] of this name, applied to the heads of x."""
    of_pairs = np.moveaxis(x, 1, -1) @ layer.weights[f"{name}.weight"].T + layer.weights[f"{name}.bias"]  # [b, q, k, h]
    return np.moveaxis(of_pairs, -1, 1)
