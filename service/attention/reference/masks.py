"""Which keys a query may not see, in NumPy: masks, lengths, windows, and where the query stands among the keys.

Part of the reference, and as plain; `reference.py` says when each step is taken. Every function answers with what is blocked, true where a
query may not see a key; that the caller's own masks say either is settled here.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from service.tensors import Array


def spread(x: ArrayLike, shape: tuple[int, ...], batched: bool) -> Array:
    """A mask or bias as [b, h, q, k]. Of rank 3 it is [b, q, k], or [h, q, k] where there is no batch."""
    x = np.asarray(x)
    return np.broadcast_to(x[:, None] if x.ndim == 3 and batched else x, shape)


def blocked_by_masks(attend: ArrayLike | None, block: ArrayLike | None, shape: tuple[int, ...], batched: bool) -> Array:
    """What is blocked by the masks over queries and keys, as [b, h, q, k]. Of each of them 1 means what its name says."""
    blocked = np.zeros(shape, bool)
    if attend is not None:
        blocked |= ~spread(np.asarray(attend, bool), shape, batched)
    if block is not None:
        blocked |= spread(np.asarray(block, bool), shape, batched)
    return blocked


def blocked_by_keys(shape: tuple[int, ...], lens: Array | None, attend: Array | None, block: Array | None) -> Array:
    """What valid_lens [b] or [b, q] and the key masks [b, k] block, as [b, h, q, k]."""
    blocked = np.zeros(shape, bool)
    if lens is not None:
        per_query = lens[:, None] if lens.ndim == 1 else lens  # [b, 1] or [b, q]
        blocked |= np.arange(shape[-1]) >= per_query[:, None, :, None]
    if attend is not None:
        blocked |= ~attend.astype(bool)[:, None, None, :]
    if block is not None:
        blocked |= block.astype(bool)[:, None, None, :]
    return blocked


def place_queries(offset: ArrayLike | None, unreal: Array, needed: bool) -> Array:
    """The key position at which each query stands, i + offset: [b, q]. `needed` says whether anything depends on it.

    `unreal` [b, h, q, k] is what valid_lens and the key masks block. "end" puts the last query on the item's last real key: offset = n - q,
    where n is 1 + the highest key that they leave open to any query, 0 if none.
    """
    b, _, q, k = unreal.shape
    if needed and offset is None and q != k:
        raise ValueError(f"expected query_offset, since {q} queries and {k} keys do not say how they line up")
    if isinstance(offset, str):
        real = ~unreal[:, 0].all(axis=1)  # [b, k], to any query
        offset = np.where(real, np.arange(1, k + 1), 0).max(axis=1, initial=0) - q
    offsets = np.broadcast_to(0 if offset is None else offset, (b,))
    placed: Array = np.arange(q) + offsets[:, None]
    return placed


def blocked_by_position(ahead: Array, causal: bool, windows: Iterable[Mapping[str, int | None]]) -> Array:
    """What lies ahead of the query (causal), or more than `left` behind or `right` ahead of it in any of the windows, as [b, 1, q, k]."""
    blocked = np.zeros(ahead.shape, bool)
    if causal:
        blocked |= ahead > 0
    for window in windows:
        if (left := window.get("left")) is not None:
            blocked |= ahead < -left
        if (right := window.get("right")) is not None:
            blocked |= ahead > right
    return blocked
