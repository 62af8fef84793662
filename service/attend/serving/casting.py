"""Casts arrays to the dtype of a layer, checks that their numbers are finite in it, and shares memory between arrays and tensors."""

import warnings

import numpy as np
import torch

from attend.errors import InvalidRequest
from attend.tensors import BY_TORCH, Array
from attend.wire.arrays import FEW_FLAGS, first_element

ALIGNMENT = 64  # bytes, a cache line

with warnings.catch_warnings():  # torch warns once that a tensor over read-only memory can be written to; no code does that
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def cast(name: str, array: Array, dtype: str, infinite: bool = False) -> torch.Tensor:
    """The array as a tensor of `dtype`. Raises InvalidRequest for the first number that is not finite in it; `infinite` allows -inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        return tensor_of(finite_array(name, array, dtype, infinite))


def finite_array(name: str, array: Array, dtype: str, infinite: bool = False) -> Array:
    """The array in `dtype`, contiguous unless `array` has one number in all places. Raises as `cast` does.

    To be called within an `np.errstate` that ignores overflow.
    """
    if not array.flags.c_contiguous:
        if not any(array.strides):  # one number in all places
            return np.broadcast_to(finite_array(name, array.reshape(-1)[:1], dtype, infinite), array.shape)
        array = np.ascontiguousarray(array)
    target = BY_TORCH[dtype].numpy
    numbers = array if array.dtype == target else array.astype(target)
    finite = np.isfinite(numbers)
    if not all_true(finite):
        wrong = ~finite & ~np.isneginf(array.astype(np.float64)) if infinite else ~finite
        if wrong.any():
            at, got = first_element(array, wrong)
            raise InvalidRequest.where(f"/{name}{at}", f"a finite {dtype}", got)
    return numbers


def all_true(flags: Array) -> bool:
    """Whether all booleans are true: `all`, which takes longer to begin than to look at few bytes."""
    return bool(flags.all()) if flags.size > FEW_FLAGS else 0 not in flags.tobytes()


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor that shares the memory of a contiguous array; bfloat16, which torch does not convert, is reinterpreted through int16."""
    if array.dtype == BY_TORCH["bfloat16"].numpy:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def at_cache_line(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its memory does not start at a multiple of ALIGNMENT.

    A library may sum the products of the same numbers in another order, and so round otherwise, at other addresses: on AMD, MKL does.
    """
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def numpy_of(tensor: torch.Tensor) -> Array:
    """A NumPy view of a CPU tensor; bfloat16 is reinterpreted through int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BY_TORCH["bfloat16"].numpy)
    return tensor.numpy()
