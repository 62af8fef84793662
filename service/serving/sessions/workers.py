"""The Unix sockets on which the workers of a server pass requests to each other, since each keeps sessions of its own.

They are files in a folder that only the server's user can open. Their names have the number of the worker and the millisecond of its
start, as ids of sessions do (`ids.py`): `3.1000.http`, and `3.1000.grpc`. A worker creates them when it begins to serve; its supervisor
removes them when it has ended.
"""

import time
from hashlib import blake2b
from pathlib import Path

from service.errors import NotReady, SessionEnded, WrongWorker
from service.serving.sessions.ids import Place

HTTP, GRPC = ".http", ".grpc"
RESTARTED = "the session has ended: its process was restarted"
STARTING = "the process that keeps this sequence is being started"


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
        """The other workers that serve, as the errors that name them."""
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
