"""One TCP connection, as uvicorn's protocol: cut off where the other side stalls, and refused in our words where it speaks no HTTP.

An application sees a request once its headers are whole and a reply's end once it is handed over; who sends a byte a second, or never
reads, is seen here alone. One timer for a whole process looks at every connection in turn, so a request pays nothing but the count of
its bytes. Whoever closes his sending half is taken for gone: a closed connection looks no different until it is written to.
"""

import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable
from typing import Any, ClassVar

import structlog
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import Problem
from service.web.failures import PROBLEM_JSON, problem

log = structlog.get_logger("attend")
FAREWELL = 1.0  # seconds that the other side has for its own, at the end of the server
LAST = (
    86400.0  # seconds until the TLS layer ends by itself what is closed but not yet taken: the watch does so earlier, where nothing moves
)
BYTES_ACKED = 120  # where it stands in Linux's struct tcp_info
LONGEST_HEAD = 64 * 1024  # bytes of a request's line and headers, about: what has not ended by then is refused
LEAST = 16 * 1024  # bytes by which a body or a reply must move within the patience


class Watch:
    """The patience of one process. `refused` is told why a connection was cut off, by the name of a reason; the log too, if it is to be.

    `answered` is told the status of a refusal that the application does not know of.
    """

    def __init__(
        self,
        patience: float = 20.0,
        refused: Callable[[str], None] = lambda reason: None,
        log_requests: bool = False,
        answered: Callable[[int], None] = lambda status: None,
    ) -> None:
        self.patience, self.refused, self.log_requests, self.answered = patience, refused, log_requests, answered
        self.interval = min(1.0, patience / 4)
        self.now = 0.0  # advances while this process runs: what was held up here is no fault of those who are watched
        self._looked = 0.0
        self._running = False

    def start(self, loop: Any, connections: set[Any]) -> None:
        """Looks at them from now on, for as long as there are any."""
        if not self._running:
            self._running, self._looked = True, loop.time()
            loop.call_later(self.interval, self._look, loop, connections)

    def _look(self, loop: Any, connections: set[Any]) -> None:
        now = loop.time()
        self.now += min(now - self._looked, 2 * self.interval)
        self._looked = now
        for connection in list(connections):
            if isinstance(connection, Connection):
                try:
                    connection.look(self.now)
                except Exception:  # of one connection; the others are watched all the same
                    log.exception("a connection cannot be watched")
        self._running = bool(connections)
        if self._running:
            loop.call_later(self.interval, self._look, loop, connections)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, watched. The watch is the process's own, since uvicorn makes the connections."""

    watch: ClassVar[Watch] = Watch()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._heard = 0
        self._head = 0  # bytes of pieces in which the headers of a request neither began nor ended
        self._headed = self._turned = False  # whether the headers are whole, or have just begun or ended
        self._state: tuple[str, Any] = ("", None)
        self._since, self._amount = self.watch.now, 0
        self._last_words: bytes | None = None  # the refusal after which the connection is closed, behind answers that are still due
        self._last_status = 0  # of that refusal
        self.watch.start(self.loop, self.connections)

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        self._heard += len(data)
        self._turned = False
        super().data_received(data)
        if not self._headed and not self._turned:
            self._head += len(data)
            if self._head > LONGEST_HEAD and not self.transport.is_closing():
                self._refuse("long_headers", 431, "headers too large", f"headers of at most {LONGEST_HEAD} bytes", "more")

    def on_headers_complete(self) -> None:
        self._head, self._headed, self._turned = 0, True, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head, self._headed, self._turned = 0, False, True
        super().on_message_complete()

    def look(self, now: float) -> None:
        """Cuts the connection off where what is due from the other side has not moved for too long."""
        state, amount = self._due()
        if state != self._state or abs(amount - self._amount) >= LEAST or not state[0]:
            self._state, self._amount, self._since = state, amount, now
        elif now - self._since > self.watch.patience:
            self._cut_off(state[0])

    def _due(self) -> tuple[tuple[str, Any], int]:
        """What the other side owes, of which request, and how far it has come: headers, a body, taking the reply, or its farewell."""
        cycle = self.cycle
        if unsent := self._unsent():
            return ("reply", cycle), unsent
        if self.transport.is_closing():
            return ("farewell", cycle), 0  # of TLS
        if cycle is None or cycle.response_complete:
            idle = self.timeout_keep_alive_task is not None  # between two requests uvicorn itself looks at the time
            return ("" if idle else "headers", cycle), 0
        return ("body" if cycle.more_body and not self.flow.read_paused else "", cycle), self._heard

    def _unsent(self) -> int:
        """Bytes that the other side is still to take; 0 for none. The TLS layer does not tell: there, a count of those that it took."""
        if self.scheme != "https" or sys.platform != "linux":
            return self.transport.get_write_buffer_size()
        if (own := self.transport.get_extra_info("socket")) is None:  # lost a moment ago, which uvicorn is told in the loop's next turn
            return 0
        try:
            with socket.socket(fileno=os.dup(own.fileno())) as twin:
                if not any(fcntl.ioctl(twin, termios.TIOCOUTQ, bytes(4))):
                    return 0
                info = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except OSError:
            return 0
        return max(1, int.from_bytes(info[BYTES_ACKED : BYTES_ACKED + 8], sys.byteorder))

    def shutdown(self) -> None:
        """Ends an idle connection; one of TLS would otherwise wait half a minute for the other side's farewell."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(FAREWELL, self._part)

    def _part(self) -> None:
        """Ends a closed connection of TLS once the other side has taken the whole reply."""
        if self._unsent():
            self.loop.call_later(FAREWELL, self._part)
        else:
            self.transport.abort()

    def _cut_off(self, due: str) -> None:
        if due == "farewell":
            self.transport.abort()
            return
        if due == "headers" and not self._heard:  # a connection opened ahead of its first request
            self.transport.close()
            return
        if due == "reply":
            self.watch.refused("slow_reply")
            self.transport.abort()
            return
        wanted = f"the {due} of a request within {self.watch.patience:g} seconds (client_timeout)"
        self._refuse(f"slow_{due}", 408, "request timeout", wanted, "a part of it")

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to bytes that are no HTTP, in our words."""
        error = sys.exc_info()[1]
        beneath = error and error.__context__  # what parsing the target raised; all else the parser says itself
        why = "its target is no path" if beneath else str(error or msg)
        self._refuse("malformed_http", 400, "malformed request", "a request in HTTP/1.1", f"bytes that are none ({why})")

    def _refuse(self, reason: str, status: int, title: str, expected: str, got: str) -> None:
        """A problem document and the end; whole requests that came before are answered first."""
        self.watch.refused(reason)
        request_id, problems = os.urandom(8).hex(), (Problem("", expected, got),)
        detail = f"expected {expected}, got {got}"
        if self.watch.log_requests:
            client = self.client[0] if self.client else ""
            log.info("request", request_id=request_id, method="", path="", client=client, status=status, reason=reason, detail=detail)
        body = problem(status, title, detail, request_id, problems)
        headers = f"content-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
        self._last_status = status
        self._last_words = STATUS_LINE[status] + headers.encode() + b"connection: close\r\n\r\n" + body
        if self.pipeline and self.cycle.more_body:  # the request of which a part came, behind others
            self.pipeline.popleft()
        elif self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            self._close()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and self._last_words is not None:
            self._close()

    def _close(self) -> None:
        """With the last words, unless they would stand in the middle of a reply."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        if self._last_words is not None and not self.transport.is_closing():
            self._count()
            self.transport.write(self._last_words)
            self.transport.close()

    def _count(self) -> None:
        """With the request of which a part came, where the application has begun with it and will count it; else here."""
        scope: Any = {} if self.cycle is None or self.cycle.response_complete else self.cycle.scope
        if (record := scope.get("attend")) is None:
            self.watch.answered(self._last_status)
        else:
            record.status = self._last_status


def patient_loop() -> Any:
    """uvicorn's own loop, for TLS; see `patient`."""
    return patient(auto_loop_factory()())


def patient(loop: Any) -> Any:
    """The loop, whose servers speak TLS and do not end a closed connection by themselves: 30 seconds later they would, in mid-reply.

    For its handshake a caller has the watch's patience, and not a minute. uvicorn lets no such settings through.
    """
    create = loop.create_server

    def create_server(*args: Any, **knobs: Any) -> Any:
        return create(*args, ssl_handshake_timeout=Connection.watch.patience, ssl_shutdown_timeout=LAST, **knobs)

    loop.create_server = create_server
    return loop
