"""Peers that are slow: what the peer of a connection has to do next, and the timer that checks the progress of all connections."""

from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import Any

import structlog

log = structlog.get_logger("attend")
CHECKED_AT_ONCE = 200  # connections whose progress is checked before the event loop does other work; they take about a millisecond
PeerState = Enum("PeerState", "NOTHING HEADERS BODY REPLY TLS_CLOSE")  # what the peer has to do next: see `connections.py`


class SlowPeerTimer:
    """Limits for slow peers, and the clock that measures them.

    Bodies and replies must move by `rate` bytes per second, averaged over `timeout` seconds; so a small body, or the last part of one, may
    take all of that time.
    """

    def __init__(self, timeout: float = 20.0, rate: float = 32768.0) -> None:
        self.timeout, self.rate, self.min_bytes = timeout, rate, rate * timeout
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
        self._check_some(loop, connections, iter(list(connections)))

    def _check_some(self, loop: Any, connections: set[Any], unchecked: Iterator[Any]) -> None:
        """Check as many connections as one iteration of the event loop may take, and then the others."""
        some = list(islice(unchecked, CHECKED_AT_ONCE))
        for connection in some:
            try:
                connection.check_progress(self.now)
            except Exception:  # the other connections are still checked
                log.exception("a connection could not be checked")
        if len(some) == CHECKED_AT_ONCE:
            loop.call_soon(self._check_some, loop, connections, unchecked)
            return
        self._running = bool(connections)
        if self._running:
            loop.call_later(self.interval, self._check, loop, connections)
