"""The torch device to compute on, its memory in use, and a thread that computes on one core."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from service.serving.threads import lower_priority

STATM = Path("/proc/self/statm")


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
