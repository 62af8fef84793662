"""`Connection`, the class of uvicorn's connections: answers refused HTTP, disconnects slow peers, and sends long replies in pieces.

An ASGI application sees a request only when its headers are complete, so what comes before is checked here, within the bounds of
`http_parser.py`; `reading.py` bounds what is parsed at a time. A refusal is a problem document; it is sent after the replies to earlier
requests of the connection, which is then closed.

Nor does an application see whether the peer reads the reply. One timer per process checks the state of every connection:

| state | the peer has to | if it does not do so in time |
|---|---|---|
| NOTHING | wait: the server acts, or no request has begun | uvicorn closes an idle connection |
| HEADERS | send the headers of a request, or the rest of one that is answered | 408; for the rest, or before the first request, closed |
| BODY | send the body of a request, or the rest of one that is refused | 408; for the rest, closed |
| REPLY | read a reply | aborted |
| TLS_CLOSE | answer the TLS close | aborted |

A peer that closes its sending half counts as disconnected: until the server writes, a full close looks the same.

The application finds the connection of a request in its scope: `is_lost` says whether the peer has disconnected; `send` passes a long reply
to the transport in pieces. Only one piece at a time waits in the transport, because progress inside it is not visible.
"""

import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import chain
from types import coroutine
from typing import Any

import httptools
import structlog
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from attend.errors import Problem
from attend.serving.metrics import Metrics
from attend.web.errors import problem_document
from attend.web.http_parser import (
    CHUNK_HEADERS_TOO_LARGE,
    HEAD_TOO_LARGE,
    HEADER_LINE_BYTES,
    HTTP_VERSIONS,
    MALFORMED,
    MAX_FRAMING_RATIO,
    MAX_HEAD_BYTES,
    MAX_LENGTH_DIGITS,
    METHODS,
    REQUEST_LINE_BYTES,
    UNKNOWN_METHOD,
    Parser,
    Refused,
)
from attend.web.reading import CALLBACKS_OF_A_TURN, PIECE_BYTES, ReadingControl, Turns
from attend.web.slow_peers import PeerState, SlowPeerTimer
from attend.wire.negotiation import PROBLEM_JSON

