"""Converts bytes, base64 and numbers to arrays of a datatype, and an array of a reply to the requested one.

Refusals describe the first element that the datatype cannot represent.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pybase64

from attend.axes import MINUS_INFINITY
from attend.errors import InvalidRequest, pointer
from attend.tensors import BY_NUMPY, DATATYPES, Array, Datatype
from attend.wire.problems import describe_value

MAX_RANK = 4
MAX_EXACT_INTEGER = 2**53  # float64 represents every integer up to here
FEW_FLAGS = 1 << 16  # their bytes are searched sooner than `all` and `any` begin; to copy more would keep other threads from running


def array_of_bytes(piece: memoryview | bytes, datatype: Datatype, shape: Sequence[int], at: str) -> Array:
    """A view of bytes of a body, or a copy if they are not aligned. Raises InvalidRequest if bytes of BOOL are not 0 or 1."""
    if datatype.kind == "bool":
        _require_booleans(piece, at)
    array: Array = np.ndarray(shape, datatype.numpy, piece)  # takes half the time of np.frombuffer and reshape
    return array if array.flags.aligned else array.copy()


def array_of_base64(text: Any, shape: tuple[int, ...], dtype: np.dtype[Any], at: str) -> Array:
    """The array of a base64 text, a string or its bytes. Raises InvalidRequest."""
    if not isinstance(text, str | bytes | memoryview):
        raise InvalidRequest.where(at, "a base64 string", describe_value(text))
    try:
        data = pybase64.b64decode_as_bytearray(text, validate=True)
    except ValueError as error:
        raise InvalidRequest.where(at, "base64", f"something else ({error})") from None
    if len(data) != math.prod(shape) * dtype.itemsize:
        wanted = f"{math.prod(shape) * dtype.itemsize} bytes for shape {list(shape)} of {BY_NUMPY[dtype].name}"
        raise InvalidRequest.where(at, wanted, str(len(data)))
    array = np.frombuffer(data, dtype)
    if dtype == np.bool_:
        _require_booleans(data, at)
    return array.reshape(shape)


def _require_booleans(piece: memoryview | bytes | bytearray, at: str) -> None:
    if len(piece) <= FEW_FLAGS and not bytes(piece).translate(None, delete=b"\0\1"):
        return
    flags = np.frombuffer(piece, np.uint8)
    if (wrong := flags > 1).any():
        first = int(np.argmax(wrong))
        raise InvalidRequest.where(at, "bytes 0 or 1 for BOOL", f"{flags[first]} as byte {first}")


def beyond_float64(numbers: Array, dtype: np.dtype[Any]) -> bool:
    """Whether some of the numbers, read as float64, may differ from the 64-bit integers that were sent."""
    return dtype.kind in "iu" and dtype.itemsize == 8 and bool((np.abs(numbers) >= MAX_EXACT_INTEGER).any())


def convert(numbers: Array, dtype: np.dtype[Any], at: str) -> Array:
    """Float64 numbers as `dtype`. Raises InvalidRequest at the first number that it cannot represent."""
    if numbers.dtype == dtype:
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):
        array = numbers.astype(dtype)
    require_exact(array, numbers, BY_NUMPY[dtype], at)
    return array


def require_exact(array: Array, numbers: Array, datatype: Datatype, at: str) -> None:
    """Raises InvalidRequest at the first of `numbers` that `array`, their conversion, changes. Floats may be rounded to finite ones."""
    wrong = ~np.isfinite(array) if datatype.kind == "float" else array != numbers
    if not wrong.any():
        return
    if datatype.kind == "float":
        wrong &= np.isfinite(numbers)  # a bias may be -inf
    if wrong.any():
        place, got = first_element(numbers, wrong)
        raise InvalidRequest.where(at + place, range_text(datatype), got)


def range_text(datatype: Datatype) -> str:
    """A description of the numbers that a datatype can represent."""
    if datatype.kind == "int":
        return f"a whole number from {np.iinfo(datatype.numpy).min} to {np.iinfo(datatype.numpy).max} for {datatype.name}"
    return "0 or 1 for BOOL" if datatype.kind == "bool" else f"a number that is finite in {datatype.name}"


def first_element(array: Array, wrong: Array) -> tuple[str, str]:
    """(JSON pointer to the first element that is `wrong`, such as /0/3/1; the element as text, integers without a decimal point)."""
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    value = array[index].item()
    is_integer = isinstance(value, int) or (value.is_integer() and abs(value) <= MAX_EXACT_INTEGER)
    return pointer(index), str(int(value)) if is_integer else repr(value)


def without_broadcast(array: Array) -> Array:
    """The array with length 1 along every broadcast axis."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def may_be_minus_infinity(name: str) -> bool:
    """Whether -inf is a value of this output, or of a part of it such as `scores.0`."""
    return name.partition(".")[0] in MINUS_INFINITY


def wire_array(name: str, array: Array, datatype: str, nonfinite: str) -> tuple[Array, Array | None]:
    """The array in its wire datatype, and a mask of its elements that are not finite (None: all are finite).

    Raises InvalidRequest, with output and index, if an element is NaN or overflowed and `nonfinite` is "error". The place is the datatype
    of the reply if that alone is too small for the number.
    """
    computed = array
    if array.dtype.kind in "iub":
        return array, None
    if array.dtype != (wanted := DATATYPES[datatype].numpy):
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(wanted)
    finite = np.isfinite(array)
    if finite.all() if finite.size > FEW_FLAGS else 0 not in finite.tobytes():
        return array, None
    if nonfinite == "error":
        wrong = ~finite
        if may_be_minus_infinity(name):
            wrong &= ~np.isneginf(array.astype(np.float64))
        if wrong.any():
            index = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), array.shape)]
            at = "/reply/datatype" if np.isfinite(float(computed[tuple(index)])) else ""
            expected = f"finite numbers in {name} as {BY_NUMPY[array.dtype].name}, unless reply.nonfinite allows others"
            raise InvalidRequest.where(at, expected, f"{name}{index} = {float(array[tuple(index)])}")
    return array, ~finite
