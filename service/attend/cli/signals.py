"""What signals do to a server: `docs/operations.md` has the table for operators.

SIGTERM starts a drain: /health/ready returns 503, so that load balancers stop sending calls, but calls are still accepted. After the drain
the port closes, accepted calls are answered, and the process exits. SIGINT, or a second SIGTERM, skips the drain. SIGHUP acts as SIGTERM
on a server of one process; a supervisor replaces its workers one by one.
"""

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog

from attend.settings import Settings

if TYPE_CHECKING:
    from attend.serving.service import Service  # imports torch

log = structlog.get_logger("attend")
SKIP_DRAIN = signal.SIGUSR1  # sent by a supervisor that got SIGINT: workers may have had it too, and a second one would end calls
EXIT_SECONDS = 5.0  # for a worker to exit after the time in which its calls should have been answered


def exit_timeout_of(settings: Settings) -> float:
    """Seconds after SIGTERM in which a worker should have exited."""
    return settings.drain_seconds + settings.shutdown_seconds + EXIT_SECONDS


class SignalHandlers:
    """Handlers of signals that call uvicorn's handlers after the drain. Must be made on the event loop of the server."""

    def __init__(self, service: "Service", drain_seconds: float, is_worker: bool) -> None:
        self.service, self.drain_seconds, self.is_worker = service, drain_seconds, is_worker
        self.loop = asyncio.get_running_loop()
        self.uvicorn_handlers: Any = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def install(self) -> None:
        """Installs the handlers. SIGHUP stays ignored if it was ignored before (nohup)."""
        signal.signal(signal.SIGTERM, self.drain)
        signal.signal(signal.SIGINT, self.stop)
        if self.is_worker:
            signal.signal(SKIP_DRAIN, lambda *_: self._stop_after_drain())
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.retire if self.is_worker else self.drain_once)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Refuse new calls, and let uvicorn close the port and exit."""
        self.loop.call_soon_threadsafe(self.service.refuse_requests)
        self.uvicorn_handlers[number](number, frame)

    def drain(self, number: int, frame: FrameType | None) -> None:
        """Stop after the drain; at once if it has begun already."""
        if self.service.draining or not self.drain_seconds:
            self._stop_after_drain()
        else:
            self.service.draining = True
            self._after_drain("draining", self._stop_after_drain)

    def drain_once(self, number: int, frame: FrameType | None) -> None:
        """As `drain`, but only the first time: a terminal that closes may send SIGHUP twice."""
        if not self.service.draining:
            self.drain(number, frame)

    def retire(self, number: int, frame: FrameType | None) -> None:
        """Close connections as in a drain, but stay ready: the load balancer must keep sending calls to the other workers."""
        if not self.service.draining and not self.service.retiring:
            self.service.retiring = True
            self._after_drain("retiring", self._stop_unless_draining)

    def _after_drain(self, event: str, action: Callable[[], object]) -> None:
        """Log the event, and act when the drain delay has passed."""
        self.loop.call_soon_threadsafe(partial(log.info, event, seconds=self.drain_seconds))
        self.loop.call_soon_threadsafe(self.loop.call_later, self.drain_seconds, action)

    def _stop_unless_draining(self) -> None:
        if not self.service.draining:
            self._stop_after_drain()

    def _stop_after_drain(self) -> None:
        self.loop.call_soon_threadsafe(partial(log.info, "stopping"))
        self.stop(signal.SIGTERM, None)
