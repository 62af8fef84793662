"""Which weights a seeded dropout keeps. The stream is `numpy.random.RandomState(seed).random_sample((b, h, q, k))`, row-major over the
call's own shape, so that anyone can redo it; it is drawn row block by row block, so that a long call needs no [b, h, q, k] of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

ROWS = 256  # rows between two remembered states of the generator (2.5 KB each)


class DropoutStream:
    """Keeps the elements of the stream that are >= p."""

    def __init__(self, p: float, seed: int, shape: tuple[int, int, int, int]) -> None:
        self.p, self.shape = p, shape
        batch, heads, queries, keys = shape
        self._states: dict[tuple[int, int, int], Any] = {}
        self._stream = np.random.RandomState(seed)
        for b in range(batch):
            for h in range(heads):
                for start in range(0, queries, ROWS):
                    self._states[b, h, start // ROWS] = self._stream.get_state()
                    self._stream.random_sample((min(ROWS, queries - start), keys))

    def keep(self, heads: Sequence[int], queries: Sequence[int]) -> torch.Tensor:
        """bool [b, heads, queries, k] for these heads and queries, in the order given."""
        batch, _, total, keys = self.shape
        kept = np.empty((batch, len(heads), len(queries), keys), np.bool_)
        rows = np.asarray(queries, np.int64)
        for block in np.unique(rows // ROWS):
            chosen = np.flatnonzero(rows // ROWS == block)
            for b in range(batch):
                for i, h in enumerate(heads):
                    self._stream.set_state(self._states[b, h, int(block)])
                    drawn = self._stream.random_sample((min(ROWS, total - int(block) * ROWS), keys))
                    kept[b, i, chosen] = drawn[rows[chosen] - block * ROWS] >= self.p
        return torch.from_numpy(kept)
