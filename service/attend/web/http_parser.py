"""Parses HTTP/1.1 for a connection. Has the bounds of a request's head, and `Refused`, which says why a request is beyond them."""

import re
from typing import Any

import httptools

HTTP_VERSIONS = ("1.1", "1.0")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")  # that HTTP defines
MAX_HEAD_BYTES = 64 * 1024  # bytes of a request line and headers, without the empty line after them
UNKNOWN_METHOD = re.compile(  # a request line with another method
    rb"^(?!(?:%b) )([\w!#$%%&'*+.^`|~-]{1,40}) [^ \r\n]+ HTTP/1\.[01]\r?$" % b"|".join(map(str.encode, METHODS)), re.MULTILINE
)
REQUEST_LINE_BYTES = len(b"GET  HTTP/1.1\r\n")  # bytes of a request line without its target
HEADER_LINE_BYTES = len(b": \r\n")  # bytes of a header without its name and value
MAX_LENGTH_DIGITS = 20  # of a Content-Length, leading zeros among them; 2^64 has as many
MAX_FRAMING_RATIO = 8  # bytes of chunk headers and trailers allowed per byte of body, in addition to MAX_HEAD_BYTES


class Refused(Exception):
    """A request refused before the application sees it: `reason` labels the metric; the other fields make the reply."""

    def __init__(self, reason: str, status: int, title: str, expected: str, got: str = "more") -> None:
        super().__init__(reason)
        self.reason, self.status, self.title, self.expected, self.got = reason, status, title, expected, got


MALFORMED = "malformed_http", 400, "malformed request"
HEAD_TOO_LARGE = "long_headers", 431, "headers too large", f"a request line and headers of at most {MAX_HEAD_BYTES} bytes"
CHUNK_HEADERS_TOO_LARGE = (
    "long_chunk_headers",
    400,
    "chunk headers too large",
    f"at most {MAX_HEAD_BYTES} bytes of chunk headers and trailers, and {MAX_FRAMING_RATIO} for each byte of a body",
)


class Parser(httptools.HttpRequestParser):
    """Ignores the header `Upgrade`, as RFC 9110 (section 7.8) asks of a server that supports no upgrade.

    httptools ends such a request after its head, and treats the following bytes as another protocol. So the connection ignores this
    head; the parser reads it again as the connection has it (`head_without_upgrade`), and then reads the body.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        # As uvicorn does: a request may follow `Connection: close`. The connection decides about versions.
        self.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Parses `data`. Raises HttpParserError for invalid HTTP, and for an exception in a callback, which is its `__context__`."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
            else:
                return
            head = self._connection.head_without_upgrade()
            self.__init__(self._connection)  # type: ignore[misc]  # resets the parser: after `Connection: close` it reads no further head
            super().feed_data(head)
