"""Blocks of query rows: which rows are computed at a time, and how their results are put together.

A block has at most MAX_BLOCK_SCORES scores, or one row, so the memory of a call does not grow with queries times keys.
"""

from collections.abc import Iterator

from torch import Tensor

MAX_BLOCK_SCORES = 1 << 20  # 4 MB in float32, which fits into caches


def row_slices(scores_per_row: int, rows: int) -> Iterator[slice]:
    """The rows of each block; one empty block if there are no rows."""
    step = max(1, MAX_BLOCK_SCORES // max(1, scores_per_row))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


class Assembly:
    """Assembles tensors from blocks of rows. A block with all rows is stored without a copy."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, rows: slice, part: Tensor) -> None:
        """Add these rows of a tensor. Rows are its last axis but one; the last, for `log_sum_exp`."""
        axis = -1 if name == "log_sum_exp" else -2
        if part.shape[axis] == self.num_rows:
            self.tensors[name] = part
            return
        if name not in self.tensors:
            shape = list(part.shape)
            shape[axis] = self.num_rows
            self.tensors[name] = part.new_empty(shape)
        self.tensors[name].narrow(axis, rows.start, rows.stop - rows.start).copy_(part)
