"""The torch device to compute on, its memory in use, and a thread of one core; and the conversion between NumPy arrays and tensors."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch

from service.errors import InvalidRequest
from service.serving.threads import lower_priority
from service.tensors import BY_TORCH, Array
from service.wire.arrays import first_element

STATM = Path("/proc/self/statm")

with warnings.catch_warnings():  # torch warns once that a tensor over read-only memory can be written to; no code does that
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def find_device(name: str) -> torch.device:
    """The device of that name; for "auto", the first GPU, or the CPU if there is none. Raises ValueError for a missing CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= count:
        available = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        built = "" if torch.version.cuda else " (it is built without CUDA)"
        raise ValueError(f"cannot compute on {name}: the devices of torch here are {available}{built}")
    return device


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device's memory; for a CPU, the resident memory of this process, 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@cache
def one_core() -> ThreadPoolExecutor:
    """An executor whose one thread computes on one core. Created by the first call, which must precede computation in other threads.

    `torch.set_num_threads` sets the number for the calling thread and the default for all threads that start to compute later. So it is
    called once in the new thread, and the default is then restored. If it were called around each reproducible call, a thread that starts
    to compute at that moment would keep one core for ever.
    """
    default = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, "one-core", lower_priority)
    thread.submit(_use_one_core).result()
    torch.set_num_threads(default)
    return thread


def _use_one_core() -> None:
    torch.get_num_threads()  # a thread reads the default on first use, which would otherwise undo the next line
    torch.set_num_threads(1)


def cast(name: str, array: Array, dtype: str, infinite: bool = False) -> torch.Tensor:
    """The array as a tensor of `dtype`. Raises InvalidRequest for the first number that is not finite in it; `infinite` allows -inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        return tensor_of(finite_array(name, array, dtype, infinite))


def finite_array(name: str, array: Array, dtype: str, infinite: bool = False) -> Array:
    """As `cast`, but an array: contiguous, unless `array` has one number in all places.

    To be called within an `np.errstate` that ignores overflow.
    """
    if array.size > 1 and not any(array.strides):  # one number in all places
        return np.broadcast_to(finite_array(name, array.reshape(-1)[:1], dtype, infinite), array.shape)
    target = BY_TORCH[dtype].numpy
    numbers = array if array.dtype == target else array.astype(target)
    if not numbers.flags.c_contiguous:
        numbers = np.ascontiguousarray(numbers)
    finite = np.isfinite(numbers)
    if 0 in finite.tobytes():  # for few numbers, `finite.all()` takes four times as long
        wrong = ~finite & ~np.isneginf(array.astype(np.float64)) if infinite else ~finite
        if wrong.any():
            at, got = first_element(array, wrong)
            raise InvalidRequest.where(f"/{name}{at}", f"a finite {dtype}", got)
    return numbers


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor that shares the memory of a contiguous array; bfloat16, which torch does not convert, is reinterpreted through int16."""
    if array.dtype == BY_TORCH["bfloat16"].numpy:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def numpy_of(tensor: torch.Tensor) -> Array:
    """A NumPy view of a CPU tensor; bfloat16 is reinterpreted through int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BY_TORCH["bfloat16"].numpy)
    return tensor.numpy()
