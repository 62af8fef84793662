"""httptools' request parser, changed to ignore the header `Upgrade`."""

from typing import Any, Protocol

import httptools


class Head(Protocol):
    """The object that receives the parser's callbacks."""

    def head_without_upgrade(self) -> bytes: ...


class Parser(httptools.HttpRequestParser):
    """Ignores the header `Upgrade`, as RFC 9110 (section 7.8) asks of a server that supports no upgrade.

    httptools ends such a request after its head, and treats the following bytes as another protocol. So the connection ignores this head;
    the parser reads it again without `Upgrade`, and then reads the body.
    """

    def __init__(self, connection: Head) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: a request may follow `Connection: close`
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
