"""uvicorn's protocol class for HTTP/1.1, with limits on heads and chunks. It answers invalid HTTP with a problem document.

An ASGI application sees a request only when its headers are complete, so what comes before is checked here. A refusal is sent after the
replies to earlier requests of the connection, which is then closed.
"""

import os
import sys
from itertools import chain
from typing import Any, ClassVar

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import Problem
from service.serving.metrics import Metrics
from service.web.errors import problem_document
from service.wire.negotiation import PROBLEM_JSON

log = structlog.get_logger("attend")
HTTP_VERSIONS = ("1.1", "1.0")
MAX_HEAD_BYTES = 64 * 1024  # bytes of a request line and headers, without the empty line after them
REQUEST_LINE_BYTES = len(b"GET  HTTP/1.1\r\n")  # bytes of a request line without its target
HEADER_LINE_BYTES = len(b": \r\n")  # bytes of a header without its name and value
MAX_FRAMING_RATIO = 8  # bytes of chunk headers and trailers allowed per byte of body, in addition to MAX_HEAD_BYTES
LINGER_SECONDS = 5.0  # seconds for which bytes after a refused request are read and discarded


class Refused(Exception):
    """A request refused before the application sees it: `reason` labels the metric; the other fields make the reply."""

    def __init__(self, reason: str, status: int, title: str, expected: str, got: str = "more") -> None:
        super().__init__(reason)
        self.reason, self.status, self.title, self.expected, self.got = reason, status, title, expected, got


HEAD_TOO_LARGE = "long_headers", 431, "headers too large", f"a request line and headers of at most {MAX_HEAD_BYTES} bytes"
CHUNK_HEADERS_TOO_LARGE = (
    "long_chunk_headers",
    400,
    "chunk headers too large",
    f"at most {MAX_HEAD_BYTES} bytes of chunk headers and trailers, and {MAX_FRAMING_RATIO} for each byte of a body",
)


class Parser(httptools.HttpRequestParser):
    """Ignores the header `Upgrade`, as RFC 9110 (section 7.8) asks of a server that supports no upgrade.

    httptools ends such a request after its head, and treats the following bytes as another protocol. So the protocol class ignores this
    head; the parser reads it again without `Upgrade`, and then reads the body.
    """

    def __init__(self, protocol: "HttpProtocol") -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: a request may follow `Connection: close`
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        """Parses `data`. Raises HttpParserError for invalid HTTP, and for an exception in a callback, which is its `__context__`."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
            else:
                return
            head = self._protocol.head_without_upgrade()
            self.__init__(self._protocol)  # type: ignore[misc]  # resets the parser: after `Connection: close` it reads no further head
            super().feed_data(head)


class HttpProtocol(HttpToolsProtocol):
    """The HTTP of one connection. `metrics`, which count refusals, and `log_requests` are set before the server starts."""

    metrics: ClassVar[Metrics | None] = None
    log_requests: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.parser = Parser(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._body = self._framing = 0  # bytes of the current body; bytes of the current head, or of chunk headers
        self._in_body = False  # whether the headers of the current request are complete
        self._boundary = False  # whether the last bytes received contained the end of a head or of a request
        self._refusal: Refused | None = None  # once set, the connection closes, after the replies to earlier requests
        self._refusal_reply = b""

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        body, self._boundary = self._body, False
        super().data_received(data)
        if not self._boundary:  # `data` belongs entirely to one head or to one body
            self._framing += len(data) - (self._body - body)
            too_large = self._framing > MAX_HEAD_BYTES + MAX_FRAMING_RATIO * self._body
            if too_large and self._refusal is None and not self.transport.is_closing():
                self.refuse(Refused(*(CHUNK_HEADERS_TOO_LARGE if self._in_body else HEAD_TOO_LARGE)))

    def on_headers_complete(self) -> None:
        parser, headers = self.parser, self.headers
        if (method := parser.get_method()) == b"CONNECT":
            raise Refused("unsupported_message", 501, "not implemented", "a method other than CONNECT", method.decode())
        if parser.should_upgrade():  # the parser reads this head again, without `Upgrade`
            return
        self._body = self._framing = 0
        self._in_body = self._boundary = True
        header_bytes = HEADER_LINE_BYTES * len(headers) + sum(map(len, chain.from_iterable(headers)))
        if REQUEST_LINE_BYTES + len(self.url) + header_bytes > MAX_HEAD_BYTES:
            raise Refused(*HEAD_TOO_LARGE)
        if (version := parser.get_http_version()) not in HTTP_VERSIONS:
            expected = "a request in HTTP/1.1 or HTTP/1.0"
            raise Refused("unsupported_version", 505, "HTTP version not supported", expected, f"HTTP/{version}")
        codings = b", ".join([value for name, value in headers if name == b"transfer-encoding"])
        if codings and codings.lower() != b"chunked":
            expected = "the transfer coding chunked alone"
            raise Refused("unsupported_message", 501, "not implemented", expected, codings.decode("latin-1"))
        super().on_headers_complete()
        self.headers = []  # uvicorn appends trailers to this list; the scope keeps the request's headers

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._body = self._framing = 0
        self._in_body, self._boundary = False, True
        super().on_message_complete()
        if not self.pipeline:  # uvicorn may have paused reading; a disconnect is noticed only while reading
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
        if not isinstance(cause, Refused):
            why = "its target is not a path" if cause else str(error or msg)
            cause = Refused("malformed_http", 400, "malformed request", "a request in HTTP/1.1", f"something else ({why})")
        self.refuse(cause)

    def refuse(self, refusal: Refused) -> None:
        """Replies with a problem document and closes the connection, after the replies to earlier complete requests."""
        self.count_reason(refusal.reason)
        request_id, problems = os.urandom(8).hex(), (Problem("", refusal.expected, refusal.got),)
        detail, status = f"expected {refusal.expected}, got {refusal.got}", refusal.status
        if self.log_requests:
            client = self.client[0] if self.client else ""
            log.info(
                "request", request_id=request_id, method="", path="", client=client, status=status, reason=refusal.reason, detail=detail
            )
        body = problem_document(status, refusal.title, detail, request_id, problems)
        headers = f"content-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
        self._refusal = refusal
        self._refusal_reply = STATUS_LINE[status] + headers.encode() + b"connection: close\r\n\r\n" + body
        if self.pipeline and self.cycle.more_body:  # the incomplete request waits behind others
            self.pipeline.popleft()
        elif self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            self._close()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and self._refusal is not None:
            self._close()

    def _close(self) -> None:
        """Sends the refusal and closes; aborts if a reply is half sent, since the refusal would corrupt it."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        elif self._refusal is not None and not self.transport.is_closing():
            self._count(self._refusal.status)
            self.transport.write(self._refusal_reply)
            if not self.transport.can_write_eof():  # TLS
                self.transport.close()
                return
            # Lingers: closing with unread bytes would reset the connection before the peer reads the refusal.
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def count_reason(self, reason: str) -> None:
        if self.metrics is not None:
            self.metrics.count_failure(reason)

    def _count(self, status: int) -> None:
        """Counts the refusal: in the request's record if the application has started the request and will count it; otherwise here."""
        scope: Any = {} if self.cycle is None or self.cycle.response_complete else self.cycle.scope
        if (record := scope.get("attend")) is not None:
            record.status = status
        elif self.metrics is not None:
            self.metrics.count_request("other", status)
