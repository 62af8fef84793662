"""Forgetting attention (Lin et al. 2025, arXiv 2503.02130, equations 3 to 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def bias_of_visible(layer: Layer, request: Request, positions: Positions, blocked: Array) -> Array:
    """Σ log f_l over the keys l with j < l ≤ i that query i may attend to: [b, h, q, k]."""
    of_rows = np.where(blocked | (positions.ahead > 0), 0.0, log_gates(layer, request)[:, :, None])  # [b, h, q, l]
    k = of_rows.shape[-1]
    later = np.arange(k)[:, None] > np.arange(k)  # [l, j]
    sums: Array = of_rows @ later.astype(np.float64)
    return sums


def log_gates(layer: Layer, request: Request) -> Array:
    """log sigmoid(w_h · x_l + b_h) = -log(1 + exp(-(w_h · x_l + b_h))) of the keys' inputs: [b, h, k]."""
    return -np.logaddexp(0.0, -layer.project(request.key, "forget_gate")).swapaxes(1, 2)
