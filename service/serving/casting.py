"""Converts NumPy arrays to finite torch tensors of a layer's dtype, and torch tensors to NumPy arrays."""

import warnings

import numpy as np
import torch

from service.errors import InvalidRequest
from service.tensors import BY_TORCH, Array
from service.wire.arrays import first_index

with warnings.catch_warnings():  # torch warns once that a tensor over read-only memory can be written to; no code does that
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def cast(name: str, array: Array, dtype: str, infinite: bool = False) -> torch.Tensor:
    """The array as a tensor of `dtype`. Raises InvalidRequest for the first number that is not finite in it; `infinite` allows -inf."""
    target = BY_TORCH[dtype].numpy
    numbers = array
    if array.dtype != target:
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = array.astype(target)
    if not numbers.flags.c_contiguous:
        numbers = np.ascontiguousarray(numbers)
    finite = np.isfinite(numbers)
    if not finite.all():
        wrong = ~finite & ~np.isneginf(array.astype(np.float64)) if infinite else ~finite
        if wrong.any():
            at = first_index(wrong)
            came = float(array[tuple(int(i) for i in at.split("/")[1:])])
            raise InvalidRequest.where(f"/{name}{at}", f"a finite {dtype}", f"{came:g}" if np.isfinite(came) else f"{came}")
    if dtype == "bfloat16":
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(numbers)


def numpy_of(tensor: torch.Tensor) -> Array:
    """A NumPy view of a CPU tensor; bfloat16, which torch does not convert, is reinterpreted through int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BY_TORCH["bfloat16"].numpy)
    return tensor.numpy()
