"""Where a session is kept: its id names the process, and processes reach each other on Unix sockets.

An id is `s.REPLICA.REST`. A balancer can route by the name of the replica; the rest has the number of the worker, the worker's start, 128
random bits, and a checksum. So a process knows where a session is without a list of all sessions. The checksum distinguishes the id of a
session that has ended from a text that no server made. It does not protect a session; the random bits and the owner's API key do.

The sockets are files in a folder that only the server's user can open. Their names have the number of the worker and the millisecond of its
start, as ids do: `3.1000.http`, and `3.1000.grpc`. A worker creates them when it begins to serve; its supervisor removes them when it has
ended.
"""

import base64
import re
import secrets
import time
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from service.errors import NotReady, SessionEnded, SessionNotFound, WrongWorker
from service.wire.problems import describe_value

RANDOM_BYTES, CHECKSUM_BYTES = 16, 5
NUMBERS = Struct(">HI")  # worker and epoch in an id
NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,62}"  # of a replica
ID = re.compile(rf"s\.({NAME})\.([A-Za-z0-9_-]{{36}})")  # "s." so that no id begins with a hyphen, which command lines take for a flag
HTTP, GRPC = ".http", ".grpc"
RESTARTED = "the session has ended: its process was restarted"
STARTING = "the process that keeps this sequence is being started"


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
    data = NUMBERS.pack(place.worker, place.epoch) + secrets.token_bytes(RANDOM_BYTES)
    return f"s.{place.replica}.{base64.urlsafe_b64encode(data + _checksum(place.replica, data)).decode()}"


def place_of(session_id: str) -> Place:
    """The process that made the id. Raises SessionNotFound if none did."""
    match = ID.fullmatch(session_id)
    data = base64.urlsafe_b64decode(match[2]) if match else b""
    if match is None or data[-CHECKSUM_BYTES:] != _checksum(match[1], data[:-CHECKSUM_BYTES]):
        raise SessionNotFound.where("", "the id of a session, as POST /sessions returns it", describe_value(session_id))
    return Place(match[1], *NUMBERS.unpack_from(data))


def _checksum(replica: str, data: bytes) -> bytes:
    return blake2b(replica.encode() + data, digest_size=CHECKSUM_BYTES, key=b"attend session").digest()


def new_socket(folder: Path, worker: int) -> Path:
    """The path of the HTTP socket of a worker that starts now."""
    return folder / f"{worker}.{int(1000 * time.time()) % 2**32}{HTTP}"


class Workers:
    """The workers of a server, as one of them sees them. `own`: its HTTP socket; `count`: the number of workers."""

    def __init__(self, own: Path, count: int) -> None:
        self.own, self.count = own, count

    @property
    def number_and_epoch(self) -> tuple[int, int]:
        """Those of this worker, for its `Place`."""
        worker, epoch = self.own.stem.split(".")
        return int(worker), int(epoch)

    def others(self) -> list[WrongWorker]:
        """A WrongWorker for each other worker that serves: its socket, and the error to raise if that worker has ended."""
        return [WrongWorker(path, SessionEnded(RESTARTED)) for path in sorted(self.own.parent.glob(f"*{HTTP}")) if path != self.own]

    def require_session(self, place: Place) -> None:
        """Raises WrongWorker if another worker that serves has the sessions of this place, SessionEnded if that worker has ended."""
        socket = self.own.with_name(f"{place.worker}.{place.epoch}{HTTP}")
        if socket != self.own:
            if not socket.exists():
                raise SessionEnded(RESTARTED)
            raise WrongWorker(socket, SessionEnded(RESTARTED))

    def require_sequence(self, *names: str) -> None:
        """Raises WrongWorker if another worker has the sequence of these names, NotReady if that worker is being started.

        A hash of the names gives the number of the worker. While a worker is replaced, two have its number; the newer one has the sequence.
        """
        number = int.from_bytes(blake2b("\0".join(names).encode(), digest_size=8).digest(), "big") % self.count
        sockets = self.own.parent.glob(f"{number}.*{HTTP}")
        newest = max(sockets, key=lambda path: int(path.stem.split(".")[1]), default=None)
        if newest is None:
            raise NotReady(STARTING)
        if newest != self.own:
            raise WrongWorker(newest, NotReady(STARTING))
