"""Threads for decoding and encoding bodies. Callers share them fairly, and bodies below 1 MiB do not wait for larger ones."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from attend.serving.queueing import FairQueue
from attend.serving.threads import call_in_loop, lower_priority

T = TypeVar("T")
INLINE_BYTES = 64 * 1024  # bytes up to which decoding and encoding, on the event loop, take well under a millisecond
LARGE_BYTES = 1 << 20  # of a large body, which takes milliseconds; without the C extension, they hold the interpreter's lock
OVERHEAD_BYTES = 1 << 14  # bytes added to the cost of any work


@dataclass(slots=True, eq=False)
class WorkItem:
    """A function that waits for a thread."""

    function: Callable[[], Any]
    size: int
    caller: str
    future: "asyncio.Future[Any]"


class CodecPool:
    """Runs functions for small bodies on `threads` threads, and those for large bodies on one more, of lower priority: two would contend
    with the event loop for the interpreter's lock. All methods run on the event loop.
    """

    def __init__(self, threads: int) -> None:
        self._small_bodies = WorkQueue(threads, ThreadPoolExecutor(threads, "codec"))
        self._large_bodies = WorkQueue(1, ThreadPoolExecutor(1, "codec-large", lower_priority))

    async def run(self, function: Callable[[], T], size: int, caller: str) -> T:
        """Run a function in a thread and return its result. `size` is the number of bytes it reads or writes, 0 if unknown."""
        loop = asyncio.get_running_loop()
        item = WorkItem(function, size, caller, loop.create_future())
        work = self._large_bodies if size >= LARGE_BYTES else self._small_bodies
        work.queue.append(item)
        work.start(loop)
        try:
            result: T = await item.future
            return result
        finally:
            del item  # an exception's traceback refers to this frame; the cycle would keep the body until a garbage collection

    def close(self) -> None:
        for work in (self._small_bodies, self._large_bodies):
            work.threads.shutdown(wait=False)


class WorkQueue:
    """Threads, of which `free` are free, and the queue of work for them, which callers share fairly by bytes."""

    def __init__(self, free: int, threads: ThreadPoolExecutor) -> None:
        self.free, self.threads = free, threads
        self.queue: FairQueue[WorkItem] = FairQueue(lambda item: item.caller, lambda item: item.size + OVERHEAD_BYTES)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start as much work as threads are free."""
        while self.free and (item := self.queue.first()) is not None:
            if item.future.cancelled():
                self.queue.remove([item])
                continue
            self.queue.serve([item])
            try:
                running = self.threads.submit(item.function)
            except RuntimeError as error:  # no memory for another thread
                item.future.set_exception(error)
                continue
            self.free -= 1
            running.add_done_callback(partial(call_in_loop, loop, self._finish, loop, item))

    def _finish(self, loop: asyncio.AbstractEventLoop, item: WorkItem, ran: Any) -> None:
        self.free += 1
        if not item.future.done():
            error = ran.exception()
            item.future.set_result(ran.result()) if error is None else item.future.set_exception(error)
        self.start(loop)
