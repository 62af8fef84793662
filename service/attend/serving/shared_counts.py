"""Counts that other processes read: arrays of float64 in memory-mapped files of a folder that processes share.

The bytes of a file are written when it is made. In a sparse file, the first write to a page that finds the disk full ends the process
(SIGBUS). No count fails a request: without room for its file, an array stays in memory, where only its own process sees it. A file that its
process has not written to the end is left out of sums.
"""

import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog

from attend.tensors import Array

log = structlog.get_logger("attend")


def new_counts(path: Path | None, shape: tuple[int, int]) -> Array:
    """Zeros of a shape, in a new file; in memory without a path, or if the file cannot be written."""
    if path is None:
        return np.zeros(shape)
    try:
        path.write_bytes(bytes(8 * math.prod(shape)))
        return np.memmap(path, np.float64, "r+", shape=shape)
    except OSError as error:
        log.warning("counts are not shared", file=path.name, error=str(error))
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return np.zeros(shape)


def are_shared(counts: Array) -> bool:
    """Whether the array is in a file."""
    return isinstance(counts, np.memmap)


def read_counts(path: Path, shape: tuple[int, int]) -> Array:
    """The array in a file; zeros if the file is not whole, cannot be read, or has been removed."""
    try:
        counts: Array = np.fromfile(path)
    except OSError:
        return np.zeros(shape)
    return counts.reshape(shape) if counts.size == math.prod(shape) else np.zeros(shape)
