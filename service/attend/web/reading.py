"""What a connection has received and not parsed: one read of a socket may return thousands of requests, headers or chunks.

A connection parses a small piece at a time, and none while a request waits for an earlier one of the same connection. After some callbacks
of the parser it waits for its turn: in each iteration of the event loop, one connection parses on, and the other tasks run between them.
While bytes are not parsed, no more are read.
"""

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

PIECE_BYTES = 2048  # bytes that the parser gets at a time, except of a body of known length: at most a hundred requests
CALLBACKS_OF_A_TURN = 256  # requests, headers and parts of bodies, about a millisecond; less than a read of 256 KiB in large chunks has


class ReadingControl(FlowControl):
    """Pauses reading if uvicorn does, and while `held`: as long as received bytes are not parsed."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.held = False

    def hold(self) -> None:
        self.held = True
        if not self.read_paused:
            self._transport.pause_reading()

    def release(self) -> None:
        self.held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        if self.held:
            self.read_paused = True
        else:
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()


class Turns:
    """The connections of a process that have bytes to parse; one of them in each iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}  # in their order

    def wait(self, loop: Any, parse: Callable[[], None]) -> None:
        """Calls `parse` when it is its turn; once, however often it is asked for meanwhile."""
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting[parse] = None

    def _next(self, loop: Any) -> None:
        parse = next(iter(self._waiting))
        del self._waiting[parse]
        if self._waiting:
            loop.call_soon(self._next, loop)
        parse()
