"""The gate that shutdown closes: it stops new calls of all servers of the process at the same time, and waits for those that are in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Close = Callable[[], Coroutine[Any, Any, Any]]


class ShutdownGate:
    """Open until `close`. On one event loop, which must run by then."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._others: list[Close] = []
        self._leaving: list[asyncio.Task[Any]] = []

    @property
    def open(self) -> bool:
        return not self._closing.is_set()

    def add(self, close: Close) -> None:
        """Has `close` called when the gate closes; it returns when the calls that another server has taken are answered."""
        self._others.append(close)

    def close(self) -> None:
        """Returns at once; a second time it does nothing."""
        if self.open:
            self._closing.set()
            self._leaving = [asyncio.get_running_loop().create_task(close()) for close in self._others]

    async def closed(self) -> None:
        """Returns when the other servers have answered what they had taken."""
        await asyncio.gather(*self._leaving)

    async def closes_within(self, seconds: float) -> None:
        """Returns once the gate closes, or after that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def until_closed(self, coming: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items, until there are no more or the gate closes."""
        closing = asyncio.create_task(self._closing.wait())
        try:
            while True:
                item = asyncio.ensure_future(anext(coming))
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
