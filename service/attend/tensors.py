"""The table of datatypes of tensors, in requests and in layers. Tier 1. A tensor is a `numpy.ndarray`.

JSON and V2 use the names of the Open Inference Protocol (`FP32`), specs those of torch (`float32`), safetensors other ones (`F32`).
numpy has no bfloat16; `ml_dtypes` adds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Datatype:
    """A row of the table. `size` is bytes per element; `numpy` is little-endian, as on the wire."""

    name: str
    numpy: np.dtype[Any]
    torch: str
    safetensors: str
    size: int
    kind: str  # "float", "int" or "bool"


def _row(name: str, dtype: Any, torch: str, safetensors: str, kind: str) -> Datatype:
    numpy = np.dtype(dtype).newbyteorder("<")
    return Datatype(name, numpy, torch, safetensors, numpy.itemsize, kind)


DATATYPES: dict[str, Datatype] = {
    row.name: row
    for row in (
        _row("BOOL", np.bool_, "bool", "BOOL", "bool"),
        _row("UINT8", np.uint8, "uint8", "U8", "int"),
        _row("UINT16", np.uint16, "uint16", "U16", "int"),
        _row("UINT32", np.uint32, "uint32", "U32", "int"),
        _row("UINT64", np.uint64, "uint64", "U64", "int"),
        _row("INT8", np.int8, "int8", "I8", "int"),
        _row("INT16", np.int16, "int16", "I16", "int"),
        _row("INT32", np.int32, "int32", "I32", "int"),
        _row("INT64", np.int64, "int64", "I64", "int"),
        _row("FP16", np.float16, "float16", "F16", "float"),
        _row("BF16", ml_dtypes.bfloat16, "bfloat16", "BF16", "float"),
        _row("FP32", np.float32, "float32", "F32", "float"),
        _row("FP64", np.float64, "float64", "F64", "float"),
    )
}
BY_NUMPY: dict[np.dtype[Any], Datatype] = {row.numpy: row for row in DATATYPES.values()}
BY_SAFETENSORS: dict[str, Datatype] = {row.safetensors: row for row in DATATYPES.values()}
BY_TORCH: dict[str, Datatype] = {row.torch: row for row in DATATYPES.values()}


def datatype_of(array: Array) -> Datatype:
    """The row of an array's dtype. Raises KeyError for other dtypes (object, complex, str)."""
    return BY_NUMPY.get(array.dtype) or BY_NUMPY[array.dtype.newbyteorder("<")]


def shape_alone(shape: Sequence[int], dtype: Any = np.float32) -> Array:
    """Zeros of this shape in the memory of one number: an array whose shape is known, and whose numbers nobody reads."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def raw(array: Array) -> memoryview:
    """The little-endian row-major bytes of the array; copied only if its memory differs."""
    if array.dtype not in BY_NUMPY or not array.flags.c_contiguous:
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data
