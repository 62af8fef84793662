"""ALiBi (Press et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def bias(layer: Layer, request: Request, q: Array, positions: Positions) -> Array:
    """-slope_h · |distance|: [b, h, q, k]."""
    return -alibi_slopes(layer.spec.num_heads)[:, None, None] * np.abs(positions.ahead)


def alibi_slopes(heads: int) -> Array:
    """2^(-8/n), 2^(-16/n), …, 2^-8 for n heads, n a power of two: [h].

    For other n: the slopes of the power of two below n, then every other slope of twice that power, from the first on.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    return np.array(slopes)
