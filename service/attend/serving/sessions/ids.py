"""Ids of sessions: `s.REPLICA.REST`, so that a balancer can route by the name of the replica without any state.

The rest has random bytes of the process, 128 random bits, and a checksum. So a replica tells the id of a session that it has lost from that
of another replica, and from a text that no server made, without a list of all sessions. The checksum does not protect a session; the random
bits and the owner's API key do.
"""

import base64
import re
import secrets
from hashlib import blake2b
from typing import NamedTuple

from attend.errors import SessionNotFound
from attend.wire.problems import describe_value

PROCESS_BYTES, RANDOM_BYTES, CHECKSUM_BYTES = 6, 16, 5
REPLICA_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
ID = re.compile(rf"s\.({REPLICA_NAME})\.([A-Za-z0-9_-]{{36}})")  # "s." so that no id begins with a hyphen, as a flag of a command does


class Process(NamedTuple):
    """A process that keeps sessions: the name of its replica, and bytes that it drew at its start."""

    replica: str
    start: bytes


def new_process(replica: str) -> Process:
    """This process, under the name of its replica."""
    return Process(replica, secrets.token_bytes(PROCESS_BYTES))


def default_replica(address: str) -> str:
    """The name of a replica that was given none: eight digits that its machine's name and its port determine."""
    return blake2b(address.encode(), digest_size=4).hexdigest()


def make_id(process: Process) -> str:
    """A new id of a session of this process."""
    data = process.start + secrets.token_bytes(RANDOM_BYTES)
    return f"s.{process.replica}.{base64.urlsafe_b64encode(data + _checksum(process.replica, data)).decode()}"


def process_of(session_id: str, at: str = "") -> Process:
    """The process that made the id. Raises SessionNotFound if none did. `at`: where the body has the id."""
    match = ID.fullmatch(session_id)
    data = base64.urlsafe_b64decode(match[2]) if match else b""
    if match is None or data[-CHECKSUM_BYTES:] != _checksum(match[1], data[:-CHECKSUM_BYTES]):
        raise SessionNotFound.where(at, "the id of a session, as POST /sessions returns it", describe_value(session_id))
    return Process(match[1], data[:PROCESS_BYTES])


def _checksum(replica: str, data: bytes) -> bytes:
    return blake2b(replica.encode() + data, digest_size=CHECKSUM_BYTES, key=b"attend session").digest()
