"""`Connection`, the class of uvicorn's connections: disconnects slow peers, and sends long replies in pieces.

An ASGI application cannot see whether the peer reads the reply, so slow peers are visible only here. One timer per process checks the state
of every connection:

| state | the peer has to | if it does not do so in time |
|---|---|---|
| NOTHING | wait: the server acts, or no request has begun | uvicorn closes an idle connection |
| HEADERS | send the headers of a request | 408; before the first request, the connection is closed |
| BODY | send the body of a request | 408 |
| REPLY | read a reply | aborted |
| TLS_CLOSE | answer the TLS close | aborted |

A peer that closes its sending half counts as disconnected: until the server writes, a full close looks the same.

`connection_of(scope)` gives the application the connection of a request: `lost` says whether the peer has disconnected; `send` passes a
long reply to the transport in pieces. Only one piece at a time waits in the transport, because progress inside it is not visible.
"""

from collections.abc import Generator
from enum import Enum
from types import coroutine
from typing import Any, ClassVar

import structlog
from starlette.types import Message, Scope, Send

from service.web.http_protocol import HttpProtocol, Refused

log = structlog.get_logger("attend")
STATE_KEY = "attend.connection"  # the key of a connection in `state` of an ASGI scope
SEND_BYTES = 256 * 1024  # bytes of a reply passed to the transport at a time
WRITE_BUFFER_BYTES = 64 * 1024  # high-water mark of the transport's write buffer, in bytes; asyncio's default for TLS is 512 KiB
TLS_CLOSE_SECONDS = 5.0  # when the server stops, the peer must answer the TLS close within this time


PeerState = Enum("PeerState", "NOTHING HEADERS BODY REPLY TLS_CLOSE")  # what the peer has to do next: see the table above


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
        for connection in list(connections):
            try:
                connection.check_progress(self.now)
            except Exception:  # the other connections are still checked
                log.exception("a connection could not be checked")
        self._running = bool(connections)
        if self._running:
            loop.call_later(self.interval, self._check, loop, connections)


class Connection(HttpProtocol):
    """One connection. uvicorn creates the instances; all share `timer`, which is set before the server starts."""

    timer: ClassVar[SlowPeerTimer] = SlowPeerTimer()
    private_socket: ClassVar[str] = ""  # the Unix socket on which other workers forward requests to this one

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, STATE_KEY: self}  # uvicorn copies this dictionary into each scope
        self.lost = False  # whether the peer has disconnected
        self.disconnected = self.loop.create_future()  # done when the peer has disconnected
        self.from_worker = bool(self.private_socket) and transport.get_extra_info("sockname") == self.private_socket
        self._received = self._sent = 0  # bytes from the peer; bytes of long replies passed to the transport
        self._state: tuple[PeerState, Any] = (PeerState.NOTHING, None)
        self._since, self._progress = self.timer.now, 0
        if self.scheme == "https":
            self.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self.timer.start(self.loop, self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.disconnected.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is None:
            self._received += len(data)
        super().data_received(data)

    def shutdown(self) -> None:
        """Closes an idle connection; aborts TLS after TLS_CLOSE_SECONDS, since asyncio would wait 30 seconds for the peer."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(TLS_CLOSE_SECONDS, self.transport.abort)

    async def send(self, send: Send, message: Message) -> None:
        """Sends a body message in pieces of at most SEND_BYTES bytes; each waits until the previous piece is nearly sent.

        The event loop has a turn after each piece: a peer that reads fast never makes the transport wait.
        """
        whole, more = memoryview(message.get("body", b"")), message.get("more_body", False)
        if not whole:
            await send(message)
        for start in range(0, len(whole), SEND_BYTES):
            piece = whole[start : start + SEND_BYTES]
            self._sent += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": more or start + SEND_BYTES < len(whole)})
            if self.lost:
                break
            await _next_turn()

    async def wait_until_sent(self) -> None:
        """Waits until the transport's write buffer is empty."""
        if not self.lost and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(1, 0)  # the buffer counts as full until it is empty
            await self.flow.drain()
            self.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    # Slow peers

    def check_progress(self, now: float) -> None:
        """Disconnects a peer that has made too little progress for longer than `timer.timeout` seconds."""
        state, progress = self._peer_state()
        if state != self._state or progress - self._progress >= self.timer.min_bytes or state[0] is PeerState.NOTHING:
            self._state, self._progress, self._since = state, progress, now
        elif now - self._since > self.timer.timeout:
            self._cut_off(state[0])

    def _peer_state(self) -> tuple[tuple[PeerState, Any], int]:
        """((what the peer has to do next, for which request), bytes transferred)."""
        cycle = self.cycle
        if unsent := self.transport.get_write_buffer_size():
            return (PeerState.REPLY, cycle), self._sent - unsent
        if self.transport.is_closing():
            return (PeerState.TLS_CLOSE, cycle), 0
        if cycle is None or cycle.response_complete:
            idle = self.timeout_keep_alive_task is not None
            return (PeerState.NOTHING if idle else PeerState.HEADERS, cycle), 0
        return (PeerState.BODY if cycle.more_body and not self.flow.read_paused else PeerState.NOTHING, cycle), self._received

    def _cut_off(self, state: PeerState) -> None:
        """Disconnects the peer as the table at the head of this file says."""
        timer, timeout = self.timer, f"{self.timer.timeout:g} seconds (client_timeout)"
        expected = f"the headers of a request within {timeout}"
        if state is PeerState.REPLY:
            self.count_reason("slow_reply")
            self.transport.abort()
        elif state is PeerState.TLS_CLOSE or self._refusal is not None:  # refused, and lingering
            self.transport.abort()
        elif state is PeerState.HEADERS and not self._received:  # opened in advance, without a request yet
            self.transport.close()
        else:
            if state is PeerState.BODY:
                expected = f"the body of a request at {timer.rate:g} bytes per second (min_client_rate), on average over {timeout}"
            self.refuse(Refused(f"slow_{state.name.lower()}", 408, "request timeout", expected, "fewer bytes"))


@coroutine
def _next_turn() -> Generator[None]:
    """Yields to the event loop once, as `asyncio.sleep(0)` does. `web` may not import asyncio (tests/test_floors.py)."""
    yield


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None under another ASGI server."""
    connection: Connection | None = scope.get("state", {}).get(STATE_KEY)
    return connection
