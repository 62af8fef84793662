"""Finds the torch device to compute on, and reads its memory in use."""

import os
from pathlib import Path

import torch

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
