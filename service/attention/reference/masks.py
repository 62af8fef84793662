"""Blocked pairs of queries and keys in NumPy, from masks, lengths, windows and chunks, and the positions of queries.

Results are true = blocked.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from service.tensors import Array


def spread(x: ArrayLike, shape: tuple[int, ...], batched: bool) -> Array:
    """A mask or bias as [b, h, q, k]; rank 3 is [b, q, k], or [h, q, k] without a batch."""
    x = np.asarray(x)
    return np.broadcast_to(x[:, None] if x.ndim == 3 and batched else x, shape)


def blocked_by_masks(attend: ArrayLike | None, block: ArrayLike | None, shape: tuple[int, ...], batched: bool) -> Array:
    """Pairs that attend_mask (1 = may attend) and block_mask (1 = blocked) block: [b, h, q, k]."""
    blocked = np.zeros(shape, bool)
    if attend is not None:
        blocked |= ~spread(np.asarray(attend, bool), shape, batched)
    if block is not None:
        blocked |= spread(np.asarray(block, bool), shape, batched)
    return blocked


def blocked_by_keys(
    shape: tuple[int, ...], lens: Array | None, attend: Array | None, block: Array | None, segments: Array | None = None
) -> Array:
    """Pairs that valid_lens [b] or [b, q], the key masks [b, k] and padding among the segments of the keys [b, k] block: [b, h, q, k]."""
    blocked = np.zeros(shape, bool)
    if lens is not None:
        per_query = lens[:, None] if lens.ndim == 1 else lens  # [b, 1] or [b, q]
        blocked |= np.arange(shape[-1]) >= per_query[:, None, :, None]
    if attend is not None:
        blocked |= ~attend.astype(bool)[:, None, None, :]
    if block is not None:
        blocked |= block.astype(bool)[:, None, None, :]
    if segments is not None:
        blocked |= (segments < 0)[:, None, None, :]
    return blocked


def blocked_by_segments(query: Array, key: Array) -> Array:
    """Pairs of different segments: query [b, q], key [b, k] -> [b, 1, q, k]."""
    blocked: Array = query[:, None, :, None] != key[:, None, None, :]
    return blocked


def query_positions(offset: ArrayLike | None, blocked_keys: Array, needed: bool) -> Array:
    """The key position of each query, i + offset: [b, q]. `needed`: whether anything depends on it.

    `blocked_keys` [b, h, q, k] are the pairs that valid_lens and the key masks block. "end" puts the last query on the last real key of the
    item: offset = n - q, where n is 1 + the highest key that is not blocked for every query, 0 if there is none.
    """
    b, _, q, k = blocked_keys.shape
    if needed and offset is None and q != k:
        raise ValueError(f"expected query_offset, since {q} queries and {k} keys do not say how they line up")
    if isinstance(offset, str):
        real = ~blocked_keys[:, 0].all(axis=1)  # [b, k], to any query
        offset = np.where(real, np.arange(1, k + 1), 0).max(axis=1, initial=0) - q
    offsets = np.broadcast_to(0 if offset is None else offset, (b,))
    positions: Array = np.arange(q) + offsets[:, None]
    return positions


def blocked_by_chunks(positions: Array, keys: int, size: int) -> Array:
    """Pairs in different chunks of `size` positions (Llama 4): positions [b, q] -> [b, 1, q, keys]."""
    blocked: Array = positions[:, None, :, None] // size != np.arange(keys) // size
    return blocked


def blocked_by_position(ahead: Array, causal: bool, windows: Iterable[Mapping[str, int | None]]) -> Array:
    """Pairs with the key ahead of the query (causal), or more than `left` behind or `right` ahead in any window: [b, 1, q, k]."""
    blocked = np.zeros(ahead.shape, bool)
    if causal:
        blocked |= ahead > 0
    for window in windows:
        if (left := window.get("left")) is not None:
            blocked |= ahead < -left
        if (right := window.get("right")) is not None:
            blocked |= ahead > right
    return blocked
