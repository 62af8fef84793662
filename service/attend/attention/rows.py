"""Blocks of query rows, which bound the memory of scores."""

from collections.abc import Iterator

MAX_BLOCK_SCORES = 1 << 20  # 4 MB in float32, which fits into caches


def row_slices(scores_per_row: int, rows: int) -> Iterator[slice]:
    """The rows of each block; one empty block if there are no rows."""
    step = max(1, MAX_BLOCK_SCORES // max(1, scores_per_row))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))
