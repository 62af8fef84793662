"""One TCP connection, as uvicorn's protocol: cut off where the other side stalls, and refused in our words where it speaks no HTTP.

An application sees a request once its headers are whole and a reply's end once it is handed over; who sends a byte a second, or never
reads, is seen here alone. One timer for a whole process looks at every connection in turn, so a request pays nothing but the count of
its bytes. Whoever closes his sending half is taken for gone: a closed connection looks no different until it is written to.

The application finds the connection of a request in its scope (`connection_of`): whether it is lost, and a way to hand over a long reply
in pieces, so that no more than one of them waits where nothing can be seen of it.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar, cast

import httptools
import structlog
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import Problem
from service.web.errors import PROBLEM_JSON, problem

log = structlog.get_logger("attend")
EXTENSION = "attend.connection"  # under which a connection stands in the `extensions` of ASGI's scope
VERSIONS = ("1.1", "1.0")
FAREWELL = 5.0  # seconds that the other side of a TLS connection has for its own, at the end of the server
LONGEST_HEAD = 64 * 1024  # bytes of a request's line and headers
REQUEST_LINE = len(b"GET  HTTP/1.1\r\n")  # bytes of a request's line without its target
HEADER_LINE = len(b": \r\n")  # bytes of a header without its name and value
FRAMING = 8  # bytes of chunk headers and trailers for each byte of a body, beyond that many
PIECE = 256 * 1024  # bytes of a reply handed to the transport at a time
LINGER = 5.0  # seconds in which bytes behind a refused request are read and dropped
BUFFERED = 64 * 1024  # bytes in the transport above which it gets no more; TLS would take half a megabyte


class UnsupportedVersion(Exception):
    """A request line that ends in a version of HTTP which is not spoken here."""


class UnsupportedMessage(Exception):
    """A method or a transfer coding that is not implemented: what was expected, and what came."""


class HeadTooLarge(Exception):
    """A request line and headers of more than `LONGEST_HEAD` bytes."""


class Parser(httptools.HttpRequestParser):
    """httptools' parser, which ignores the header `Upgrade`, as RFC 9110 (section 7.8) asks of a server that supports no upgrade.

    httptools takes such a request to end with its head, and what follows for another protocol. So the connection passes over this head, and
    the parser reads it once more without `Upgrade`, and then the body.
    """

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: a request may follow `Connection: close`
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Raises HttpParserError for bytes that are no HTTP, and for an exception in a callback."""
        rest: memoryview | None = memoryview(data)
        while rest is not None:
            rest = self._feed_until_upgrade(rest)
            if rest is not None:
                head = self._connection.head_without_upgrade()
                self.__init__(self._connection)  # type: ignore[misc]  # behind `Connection: close` it would read no further head
                super().feed_data(head)

    def _feed_until_upgrade(self, data: memoryview) -> memoryview | None:
        """Return what follows a head that asks for an upgrade; None where there is no such head."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return data[upgrade.args[0] :]
        return None


class Watch:
    """The patience of one process. `refused` is told why a connection was cut off, by the name of a reason; the log too, if it is to be.

    `answered` is told the status of a refusal that the application does not know of. Bodies and replies must move by `rate` bytes per
    second, averaged over the patience; so the last of them, and small ones, have all of it.
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

    def __init__(self, *arguments: Any, **knobs: Any) -> None:
        super().__init__(*arguments, **knobs)
        self.parser = Parser(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.lost = False  # whether nobody is there any more
        self._extensions = {EXTENSION: self}
        self._heard = self._handed = 0  # bytes that came, and of long replies that went to the transport
        self._content = self._framing = 0  # bytes of the request's body; and of its head, or around the chunks of its body
        self._head = 0  # bytes of the request's line and headers
        self._headed = self._turned = False  # whether the headers are whole, or have just begun or ended
        self._state: tuple[str, Any] = ("", None)
        self._since, self._amount = self.watch.now, 0
        self._last_words: bytes | None = None  # the refusal after which the connection is closed, behind answers that are still due
        self._last_status = 0  # of that refusal
        if self.scheme == "https":
            self.transport.set_write_buffer_limits(BUFFERED)
        self.watch.start(self.loop, self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        self._heard += len(data)
        self._turned, content = False, self._content
        super().data_received(data)
        if not self._turned:  # all of it belongs to one head, or to one body
            self._framing += len(data) - (self._content - content)
            if self._framing > LONGEST_HEAD + FRAMING * self._content and self._last_words is None and not self.transport.is_closing():
                self._refuse_framing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = REQUEST_LINE
        cast(Any, self.scope)["extensions"] = self._extensions

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # a trailer, which would join headers that have been read
            self._count_head(len(name) + len(value) + HEADER_LINE)
            super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head += size
        if self._head > LONGEST_HEAD:
            raise HeadTooLarge

    def head_without_upgrade(self) -> bytes:
        """The request's line and headers as they came, without the header `Upgrade`."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise UnsupportedMessage("a method other than CONNECT", "CONNECT")
        if self.parser.should_upgrade():  # this head will come again, without `Upgrade`
            return
        self._content = self._framing = 0
        self._headed = self._turned = True
        if (version := self.parser.get_http_version()) not in VERSIONS:
            raise UnsupportedVersion(version)
        codings = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
        if codings and codings.lower() != b"chunked":
            raise UnsupportedMessage("the transfer coding chunked alone", codings.decode("latin-1"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._content = self._framing = 0
        self._headed, self._turned = False, True
        super().on_message_complete()
        if not self.pipeline:  # the body is whole, and only who reads on learns that its caller has gone
            self.flow.resume_reading()

    async def send(self, send: Send, message: Message) -> None:
        """Hands a part of a long reply to the transport, piece by piece, each when the one before is nearly gone."""
        whole, more = memoryview(message.get("body", b"")), message.get("more_body", False)
        if not whole:
            await send(message)
        for start in range(0, len(whole), PIECE):
            piece = whole[start : start + PIECE]
            self._handed += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": more or start + PIECE < len(whole)})
            if self.lost:
                break

    async def sent(self) -> None:
        """Returns when the transport holds nothing any more of what was handed to it."""
        if not self.lost and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(1, 0)  # it counts as full now, until it is empty
            await self.flow.drain()
            self.transport.set_write_buffer_limits(BUFFERED)

    def look(self, now: float) -> None:
        """Cuts the connection off where what is due from the other side has not moved for too long."""
        state, amount = self._due()
        if state != self._state or amount - self._amount >= self.watch.least or not state[0]:
            self._state, self._amount, self._since = state, amount, now
        elif now - self._since > self.watch.patience:
            self._cut_off(state[0])

    def _due(self) -> tuple[tuple[str, Any], int]:
        """What the other side owes, of which request, and how far it has come: headers, a body, taking the reply, or its farewell."""
        cycle = self.cycle
        if unsent := self.transport.get_write_buffer_size():
            return ("reply", cycle), self._handed - unsent
        if self.transport.is_closing():
            return ("farewell", cycle), 0  # of TLS
        if cycle is None or cycle.response_complete:
            idle = self.timeout_keep_alive_task is not None  # between two requests uvicorn itself looks at the time
            return ("" if idle else "headers", cycle), 0
        return ("body" if cycle.more_body and not self.flow.read_paused else "", cycle), self._heard

    def shutdown(self) -> None:
        """Ends an idle connection; one of TLS would otherwise wait half a minute for the other side's farewell."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(FAREWELL, self.transport.abort)

    def _cut_off(self, due: str) -> None:
        if due == "farewell" or (self._last_words is not None and due != "reply"):  # refused, and lingering
            self.transport.abort()
            return
        if due == "headers" and not self._heard:  # a connection opened ahead of its first request
            self.transport.close()
            return
        if due == "reply":
            self.watch.refused("slow_reply")
            self.transport.abort()
            return
        patience = f"{self.watch.patience:g} seconds (client_timeout)"
        wanted = f"the {due} of a request within {patience}"
        if due == "body":
            wanted = f"the body of a request at {self.watch.rate:g} bytes per second (min_client_rate), on average over {patience}"
        self._refuse(f"slow_{due}", 408, "request timeout", wanted, "less of it")

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to bytes that are no HTTP, in our words."""
        error = sys.exc_info()[1]
        beneath = error and error.__context__  # what a callback of the parser raised; all else it says itself
        if isinstance(beneath, UnsupportedVersion):
            self._refuse("unsupported_version", 505, "HTTP version not supported", "a request in HTTP/1.1 or HTTP/1.0", f"HTTP/{beneath}")
            return
        if isinstance(beneath, UnsupportedMessage):
            self._refuse("unsupported_message", 501, "not implemented", *beneath.args)
            return
        if isinstance(beneath, HeadTooLarge):
            self._refuse_head()
            return
        if isinstance(beneath, MemoryError):
            self._refuse("OutOfMemory", 507, "out of memory", "memory for the body of a request", "none")
            return
        why = "its target is no path" if beneath else str(error or msg)
        self._refuse("malformed_http", 400, "malformed request", "a request in HTTP/1.1", f"bytes that are none ({why})")

    def _refuse_framing(self) -> None:
        if self._headed:
            wanted = f"at most {LONGEST_HEAD} bytes of chunk headers and trailers, and {FRAMING} for each byte of a body"
            self._refuse("long_chunk_headers", 400, "chunk headers too large", wanted, "more")
        else:
            self._refuse_head()

    def _refuse_head(self) -> None:
        wanted = f"a request line and headers of at most {LONGEST_HEAD} bytes"
        self._refuse("long_headers", 431, "headers too large", wanted, "more")

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
            if not self.transport.can_write_eof():  # TLS
                self.transport.close()
                return
            # A lingering close: closing with unread bytes would reset the connection before the other side reads the refusal.
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER, self.transport.close)

    def _count(self) -> None:
        """With the request of which a part came, where the application has begun with it and will count it; else here."""
        scope: Any = {} if self.cycle is None or self.cycle.response_complete else self.cycle.scope
        if (record := scope.get("attend")) is None:
            self.watch.answered(self._last_status)
        else:
            record.status = self._last_status


def connection_of(scope: Scope) -> Connection | None:
    """The connection that a request came by; None where the server is another than ours."""
    connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
    return connection
