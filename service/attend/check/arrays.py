"""Arrays of the framework of a candidate, and back to NumPy."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from attend.tensors import BY_TORCH, Array

ARRAYS = {"jax": ("jax", "device_put"), "mlx": ("mlx.core", "array")}  # frameworks, and what makes their arrays


def as_array(x: Array, dtype: str, framework: str, device: Any = None) -> Any:
    """An array of a framework, contiguous in memory."""
    if framework == "torch":
        import torch

        return torch.tensor(np.asarray(x, order="C"), dtype=getattr(torch, dtype), device=device)
    array = x.astype(BY_TORCH[dtype].numpy if dtype in BY_TORCH else dtype, order="C")
    if framework == "numpy":
        return array
    module, name = ARRAYS[framework]
    return getattr(import_module(module), name)(array)


def as_float64(x: Any) -> Array:
    """A copy in NumPy of a tensor, or of whatever NumPy can read: by `__array__`, DLPack or the buffer protocol."""
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        x = x.detach().cpu().double().numpy()
    elif not hasattr(x, "__array__") and hasattr(x, "__dlpack__"):
        x = np.from_dlpack(x)
    return np.array(x, np.float64)


@cache
def compiled(function: Callable[..., Any], others: tuple[str, ...]) -> Callable[..., Any]:
    """A function of JAX that is compiled for each of its shapes; `others`: the parameters that get no arrays."""
    jit: Callable[..., Callable[..., Any]] = import_module("jax").jit
    return jit(function, static_argnames=others, compiler_options={"xla_backend_optimization_level": 0})


def dtype_of(x: Any) -> str:
    """The name of a dtype: float32 of torch.float32, of mlx.core.float32 and of NumPy's float32."""
    return str(x.dtype).rpartition(".")[2]


def describe(x: Any) -> str:
    return f"{list(x.shape)} {dtype_of(x)}" if hasattr(x, "dtype") else repr(x)


def is_module(candidate: Any) -> bool:
    torch = sys.modules.get("torch")  # a module exists only where torch was imported
    return torch is not None and isinstance(candidate, torch.nn.Module)
