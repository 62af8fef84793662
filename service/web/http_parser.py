"""httptools' parser, without upgrades."""

from typing import Any, Protocol

import httptools


class Head(Protocol):
    """What receives the parser's callbacks."""

    def head_without_upgrade(self) -> bytes: ...


class Parser(httptools.HttpRequestParser):
    """Ignores the header `Upgrade`, as RFC 9110 (section 7.8) asks of a server that supports no upgrade.

    httptools takes such a request to end with its head, and what follows for another protocol. So the connection ignores this head, and the
    parser reads it again without `Upgrade`, and then the body.
    """

    def __init__(self, connection: Head) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: a request may follow `Connection: close`
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Raises HttpParserError for bytes that are not HTTP, and for an exception in a callback, which is its context."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
            else:
                return
            head = self._connection.head_without_upgrade()
            self.__init__(self._connection)  # type: ignore[misc]  # after `Connection: close` it would read no further head
            super().feed_data(head)
