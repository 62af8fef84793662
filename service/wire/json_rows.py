"""Numbers cut out of a larger JSON text -> an array, or nothing: whether that text is good, whoever cuts it has to find out.

What is made of them lies in the parser's memory until this thread parses again.
"""

import numpy as np

from service.errors import AttendError
from service.tensors import Array
from service.wire.arrays import Kind
from service.wire.json_form import Reader, own_parser
from service.wire.json_lists import array_of_lists
from service.wire.limits import WireLimits
from service.wire.scan import parse_slowly


def parse_numbers(numbers: bytes) -> Array | None:
    """Numbers with commas between, and no brackets; None where there is anything else among them."""
    try:
        return np.frombuffer(own_parser().parse(b"[%b]" % numbers).as_buffer(of_type="d"), np.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def parse_rows(rows: memoryview, kind: Kind, limits: WireLimits) -> Array | None:
    """Rows of a tensor as they stand in its list, with commas between; None where they are not regular."""
    text = b"".join((b"[", rows, b"]"))
    reader = Reader(text, {}, limits)
    try:
        array = reader.nested(own_parser().parse(text), kind, "")
        return array if reader.brackets == reader.lists else None
    except AttendError:
        return None
    except (ValueError, RuntimeError):
        return _parse_rows_slowly(text, kind, limits)


def _parse_rows_slowly(text: bytes, kind: Kind, limits: WireLimits) -> Array | None:
    """Those with numbers that simdjson refuses and JSON allows: integers of more than 64 bits."""
    try:
        return array_of_lists(parse_slowly(text), kind, "") if len(text) <= limits.scan_bytes else None
    except AttendError:
        return None
