"""Query rows a block at a time, so that [queries, keys] is held only where it is asked for: where blocks end, and what they come to."""

from collections.abc import Iterator

from torch import Tensor

from service.attention.masks import Masks

BLOCK = 1 << 20  # scores held at once where [q, k] is not asked for: 4 MB in float32, which caches hold


def rows_at_once(per_row: int) -> int:
    """How many query rows of so many scores each make a block."""
    return max(1, BLOCK // max(1, per_row))


def row_blocks(per_row: int, rows: int) -> Iterator[slice]:
    """Blocks of query rows, each with at most BLOCK scores; one empty block where there are no rows."""
    step = rows_at_once(per_row)
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def reach(masks: Masks, rows: slice) -> slice:
    """The keys that any of these rows can see, as one range; at least one, since torch wants no empty axis."""
    if not masks.intervals:
        return slice(0, masks.num_keys)
    first, last = masks.interval(rows)
    start = min(max(int(first.min()), 0), masks.num_keys - 1)
    return slice(start, max(int(last.max()) + 1, start + 1))


class Assembly:
    """Results put together block by block. One block is passed on as it is; of several, each is written into its place."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, rows: slice, part: Tensor) -> None:
        """Takes these rows of a tensor whose rows are its last axis but one, or for `log_sum_exp` its last."""
        if part.shape[axis := -1 if name == "log_sum_exp" else -2] == self.num_rows:
            self.tensors[name] = part
            return
        if name not in self.tensors:
            shape = list(part.shape)
            shape[axis] = self.num_rows
            self.tensors[name] = part.new_empty(shape)
        self.tensors[name].narrow(axis, rows.start, rows.stop - rows.start).copy_(part)
