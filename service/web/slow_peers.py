"""A timer that checks the progress of every connection of the process."""

from collections.abc import Callable
from typing import Any

import structlog

log = structlog.get_logger("attend")


class SlowPeerTimer:
    """Limits for slow peers, and the clock that measures them.

    Bodies and replies must move by `rate` bytes per second, averaged over `timeout` seconds; so a small body, or the last part of one, may
    take all of that time. `refused` is called with the reason of each refusal, `answered` with the status of each refusal that the
    application does not see. With `log_requests` refusals are logged.
    """

    def __init__(
        self,
        timeout: float = 20.0,
        refused: Callable[[str], None] = lambda reason: None,
        log_requests: bool = False,
        answered: Callable[[int], None] = lambda status: None,
        rate: float = 32768.0,
    ) -> None:
        self.timeout, self.refused, self.log_requests, self.answered = timeout, refused, log_requests, answered
        self.rate, self.min_bytes = rate, rate * timeout
        self.interval = min(1.0, timeout / 4)
        self.now = 0.0  # seconds, without the time in which this process did not run, which is not the peers' fault
        self._checked = 0.0
        self._running = False

    def start(self, loop: Any, connections: set[Any]) -> None:
        """Calls `check_progress(now)` of these connections every `interval` seconds, until there are none."""
        if not self._running:
            self._running, self._checked = True, loop.time()
            loop.call_later(self.interval, self._check, loop, connections)

    def _check(self, loop: Any, connections: set[Any]) -> None:
        now = loop.time()
        self.now += min(now - self._checked, 2 * self.interval)
        self._checked = now
        for connection in list(connections):
            try:
                connection.check_progress(self.now)
            except Exception:  # the other connections are still checked
                log.exception("a connection could not be checked")
        self._running = bool(connections)
        if self._running:
            loop.call_later(self.interval, self._check, loop, connections)
