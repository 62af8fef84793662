"""Seeded dropout of attention weights, whose random numbers a client can reproduce with NumPy."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call

SAVED_ROWS = 256  # rows between two saved states of the random generator (2.5 KB each)


class Dropout:
    """Dropout of one call: keeps the weights whose random number is at least p, and divides them by 1 - p.

    The numbers are `numpy.random.RandomState(seed).random_sample((b, h, q, k))` for all heads, queries and keys of the call. Each block of
    rows is drawn again from a saved state, so [b, h, q, k] is never stored.
    """

    def __init__(self, call: Call, num_heads: int) -> None:
        assert call.dropout is not None
        self.p, seed = call.dropout
        self.batch, self.num_queries, self.num_keys = call.query.shape[0], call.query.shape[1], call.key.shape[1]
        self.heads, self.queries = call.heads or range(num_heads), call.queries or range(self.num_queries)
        self._states: dict[tuple[int, int, int], Any] = {}  # by item, head, and index of a run of SAVED_ROWS rows
        self._stream = np.random.RandomState(seed)
        for item in range(self.batch):
            for head in range(num_heads):
                for start in range(0, self.num_queries, SAVED_ROWS):
                    self._states[item, head, start // SAVED_ROWS] = self._stream.get_state()
                    self._stream.random_sample((min(SAVED_ROWS, self.num_queries - start), self.num_keys))

    def apply(self, weights: Tensor, rows: slice) -> Tensor:
        """Drop out weights [b, heads, rows, k] of these rows of the call's selected heads and queries."""
        return weights * self._kept(rows).to(weights.device) / (1 - self.p)

    def _kept(self, rows: slice) -> Tensor:
        """Which weights are kept: bool [b, heads, rows, k]."""
        queries = np.asarray(self.queries[rows], np.int64)
        kept = np.empty((self.batch, len(self.heads), len(queries), self.num_keys), np.bool_)
        for run in np.unique(queries // SAVED_ROWS):
            start = int(run) * SAVED_ROWS
            here = np.flatnonzero(queries // SAVED_ROWS == run)
            for item in range(self.batch):
                for i, head in enumerate(self.heads):
                    self._stream.set_state(self._states[item, head, int(run)])
                    drawn = self._stream.random_sample((min(SAVED_ROWS, self.num_queries - start), self.num_keys))
                    kept[item, i, here] = drawn[queries[here] - start] >= self.p
        return torch.from_numpy(kept)
