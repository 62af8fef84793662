"""Blocks of query rows, which bound the memory of scores."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MAX_BLOCK_SCORES = 1 << 20  # on a CPU: 4 MB in float32, which fits into caches
SHARE = 64  # of the free memory of another device, in bytes for each score: a block has few tensors of its size


def row_slices(scores_per_row: int, rows: int, device: torch.device | None = None, most_rows: int | None = None) -> Iterator[slice]:
    """The rows of each block; one empty block if there are no rows. A device other than a CPU starts as few rounds as its memory allows.

    `most_rows`: of a block, if its memory does not bound them.
    """
    most = MAX_BLOCK_SCORES if device is None or device.type == "cpu" else max(MAX_BLOCK_SCORES, free_bytes(device) // SHARE)
    count = max(1, min(most // max(1, scores_per_row), rows if most_rows is None else most_rows))
    for start in range(0, max(rows, 1), count):
        yield slice(start, min(start + count, rows))


def block_of(tensor: Tensor, axes: Sequence[str], rows: slice, keys: slice) -> Tensor:
    """The rows on the axis q, and the keys on the axis k, of a tensor with these axes; an axis of 1 stays."""
    for axis, name in enumerate(axes[: tensor.ndim]):
        indices = rows if name == "q" else keys if name == "k" else None
        if indices is not None and tensor.shape[axis] > 1 and (indices.start, indices.stop) != (0, tensor.shape[axis]):
            tensor = tensor.narrow(axis, indices.start, indices.stop - indices.start)
    return tensor


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; 16 GB for one that does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return 1 << 34
