"""The messages of GRPCInferenceService: their classes, and ModelInferRequest split into its tensors and the rest.

The protobuf library holds the GIL while it parses a message, copies every tensor twice, and makes a Python object of each typed number.
So `split_request` cuts out the tensors' bytes first, as views of the message; the library parses the rest, which is small.
https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from attend.errors import TooLarge
from attend.tensors import Array
from attend.web.grpc.descriptors import DESCRIPTOR

REQUEST_CLASS = message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name["ModelInferRequest"])

INPUTS_FIELD, RAW_INPUTS_FIELD, CONTENTS_FIELD, RAW_OUTPUTS_FIELD = 5, 7, 5, 6  # field numbers, of `contents` within an input
ID_FIELD, FIELDS_TO_ID = 3, 64  # field number; fields of a refused request among which its id is looked for
VARINT, BYTES, FIXED_SIZES = 0, 2, {1: 8, 5: 4}  # wire types; wire type -> bytes for those of fixed size
MAX_VARINT_BYTES = 10
PIECE_BYTES = 1 << 20  # bytes of varints decoded at a time: decoding needs about 50 times as much memory
MAX_FIELDS = 1 << 14  # in one message, including nested ones; a tensor's numbers are one field
MAX_REST_BYTES = 2 << 20  # of a message without its tensors: names, shapes, parameters


def __getattr__(name: str) -> Any:
    """The class of the message of that name: `messages.ModelInferResponse`."""
    if name not in DESCRIPTOR.message_types_by_name:
        raise AttributeError(name)
    return message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name[name])


@dataclass(slots=True)
class SplitRequest:
    """`message`: the request without its numbers; `raw`: raw_input_contents; `typed`: for each input, field number -> packed contents,
    None for an input without contents."""

    message: Any
    raw: list[memoryview] = field(default_factory=list)
    typed: list[dict[int, bytes | memoryview] | None] = field(default_factory=list)


def split_request(body: bytes) -> SplitRequest:
    """Splits a ModelInferRequest. Raises DecodeError for invalid bytes, TooLarge for more than MAX_FIELDS fields or MAX_REST_BYTES."""
    fields_left = iter(range(MAX_FIELDS))  # loses an item for each field
    parts = SplitRequest(None)
    rest: list[bytes | memoryview] = []
    for number, value, field_bytes in _iterate_fields(memoryview(body), fields_left):
        if number == RAW_INPUTS_FIELD:
            parts.raw.append(value)
        elif number == INPUTS_FIELD:
            entry, typed = _input(value, fields_left)
            rest.append(length_prefixed(INPUTS_FIELD, len(entry)) + entry)
            parts.typed.append(typed)
        else:
            rest.append(field_bytes)
    if (size := sum(map(len, rest))) > MAX_REST_BYTES:
        raise TooLarge.where("", f"at most {MAX_REST_BYTES} bytes besides the tensors", str(size))
    parts.message = REQUEST_CLASS.FromString(b"".join(rest))
    return parts


def request_id(body: bytes) -> str:
    """The id of a ModelInferRequest, which need not be valid; "" if it is not among the first fields, where libraries write it."""
    with suppress(DecodeError, TooLarge, UnicodeDecodeError):
        for number, value, _ in _iterate_fields(memoryview(body), iter(range(FIELDS_TO_ID))):
            if number == ID_FIELD and len(value) <= MAX_REST_BYTES:
                return bytes(value).decode()
    return ""


def length_prefixed(number: int, size: int) -> bytes:
    """The tag and length that precede a field of `size` bytes."""
    written = bytearray()
    for value in (number << 3 | BYTES, size):
        while value > 127:
            written.append(value & 127 | 128)
            value >>= 7
        written.append(value)
    return bytes(written)


def varints(packed: bytes | memoryview, dtype: np.dtype[Any]) -> Array:
    """The numbers of a packed field of integers or booleans. Raises DecodeError."""
    octets = np.frombuffer(packed, np.uint8)
    if octets.size and octets[-1] > 127:
        raise DecodeError("truncated")
    pieces, start = [np.empty(0, dtype)], 0
    while start < octets.size:
        end = min(start + PIECE_BYTES, octets.size)
        while octets[end - 1] > 127:
            end -= 1
            if end + MAX_VARINT_BYTES < start + PIECE_BYTES:
                raise DecodeError("too long a number")
        pieces.append(_varints(octets[start:end], dtype))
        start = end
    return np.concatenate(pieces)


def _varints(octets: Array, dtype: np.dtype[Any]) -> Array:
    """Decodes numbers of seven bits per byte, lowest first; the last byte of each number is below 128."""
    ends = np.flatnonzero(octets < 128)
    starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1))
    lengths = ends - starts + 1
    if (longest := int(lengths.max())) > MAX_VARINT_BYTES:
        raise DecodeError("too long a number")
    numbers = np.zeros(ends.size, np.uint64)
    for i in range(longest):
        longer = lengths > i
        numbers[longer] |= (octets[starts[longer] + i] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * i)
    return numbers != 0 if dtype == np.bool_ else numbers.astype(dtype)


def _input(entry: memoryview, fields_left: Iterator[int]) -> tuple[bytes, dict[int, bytes | memoryview] | None]:
    """(input without its contents, field number -> contents or None). Joins a field that is split into several pieces."""
    rest: list[memoryview] = []
    typed: dict[int, list[memoryview]] | None = None
    for number, value, field_bytes in _iterate_fields(entry, fields_left):
        if number != CONTENTS_FIELD:
            rest.append(field_bytes)
            continue
        typed = {} if typed is None else typed
        for contents, numbers, _ in _iterate_fields(value, fields_left):
            typed.setdefault(contents, []).append(numbers)
    if typed is None:
        return b"".join(rest), None
    return b"".join(rest), {contents: pieces[0] if len(pieces) == 1 else b"".join(pieces) for contents, pieces in typed.items()}


def _iterate_fields(message: memoryview, fields_left: Iterator[int]) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yields (field number, value, bytes of the field) for each field; takes an item of `fields_left` each time.

    Raises DecodeError or TooLarge.
    """
    at = 0
    while at < len(message):
        if next(fields_left, None) is None:
            raise TooLarge.where("", f"a message of at most {MAX_FIELDS} fields, with packed numbers or raw ones", "more")
        start = at
        tag, at = _varint(message, at)
        wire_type = tag & 7
        if wire_type == BYTES:
            size, at = _varint(message, at)
            end = at + size
        elif wire_type == VARINT:
            end = _varint(message, at)[1]
        elif wire_type in FIXED_SIZES:
            end = at + FIXED_SIZES[wire_type]
        else:
            raise DecodeError("an unknown wire type")
        if end > len(message):
            raise DecodeError("truncated")
        yield tag >> 3, message[at:end], message[start:end]
        at = end


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """(the varint at `at`, the position after it)."""
    value = 0
    for i, octet in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (octet & 127) << (7 * i)
        if octet < 128:
            return value, at + i + 1
    raise DecodeError("truncated")
