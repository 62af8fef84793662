"""Which of torch's devices computes: the one that is named, or a refusal that says which there are; and what is taken of its memory.

Knows no layer and no setting.
"""

import os
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")


def find_device(name: str) -> torch.device:
    """The device of that name; "auto": the first GPU, or the CPU where there is none. Raises ValueError where torch has none of it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= count:
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        built = "" if torch.version.cuda else " (it is built without CUDA)"
        raise ValueError(f"cannot compute on {name}: torch has {there} here{built}")
    return device


def taken(device: torch.device) -> int:
    """Bytes of the device's memory; of a CPU's, what this process holds, 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
