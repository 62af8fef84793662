"""Which of torch's devices computes: the one that is named, or a refusal that says which there are. Knows no layer and no setting."""

import torch


def find_device(name: str) -> torch.device:
    """The device of that name; "auto": the first GPU, or the CPU where there is none. Raises ValueError where torch has none of it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= count:
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        built = "" if torch.version.cuda else " (it is built without CUDA)"
        raise ValueError(f"cannot compute on {name}: torch has {there} here{built}")
    return device
