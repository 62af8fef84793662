"""`Dropout`: which attention weights a call keeps, for a block of rows at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attend.attention.call import CallOptions
from attend.tensors import Array

SAVED_ROWS = 256  # rows between two saved states of the random generator (2.5 KB each)


class Dropout:
    """Keeps the weights whose random numbers are at least p.

    The numbers are `numpy.random.RandomState(seed).random_sample((b, h, q, k))` for all heads, queries and keys of the call. They are drawn
    twice, so that [b, h, q, k] is never stored: first to save the generator's state before every run of SAVED_ROWS rows, and again for each
    block of rows, which continues after the rows of the block before it.
    """

    def __init__(self, options: CallOptions, num_heads: int, device: torch.device, *, all_heads: bool) -> None:
        """With `all_heads`, blocks have all heads, although the call selects some."""
        assert options.dropout is not None
        self.device = device
        self.p, seed = options.dropout
        self.batch, self.num_queries, self.num_keys = options.items, options.num_queries, options.num_keys
        self.heads = range(num_heads) if all_heads or options.heads is None else options.heads
        self.queries = range(self.num_queries) if options.queries is None else options.queries
        self._saved: dict[tuple[int, int], list[Any]] = {}  # by item and head, the state before each run of rows
        self._next: dict[tuple[int, int], tuple[int, Any]] = {}  # by item and head, the row after those last drawn, and the state there
        self._stream = np.random.RandomState(seed)
        for item in range(self.batch):
            for head in range(num_heads):
                states = self._saved[item, head] = []
                for start in range(0, self.num_queries, SAVED_ROWS):
                    states.append(self._stream.get_state())
                    self._draw(min(SAVED_ROWS, self.num_queries - start))

    def kept(self, rows: slice) -> Tensor:
        """Which weights of these rows of the selected queries and heads are kept: bool [b, heads, rows, k]."""
        queries, places = np.unique(np.asarray(self.queries[rows], np.int64), return_inverse=True)
        kept = np.empty((self.batch, len(self.heads), len(queries), self.num_keys), np.bool_)
        for item in range(self.batch):
            for i, head in enumerate(self.heads):
                for start, stop in _runs(queries):
                    kept[item, i, start:stop] = self._rows(item, head, int(queries[start]), stop - start) >= self.p
        ordered = kept if np.array_equal(places, np.arange(len(queries))) else kept[:, :, places]
        return torch.from_numpy(ordered).to(self.device)

    def _rows(self, item: int, head: int, first: int, count: int) -> Array:
        """The random numbers of consecutive rows, [count, k]."""
        row, state = self._next.get((item, head), (0, None))
        run = first // SAVED_ROWS
        if state is None or not run * SAVED_ROWS <= row <= first:
            row, state = run * SAVED_ROWS, self._saved[item, head][run]
        self._stream.set_state(state)
        self._draw(first - row)
        drawn = self._draw(count)
        self._next[item, head] = first + count, self._stream.get_state()
        return drawn

    def _draw(self, rows: int) -> Array:
        return self._stream.random_sample((rows, self.num_keys))


def _runs(numbers: Array) -> Iterator[tuple[int, int]]:
    """The index of the first, and after the last, of each run of consecutive ascending numbers; none of no numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    yield from zip((0, *breaks), (*breaks, len(numbers)), strict=True) if len(numbers) else ()
