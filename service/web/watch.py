"""The timer of a process that checks the progress of every connection."""

from collections.abc import Callable
from typing import Any, Protocol

import structlog

log = structlog.get_logger("attend")


class Watched(Protocol):
    def check_progress(self, now: float) -> None: ...


class Watch:
    """Limits for slow peers, and the clock by which they are measured.

    Bodies and replies must move by `rate` bytes per second, averaged over `patience` seconds; so a small body, or the last part of one, has
    all of that time. `refused` gets the reason of each closed connection, `answered` the status of each refusal that the application does
    not know of. With `log_requests` refusals are logged.
    """

    def __init__(
        self,
        patience: float = 20.0,
        refused: Callable[[str], None] = lambda reason: None,
        log_requests: bool = False,
        answered: Callable[[int], None] = lambda status: None,
        rate: float = 32768.0,
    ) -> None:
        self.patience, self.refused, self.log_requests, self.answered = patience, refused, log_requests, answered
        self.rate, self.least = rate, rate * patience  # bytes by which a body or a reply must move within the patience
        self.interval = min(1.0, patience / 4)
        self.now = 0.0  # seconds, without those in which this process did not run: peers are not to blame for them
        self._checked = 0.0
        self._running = False

    def start(self, loop: Any, connections: set[Any]) -> None:
        """Checks these connections from now on, until there are none."""
        if not self._running:
            self._running, self._checked = True, loop.time()
            loop.call_later(self.interval, self._check, loop, connections)

    def _check(self, loop: Any, connections: set[Watched]) -> None:
        now = loop.time()
        self.now += min(now - self._checked, 2 * self.interval)
        self._checked = now
        for connection in list(connections):
            try:
                connection.check_progress(self.now)
            except Exception:  # of one connection; the others are checked all the same
                log.exception("a connection could not be checked")
        self._running = bool(connections)
        if self._running:
            loop.call_later(self.interval, self._check, loop, connections)
