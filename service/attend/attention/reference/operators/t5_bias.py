"""T5's relative position bias (Raffel et al. 2020)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.t5_bias import RelativeBias

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def bias(layer: Layer, request: Request, q: Array, positions: Positions) -> Array:
    """The entry of the table [buckets, h] for each distance's bucket: [b, h, q, k]."""
    assert layer.spec.relative_bias is not None
    found: Array = layer.weights["relative_bias"][relative_buckets(positions.ahead[:, 0], layer.spec.relative_bias)]  # [b, q, k, h]
    return found.transpose(0, 3, 1, 2)


def relative_buckets(ahead: Array, settings: RelativeBias) -> Array:
    """The bucket of each distance: half of the buckets are single distances, the others ranges that grow up to max_distance.

    If bidirectional, keys ahead of the query use the second half of the table; otherwise they count as distance 0. The logarithm is in
    float32 as in T5, since rounding decides on the edge of a bucket.
    """
    buckets, start = settings.buckets, np.zeros(ahead.shape, np.int64)
    if settings.bidirectional:
        buckets //= 2
        start[ahead > 0] = buckets
        distance = np.abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    exact = buckets // 2
    share = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact)) / np.float32(math.log(settings.max_distance / exact))
    wide = exact + (share * np.float32(buckets - exact)).astype(np.int64)
    return start + np.where(distance < exact, distance, np.minimum(wide, buckets - 1))
