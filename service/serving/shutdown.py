"""The gate between accepting requests and shutting down, which the HTTP server and the gRPC server share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Close = Callable[[], Coroutine[Any, Any, Any]]


class ShutdownGate:
    """Makes other servers (gRPC) close at the same time as the HTTP server, not after it. Open until `close`."""

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
        """Close the gate and start to close the registered servers. Returns at once. Idempotent."""
        if self.open:
            self._closing.set()
            self._tasks = [asyncio.get_running_loop().create_task(close()) for close in self._servers]

    async def closed(self) -> None:
        """Wait until the registered servers have closed."""
        await asyncio.gather(*self._tasks)

    async def closes_within(self, seconds: float) -> None:
        """Wait until the gate closes, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def until_closed(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield the items until they end or the gate closes."""
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
