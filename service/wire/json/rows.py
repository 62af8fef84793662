"""Numbers cut out of a larger JSON text -> an array, or nothing: whether that text is good, whoever cuts it has to find out.

What is made of them lies in the parser's memory until this thread parses again.
"""

from collections.abc import Callable

import numpy as np

from service.errors import AttendError
from service.tensors import Array
from service.wire.arrays import Kind
from service.wire.json.lists import array_of_lists
from service.wire.json.reader import Reader, own_parser
from service.wire.json.strict import parse_slowly
from service.wire.limits import WireLimits

MINUS_INFINITY = b'"-inf"'
LOWEST = -1e308


def parse_numbers(numbers: bytes) -> Array | None:
    """Numbers with commas between, and no brackets; None where there is anything else among them."""
    try:
        return np.frombuffer(own_parser().parse(b"[%b]" % numbers).as_buffer(of_type="d"), np.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def parse_rows(rows: memoryview, kind: Kind, limits: WireLimits) -> Array | None:
    """Rows of a tensor as they stand in its list, with commas between; None where they are not regular."""
    return _parse_list(b"".join((b"[", rows, b"]")), kind, limits)


def _parse_list(text: bytes, kind: Kind, limits: WireLimits) -> Array | None:
    if text.find(b"[", 1) < 0:
        return parse_numbers(text[1:-1])
    reader = Reader(text, {}, limits)
    try:
        array = reader.nested(own_parser().parse(text), kind, "")
        return array if reader.brackets == reader.lists else None
    except AttendError:
        return None
    except (ValueError, RuntimeError):
        return None


def read_rows(text: bytes, kind: Kind, limits: WireLimits, place_of: Callable[[int], str]) -> Array:
    """A list of rows or of numbers. Raises MalformedBody, whose place `place_of` words, or InvalidRequest at the first fault.

    The words that a mask or a bias may have beside numbers are first replaced by numbers as long as they are. None of these makes another
    number of what stands beside it: there are spaces round some, and the last one, with a digit behind it, is beyond any number's range.
    """
    plain, words = text, 0
    if kind == "mask" and b'"' not in text:
        plain = text.replace(b"true", b" 1  ").replace(b"false", b" 0   ")
    elif kind == "bias" and (words := text.count(MINUS_INFINITY)):
        plain = text.replace(MINUS_INFINITY, b"-1e308")
    array = _parse_list(plain, kind, limits)
    if array is not None and not words:
        return array
    if array is not None and np.count_nonzero(lowest := array == LOWEST) == words:
        return np.where(lowest, -np.inf, array)
    return array_of_lists(parse_slowly(text, place_of=place_of), kind, "")
