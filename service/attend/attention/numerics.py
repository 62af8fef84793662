"""Converts names of datatypes to torch's, and sets the precision of float32 products."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from attend.tensors import DATATYPES

_lock = threading.RLock()  # held by the thread whose precision is set
_ON_CPU = nullcontext()  # entering it takes no time


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a spec or a V2 datatype."""
    dtype = getattr(torch, DATATYPES[name].torch if name in DATATYPES else name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, norms and rotations of tensors of this dtype are computed: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def matmul_precision(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Compute the float32 products of this block with a layer's `matmul_precision`.

    "highest" is float32 throughout. "high" and "medium" let GPUs round the factors to TF32 (10 bits, relative error about 5e-4 a factor).
    torch has one precision for the whole process, so blocks for GPUs exclude each other. On CPUs, where several threads compute, products
    always have the precision of float32.
    """
    return _ON_CPU if device.type == "cpu" else _matmul_precision(precision)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    with _lock:
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")
