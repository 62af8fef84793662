"""Python lists -> arrays, every row looked at: the slow way, which finds the place of what is wrong in a tensor."""

from typing import Any

import numpy as np

from service.errors import InvalidRequest
from service.tensors import BY_NUMPY, Array
from service.wire.arrays import MAX_RANK, Kind, held_by
from service.wire.problems import shown


def array_of_lists(value: list[Any], kind: Kind, at: str) -> Array:
    """The array in float64. Raises InvalidRequest at the first fault."""
    shape: list[int] = []
    rows: Any = value
    while isinstance(rows, list):
        shape.append(len(rows))
        rows = rows[0] if rows else None
    if len(shape) > MAX_RANK:
        raise InvalidRequest.where(at, f"at most {MAX_RANK} nested lists", f"{len(shape)}")
    allowed = {"number": {int, float}, "bias": {int, float, str}, "mask": {int, float, bool}, "count": {int, float}}[kind]
    _examine(value, shape, allowed, kind, at)
    if 0 in shape:
        raise InvalidRequest.where(at, 'a form with "shape" where an axis has length 0', "an empty list")
    try:
        return np.array(value, dtype=np.float64)
    except OverflowError:
        raise InvalidRequest.where(at + _overflowing(value), "a number within the range of a float64", "an integer far beyond it") from None


def array_of_integers(value: list[Any], kind: Kind, dtype: np.dtype[Any], at: str) -> Array:
    """The array in a datatype of integers, each exactly as it was sent; in float64 some of 64 bits would be others."""
    floats = array_of_lists(value, kind, at)
    array = np.empty(floats.shape, dtype)
    limits = np.iinfo(dtype)
    for place in np.ndindex(floats.shape):
        item: Any = value
        for i in place:
            item = item[i]
        if isinstance(item, str) or item != item // 1 or not limits.min <= item <= limits.max:
            raise InvalidRequest.where(at + "".join(f"/{i}" for i in place), held_by(BY_NUMPY[dtype]), shown(item))
        array[place] = int(item)
    return array


def _overflowing(value: Any) -> str:
    """Where the first integer stands that no float64 holds."""
    for i, item in enumerate(value):
        if isinstance(item, list):
            if below := _overflowing(item):
                return f"/{i}{below}"
        elif isinstance(item, int) and abs(item) >= 2**1024:
            return f"/{i}"
    return ""


def _examine(value: Any, shape: list[int], allowed: set[type], kind: Kind, at: str) -> None:
    if not isinstance(value, list):
        raise InvalidRequest.where(at, f"a list of {shape[0]}", shown(value))
    if len(value) != shape[0]:
        raise InvalidRequest.where(at, f"{shape[0]} values, as in the rows before", str(len(value)))
    if len(shape) > 1:
        for i, row in enumerate(value):
            _examine(row, shape[1:], allowed, kind, f"{at}/{i}")
        return
    if set(map(type, value)) <= allowed and (kind != "bias" or all(v == "-inf" for v in value if isinstance(v, str))):
        return
    words = {
        "number": "a number",
        "bias": 'a number or "-inf"',
        "mask": "0, 1, true or false",
        "count": "a whole number",
    }[kind]
    for i, item in enumerate(value):
        if type(item) not in allowed or (isinstance(item, str) and item != "-inf"):
            raise InvalidRequest.where(f"{at}/{i}", words, shown(item))
