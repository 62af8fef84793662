"""Session ids. An id has the numbers of the replica and the worker that keep the session, the worker's start, and 128 random bits.

So a process can tell where a session is, and a lost session from an id that never was one, without a list of all. The checksum detects ids
that no server made. It protects nothing: what protects a session is its random bits and the API key that it belongs to.
"""

import base64
import binascii
import secrets
from hashlib import blake2b
from typing import NamedTuple

from service.errors import SessionNotFound
from service.wire.problems import describe_value

PREFIX = "s."  # so that no id begins with a hyphen, which command lines take for a flag
RANDOM_BYTES, CHECKSUM_BYTES = 16, 5
FIELDS = (("replica", 4), ("worker", 2), ("epoch", 4))  # bytes of each
ID_BYTES = sum(size for _, size in FIELDS) + RANDOM_BYTES + CHECKSUM_BYTES


class Place(NamedTuple):
    """The process that keeps a session: the numbers of its replica and worker, and the millisecond of its start, modulo 2^32."""

    replica: int
    worker: int
    epoch: int


def replica_number(name: str) -> int:
    """The number of a replica, from a name that others do not have, such as that of its machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big")


def make_id(place: Place) -> str:
    """A new id of a session of this process: PREFIX and 42 letters, digits, - and _."""
    numbers = b"".join(number.to_bytes(size, "big") for number, (_, size) in zip(place, FIELDS, strict=True))
    data = numbers + secrets.token_bytes(RANDOM_BYTES)
    return PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).rstrip(b"=").decode()


def place_of(session_id: str) -> Place:
    """The process that made the id. Raises SessionNotFound if none did."""
    try:
        text = session_id.removeprefix(PREFIX)
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not session_id.startswith(PREFIX) or len(data) != ID_BYTES or data[-CHECKSUM_BYTES:] != _checksum(data[:-CHECKSUM_BYTES]):
        raise SessionNotFound.where("", "the id of a session, as POST /sessions returns it", describe_value(session_id))
    numbers, start = [], 0
    for _, size in FIELDS:
        numbers.append(int.from_bytes(data[start : start + size], "big"))
        start += size
    return Place(*numbers)


def _checksum(data: bytes) -> bytes:
    return blake2b(data, digest_size=CHECKSUM_BYTES, key=b"attend session").digest()
