"""Datatypes of torch, and the precision of its float32 products."""

import torch

from service.tensors import DATATYPES


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a spec or a V2 datatype."""
    dtype = getattr(torch, DATATYPES[name].torch if name in DATATYPES else name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, norms and rotations of tensors of this dtype are computed: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def set_precision(precision: str) -> None:
    """Set the precision of the following float32 products. It is global in torch; this is safe, since only one call computes at a time.

    "highest" is float32 throughout. "high" and "medium" let the hardware round the factors first: to TF32 (10 bits, relative error about
    5e-4 a factor) on GPUs that have it, to bfloat16 (7 bits, about 4e-3) on CPUs with AMX; elsewhere they change nothing.
    """
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)
