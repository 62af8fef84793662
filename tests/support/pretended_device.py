"""A device in Python, for machines without an accelerator: it refuses, and counts, what a GPU refuses, or is slow at.

A tensor of this device holds a tensor of the CPU, which computes. An operation with tensors of both is refused, as GPUs do. `operations`
are those that a GPU would start; `waits` are where the host needs a number of the device before it can go on. It needs torch 2.9 or
later.
"""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretended"
MOVES = {"_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"}  # between devices
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave", "unique"}
VIEWS = {
    "view",
    "_unsafe_view",
    "expand",
    "transpose",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
    "permute",
    "detach",
    "alias",
    "t",
    "split",
}
registered: list[torch.library.Library] = []


class Elsewhere(torch.Tensor):
    """A tensor of the device; `held` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Elsewhere":
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=torch.device(NAME, 0)
        )
        return made

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        return compute(function, args, named or {}, None)


def device() -> torch.device:
    """The device, which is registered at the first call."""
    if not registered:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", lambda size, **named: Elsewhere(torch.empty(size, dtype=named.get("dtype"))), "PrivateUse1")
        library.impl("empty_strided", empty_strided, "PrivateUse1")
        library.impl("_copy_from", copy_from, "PrivateUse1")
        registered.append(library)
    return torch.device(NAME, 0)


def held(x: Any) -> Any:
    if isinstance(x, Elsewhere):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def empty_strided(size: Any, stride: Any, **named: Any) -> Elsewhere:
    return Elsewhere(torch.empty_strided(size, stride, dtype=named.get("dtype")))


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    held(target).copy_(held(source))
    return target


def compute(function: Any, args: Any, named: dict[str, Any], counted: "Counting | None") -> Any:
    """The result of an operation of torch. Raises RuntimeError if it mixes devices."""
    tensors = [x for x in tree_leaves((args, named)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, Elsewhere)]
    name = function.overloadpacket.__name__
    if here and name not in MOVES and any(x.ndim and not isinstance(x, Elsewhere) for x in tensors):
        raise RuntimeError(f"expected all tensors on one device, got {NAME} and cpu, in {function}")
    target = torch.device(named["device"]).type if named.get("device") is not None else NAME if here else "cpu"
    if counted is not None and here:
        counted.operations += name not in VIEWS
        if name in WAITS or (name == "_to_copy" and target == "cpu"):
            counted.waits[place()] += 1
    result = function(*tree_map(held, args), **tree_map(held, named))
    if name == "copy_":
        return args[0]
    if target != NAME:
        return result
    changed = {id(x.held): x for x in here}
    return tree_map(lambda x: changed.get(id(x)) if id(x) in changed else Elsewhere(x) if isinstance(x, torch.Tensor) else x, result)


def place() -> str:
    """Where the service is."""
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_stack()]
    ours = [(path.name, frame.line) for path, frame in frames if "attend" in path.parts and "tests" not in path.parts]
    return "{}: {}".format(*ours[-1]) if ours else "a test"


class Counting(TorchDispatchMode):
    """Counts operations of the device, and where the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.waits = 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {}, self)