log = structlog.get_logger("attend")
LINGER_SECONDS = 5.0  # seconds for which bytes after a refused request are read and discarded
CONNECTION_KEY = "attend.connection"  # the key of a connection in `state` of an ASGI scope
OPTIONS_KEY = "attend.connection_options"  # the key of ConnectionOptions in the state of the application's lifespan
STATUS_KEY = "attend.status"  # the key, in an ASGI scope, of the status of a refusal that the connection has sent
SEND_BYTES = 256 * 1024  # bytes of a reply passed to the transport at a time
TURN_BYTES = 4 * SEND_BYTES  # bytes of a reply sent before other tasks run: 0.2 ms of copying, where a turn itself takes 0.1 ms
WRITE_BUFFER_BYTES = 64 * 1024  # high-water mark of the transport's write buffer, in bytes; asyncio's default for TLS is 512 KiB
TLS_CLOSE_SECONDS = 5.0  # when the server stops, the peer must answer the TLS close within this time


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What the connections of an application share."""

    timer: SlowPeerTimer = field(default_factory=SlowPeerTimer)
    metrics: Metrics | None = None  # count refusals and disconnected peers
    log_refusal: Callable[[str, str, int, str, str], None] | None = None  # takes request id, client, status, reason and detail
    turns: Turns = field(default_factory=Turns)  # in which they parse what they have received


DEFAULT_OPTIONS = ConnectionOptions()
NOTHING = memoryview(b"")


class Connection(HttpToolsProtocol):
    """One connection. uvicorn makes the instances; the application's lifespan state has their options."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = Parser(self)
        options: ConnectionOptions = app_state.get(OPTIONS_KEY, DEFAULT_OPTIONS)
        self.timer, self.metrics, self.log_refusal = options.timer, options.metrics, options.log_refusal
        self._turns = options.turns

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow: ReadingControl = ReadingControl(transport)
        self.app_state = {**self.app_state, CONNECTION_KEY: self}  # uvicorn copies this dictionary into each scope
        self.lost = False  # whether the peer has disconnected
        self._body = self._framing = 0  # bytes of the current body; bytes of the current head, or of chunk headers
        self._length = 0  # of the current body, in bytes, if the head says it
        self._unparsed = NOTHING  # bytes that were received
        self._callbacks = 0  # of the parser in this turn
        self._in_body = False  # whether the headers of the current request are complete
        self._boundary = False  # whether the last bytes received contained the end of a head or of a request
        self._refusal: Refused | None = None  # once set, the connection closes, after the replies to earlier requests
        self._refusal_reply = b""  # that waits for the replies to earlier requests
        self._dropped = False  # whether the application does not get the refused request
        self._received = self._sent = 0  # bytes from the peer; bytes of long replies passed to the transport
        self._replies = 0  # that are complete: each is progress, since the bytes of short ones are not counted
        self._state: tuple[PeerState, Any] = (PeerState.NOTHING, None)
        self._since, self._progress = self.timer.now, 0
        if self.scheme == "https":
            self.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self.timer.start(self.loop, self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self._unparsed = True, NOTHING
        super().connection_lost(exc)

    def is_lost(self) -> bool:
        """Whether the peer has disconnected."""
        return self.lost

    def shutdown(self) -> None:
        """Closes an idle connection; aborts TLS after TLS_CLOSE_SECONDS, since asyncio would wait 30 seconds for the peer."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(TLS_CLOSE_SECONDS, self.transport.abort)

    # Requests

    def data_received(self, data: bytes) -> None:
        """Parses what was received until a request waits for an earlier one, or others have their turn."""
        if self._refusal is not None:
            return
        self._received += len(data)
        if not self.flow.held:
            self._unparsed = memoryview(data)
        elif data:  # TLS may have decrypted more than one read
            self._unparsed = memoryview(b"".join((self._unparsed, data)))
            return
        self._callbacks = 0
        while self._unparsed and not self.pipeline and self._callbacks < CALLBACKS_OF_A_TURN:
            size = max(PIECE_BYTES, self._length - self._body)
            piece, body, self._boundary = self._unparsed[:size], self._body, False
            super().data_received(piece)  # type: ignore[arg-type]  # the parser reads any buffer
            self._unparsed = self._unparsed[size:]
            self._callbacks += len(self.headers or ())
            if not self._boundary:  # `piece` belongs entirely to one head or to one body
                self._framing += len(piece) - (self._body - body)
                too_large = self._framing > MAX_HEAD_BYTES + MAX_FRAMING_RATIO * self._body
                if too_large and self._refusal is None and not self.transport.is_closing():
                    self.refuse(Refused(*(CHUNK_HEADERS_TOO_LARGE if self._in_body else HEAD_TOO_LARGE)))
            if self._refusal is not None or self.transport.is_closing():
                self._unparsed = NOTHING
        if self._unparsed:
            self.flow.hold()
            if not self.pipeline:
                self._turns.wait(self.loop, self._parse)
        elif self.flow.held and not self.transport.is_closing():
            self.flow.release()

    def _parse(self) -> None:
        """Parses what was received before."""
        self.data_received(b"")

    def on_message_begin(self) -> None:
        self._callbacks += 1
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        parser, headers = self.parser, self.headers
        if (method := parser.get_method()) == b"CONNECT":
            raise Refused("unsupported_message", 501, "not implemented", "a method other than CONNECT", method.decode())
        if parser.should_upgrade():  # the parser reads this head again, without `Upgrade`
            return
        self._body = self._framing = 0
        self._in_body = self._boundary = True
        fields = dict(headers)
        header_bytes = HEADER_LINE_BYTES * len(headers) + sum(map(len, chain.from_iterable(headers)))
        if REQUEST_LINE_BYTES + len(self.url) + header_bytes > MAX_HEAD_BYTES:
            raise Refused(*HEAD_TOO_LARGE)
        if not (version := parser.get_http_version()).startswith("1."):
            expected = "a request in HTTP/1.1 or HTTP/1.0"
            raise Refused("unsupported_version", 505, "HTTP version not supported", expected, f"HTTP/{version}")
        if (length := fields.get(b"content-length")) is not None:
            if len(length) > MAX_LENGTH_DIGITS:  # the parser allows any number of zeros, `int` does not
                raise Refused(
                    *MALFORMED, f"a request in HTTP/1.1 with a Content-Length of at most {MAX_LENGTH_DIGITS} digits", str(len(length))
                )
            self._length = int(length)
        if b"transfer-encoding" in fields:
            codings = b", ".join([value for name, value in headers if name == b"transfer-encoding"])
            if codings and codings.lower() != b"chunked":
                expected = "the transfer coding chunked alone"
                raise Refused("unsupported_message", 501, "not implemented", expected, codings.decode("latin-1"))
        super().on_headers_complete()
        if version not in HTTP_VERSIONS:  # a later minor version is read as the latest known one (RFC 9110, section 2.5)
            self.scope["http_version"] = HTTP_VERSIONS[0]
        self.headers = []  # uvicorn appends trailers to this list; the scope keeps the request's headers

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._callbacks += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._body = self._framing = self._length = 0
        self._in_body, self._boundary = False, True
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # it was answered before its body was complete: idle again
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if self.flow.read_paused and not self.pipeline:  # uvicorn may have paused reading; a disconnect is noticed only while reading
            self.flow.resume_reading()

    def head_without_upgrade(self) -> bytes:
        """The request line and headers as received, without the header `Upgrade`."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # Refusals

    def send_400_response(self, msg: str) -> None:
        """Overrides uvicorn's reply to a parser error. The parser's error has the exception of a callback as its `__context__`."""
        error = sys.exc_info()[1]
        cause = error and error.__context__
        if isinstance(cause, MemoryError):
            cause = Refused("OutOfMemory", 507, "out of memory", "memory for the body of a request", "none")
        elif isinstance(error, httptools.HttpParserInvalidMethodError) and (line := UNKNOWN_METHOD.search(self._unparsed)):
            cause = Refused("unsupported_message", 501, "not implemented", f"a method among {', '.join(METHODS)}", line[1].decode())
        if not isinstance(cause, Refused):
            why = "its target is not a path" if cause else str(error or msg)
            cause = Refused(*MALFORMED, "a request in HTTP/1.1", f"something else ({why})")
        self.refuse(cause)

    def refuse(self, refusal: Refused) -> None:
        """Replies with a problem document and closes the connection, after the replies to earlier complete requests."""
        self._count_failure(refusal.reason)
        request_id, problems = os.urandom(8).hex(), (Problem("", refusal.expected, refusal.got),)
        detail, status = f"expected {refusal.expected}, got {refusal.got}", refusal.status
        if self.log_refusal is not None:
            self.log_refusal(request_id, self.client[0] if self.client else "", status, refusal.reason, detail)
        body = problem_document(status, refusal.title, detail, request_id, problems)
        headers = f"content-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
        self._refusal = refusal
        self._refusal_reply = STATUS_LINE[status] + headers.encode() + b"connection: close\r\n\r\n" + body
        if self.pipeline and self.cycle.more_body:  # the incomplete request waits behind others
            self.pipeline.popleft()
            self._dropped = True
        elif self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            self._close()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        self._replies += 1
        super().on_response_complete()
        if last and self._refusal is not None:
            self._close()
        elif self.flow.held and not self.pipeline:
            self._turns.wait(self.loop, self._parse)

    def _close(self) -> None:
        """Sends the refusal and closes; aborts if a reply is half sent, since the refusal would corrupt it."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        elif self._refusal is not None and not self.transport.is_closing():
            self._count_refusal(self._refusal.status)
            self.transport.write(self._refusal_reply)
            self._refusal_reply = b""
            if self.cycle is not None and not self.cycle.response_complete:  # the application must not reply, too, when its deadline passes
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            if not self.transport.can_write_eof():  # TLS
                self.transport.close()
                return
            # Lingers: closing with unread bytes would reset the connection before the peer reads the refusal.
            self.transport.write_eof()
            self.flow.resume_reading()
            if self.flow.held:
                self.flow.release()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _count_failure(self, reason: str) -> None:
        if self.metrics is not None:
            self.metrics.count_failure(reason)

    def _count_refusal(self, status: int) -> None:
        """Counts the refusal, unless the application has the request, or will have it, and counts it with this status."""
        if self.cycle is not None and not self.cycle.response_complete and not self._dropped:
            scope: Any = self.cycle.scope
            scope[STATUS_KEY] = status
        elif self.metrics is not None:
            self.metrics.count_request("other", status)

    # Long replies

    async def send(self, send: Send, message: Message) -> None:
        """Sends a body message in pieces of at most SEND_BYTES bytes; each waits until the previous piece is nearly sent.

        The event loop has a turn after every TURN_BYTES: a peer that reads fast never makes the transport wait.
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
            if (start + SEND_BYTES) % TURN_BYTES == 0:
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
            return (PeerState.REPLY, self._replies), self._sent - unsent
        if self.transport.is_closing():
            return (PeerState.TLS_CLOSE, cycle), 0
        if self._refusal_reply:
            return (PeerState.NOTHING, cycle), 0
        if cycle is None or cycle.response_complete:
            idle = self.timeout_keep_alive_task is not None
            return (PeerState.NOTHING if idle else PeerState.HEADERS, cycle), 0
        is_due = cycle.more_body and not (self.flow.read_paused or self.flow.held)
        return (PeerState.BODY if is_due else PeerState.NOTHING, cycle), self._received

    def _cut_off(self, state: PeerState) -> None:
        """Disconnects the peer as the table at the head of this file says."""
        timer, timeout = self.timer, f"{self.timer.timeout:g} seconds (client_timeout)"
        expected = f"the headers of a request within {timeout}"
        is_refused = state is PeerState.BODY and self.cycle.response_started  # by a reply that was sent before the rest of the body
        if state is PeerState.REPLY:
            self._count_failure("slow_reply")
            self.transport.abort()
        elif state is PeerState.TLS_CLOSE or self._refusal is not None:  # refused, and lingering
            self.transport.abort()
        elif is_refused or (state is PeerState.HEADERS and (self._in_body or not self._received)):  # or answered, or there was none yet
            self.transport.close()
        else:
            if state is PeerState.BODY:
                expected = f"the body of a request at {timer.rate:g} bytes per second (min_client_rate), on average over {timeout}"
            self.refuse(Refused(f"slow_{state.name.lower()}", 408, "request timeout", expected, "fewer bytes"))


@coroutine
def _next_turn() -> Generator[None]:
    """Yields to the event loop once, as `asyncio.sleep(0)` does. `web` may not import asyncio (tests/test_tiers.py)."""
    yield
