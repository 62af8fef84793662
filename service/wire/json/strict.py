"""The strict JSON parser: Python's `json` with checks; converts its lists to arrays. It is slow, and finds the place of a fault."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from service.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge, pointer
from service.tensors import BY_NUMPY, Array
from service.wire.arrays import MAX_RANK, Kind, range_text
from service.wire.problems import describe_value

DIGITS = 309  # digits of the largest integer in the range of float64; a sign counts
EMPTY_AXIS = 'an object with "shape", since an axis has length 0'
ALLOWED: dict[Kind, tuple[set[type], str]] = {  # types of the elements, and their description
    "number": ({int, float}, "a number"),
    "bias": ({int, float, str}, 'a number or "-inf"'),
    "mask": ({int, float, bool}, "0, 1, true or false"),
    "count": ({int, float}, "a whole number"),
}


class _RepeatedKey:
    def __init__(self, key: str) -> None:
        self.key = key


class _Constant:
    def __init__(self, text: str) -> None:
        self.text = text


def line_and_column(body: bytes, offset: int) -> str:
    """Line and column of a byte in a text, counted from 1."""
    line, column = body.count(b"\n", 0, offset) + 1, offset - body.rfind(b"\n", 0, offset)
    return f"line {line} column {column}"


def parse_strictly(
    body: bytes, whole: str = "body", place_of: Callable[[int], str] | None = None, placed: Sequence[Any] | None = None
) -> Any:
    """The document as Python objects. Raises MalformedBody, TooLarge (depth) or InvalidRequest (a number beyond float64).

    Error messages call the text `whole`. If it was cut from another text, `place_of` maps a byte offset to the place in that text. The n-th
    NaN in the text is replaced by the n-th item of `placed`; their numbers must agree.
    """
    values = iter(placed or ())
    constants = 0

    def constant(name: str) -> Any:
        nonlocal constants
        constants += name == "NaN"
        return next(values, _Constant(name)) if name == "NaN" else _Constant(name)

    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=_members, parse_constant=constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise MalformedBody.where("", "JSON in UTF-8", f"an invalid byte at offset {error.start}") from None
    except json.JSONDecodeError as error:
        got = f"the end of the {whole}" if error.pos >= len(text) else f"{text[error.pos]!r}"
        place = f"line {error.lineno} column {error.colno}" if place_of is None else place_of(len(text[: error.pos].encode()))
        raise MalformedBody.where("", "JSON", f"{got} at {place} ({error.msg.lower()})") from None
    except RecursionError:
        raise TooLarge.where("", "a document of moderate depth", "one nested too deeply") from None
    if fault := _fault(document, ()):
        raise fault
    if placed is not None and constants != len(placed):
        raise MalformedBody.where("", "JSON", "NaN, which JSON does not have")
    return document


def _integer(text: str) -> int | float:
    """An integer. One beyond float64 becomes infinity, which `_fault` reports; int() would raise for thousands of digits."""
    return int(text) if len(text) <= DIGITS else float(text)


def _members(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        return _RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return members


def _fault(value: Any, at: tuple[Any, ...]) -> RequestError | None:
    """The first fault in `value`, in document order."""
    if isinstance(value, _RepeatedKey):
        return MalformedBody.where(pointer((*at, value.key)), "each key once", f'"{value.key}" twice')
    if isinstance(value, _Constant):
        return MalformedBody.where(pointer(at), "a JSON number", value.text)
    if isinstance(value, float) and not math.isfinite(value):
        return InvalidRequest(problems=[Problem(pointer(at), "a finite number", "a number beyond the range of a float64")])
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, list | dict | _RepeatedKey | _Constant | float) and (fault := _fault(item, (*at, key))):
            return fault
    return None


def array_of_lists(value: list[Any], kind: Kind, at: str) -> Array:
    """The list as float64. Raises InvalidRequest with the place of the first fault."""
    shape: list[int] = []
    rows: Any = value
    while isinstance(rows, list):
        shape.append(len(rows))
        rows = rows[0] if rows else None
    if len(shape) > MAX_RANK:
        raise InvalidRequest.where(at, f"at most {MAX_RANK} nested lists", f"{len(shape)}")
    _demand_regular(value, shape, kind, at)
    if 0 in shape:
        raise InvalidRequest.where(at, EMPTY_AXIS, "an empty list")
    try:
        return np.array(value, dtype=np.float64)
    except OverflowError:
        raise InvalidRequest.where(at + _overflow(value), "a number within the range of a float64", "an integer far beyond it") from None


def array_of_integers(value: list[Any], kind: Kind, dtype: np.dtype[Any], at: str) -> Array:
    """The list as 64-bit integers, not all of which float64 can represent. Raises InvalidRequest."""
    array = np.empty(array_of_lists(value, kind, at).shape, dtype)
    limits = np.iinfo(dtype)
    for index in np.ndindex(array.shape):
        item: Any = value
        for i in index:
            item = item[i]
        if isinstance(item, str) or item != item // 1 or not limits.min <= item <= limits.max:
            raise InvalidRequest.where(at + pointer(index), range_text(BY_NUMPY[dtype]), describe_value(item))
        array[index] = int(item)
    return array


def _overflow(value: Any) -> str:
    """Pointer to the first integer beyond float64, "" if there is none."""
    for i, item in enumerate(value):
        if isinstance(item, list):
            if below := _overflow(item):
                return f"/{i}{below}"
        elif isinstance(item, int) and abs(item) >= 2**1024:
            return f"/{i}"
    return ""


def _demand_regular(value: Any, shape: list[int], kind: Kind, at: str) -> None:
    if not isinstance(value, list):
        raise InvalidRequest.where(at, f"a list of {shape[0]}", describe_value(value))
    if len(value) != shape[0]:
        raise InvalidRequest.where(at, f"{shape[0]} values, as in the rows before", str(len(value)))
    if len(shape) > 1:
        for i, row in enumerate(value):
            _demand_regular(row, shape[1:], kind, f"{at}/{i}")
        return
    types, expected = ALLOWED[kind]
    if set(map(type, value)) <= types and (kind != "bias" or all(v == "-inf" for v in value if isinstance(v, str))):
        return
    for i, item in enumerate(value):
        if type(item) not in types or (isinstance(item, str) and item != "-inf"):
            raise InvalidRequest.where(f"{at}/{i}", expected, describe_value(item))
