"""The shutdown gate: closes once, and closes other servers (gRPC) together with the HTTP server, not after it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Close = Callable[[], Coroutine[Any, Any, Any]]


class ShutdownGate:
    """Open until `close`. Belongs to one event loop, which must run when it closes."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._servers: list[Close] = []
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def open(self) -> bool:
        return not self._closing.is_set()

    def add(self, close: Close) -> None:
        """Registers a server to be closed with this gate; its `close` returns when the calls that it had accepted are answered."""
        self._servers.append(close)

    def close(self) -> None:
        """Closes the gate, and starts to close the registered servers. Returns at once; a second time it does nothing."""
        if self.open:
            self._closing.set()
            self._tasks = [asyncio.get_running_loop().create_task(close()) for close in self._servers]

    async def closed(self) -> None:
        """Returns when the registered servers have closed."""
        await asyncio.gather(*self._tasks)

    async def closes_within(self, seconds: float) -> None:
        """Returns when the gate closes, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def until_closed(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items, until there are no more, or the gate closes."""
        closing = asyncio.create_task(self._closing.wait())
        try:
            while True:
                item = asyncio.ensure_future(anext(items))
                await asyncio.wait((item, closing), return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    item.cancel()
                    return
                try:
                    yield item.result()
                except StopAsyncIteration:
                    return
        finally:
            closing.cancel()
