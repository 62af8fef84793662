"""Session ids, `s.REPLICA.REST`: the name of the replica that keeps the session, by which a balancer can route; the rest has the number of
its worker, the worker's start, 128 random bits, and a checksum.

So a process can tell where a session is, and a lost session from an id that never was one, without a list of all. The checksum detects ids
that no server made. It protects nothing: what protects a session is its random bits and the API key that it belongs to.
"""

import base64
import re
import secrets
from hashlib import blake2b
from typing import NamedTuple

from service.errors import SessionNotFound
from service.wire.problems import describe_value

RANDOM_BYTES, CHECKSUM_BYTES = 16, 5
FIELDS = (("worker", 2), ("epoch", 4))  # bytes of each
NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,62}"  # of a replica
ID = re.compile(rf"s\.({NAME})\.([A-Za-z0-9_-]{{36}})")  # "s." so that no id begins with a hyphen, which command lines take for a flag


class Place(NamedTuple):
    """The process that keeps a session: name of the replica, number of the worker, and the millisecond of its start, modulo 2^32."""

    replica: str
    worker: int
    epoch: int


def default_replica(address: str) -> str:
    """The name of a replica that was given none: eight digits that its machine's name and its port determine."""
    return blake2b(address.encode(), digest_size=4).hexdigest()


def make_id(place: Place) -> str:
    """A new id of a session of this process."""
    numbers = b"".join(number.to_bytes(size, "big") for number, (_, size) in zip(place[1:], FIELDS, strict=True))
    data = numbers + secrets.token_bytes(RANDOM_BYTES)
    return f"s.{place.replica}.{base64.urlsafe_b64encode(data + _checksum(place.replica, data)).decode()}"


def place_of(session_id: str) -> Place:
    """The process that made the id. Raises SessionNotFound if none did."""
    match = ID.fullmatch(session_id)
    data = base64.urlsafe_b64decode(match[2]) if match else b""
    if match is None or data[-CHECKSUM_BYTES:] != _checksum(match[1], data[:-CHECKSUM_BYTES]):
        raise SessionNotFound.where("", "the id of a session, as POST /sessions returns it", describe_value(session_id))
    numbers, start = [], 0
    for _, size in FIELDS:
        numbers.append(int.from_bytes(data[start : start + size], "big"))
        start += size
    return Place(match[1], *numbers)


def _checksum(replica: str, data: bytes) -> bytes:
    return blake2b(replica.encode() + data, digest_size=CHECKSUM_BYTES, key=b"attend session").digest()
