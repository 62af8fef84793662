"""A thread pool for decoding and encoding large bodies. It is fair between callers, and light work does not wait for heavy work."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from service.serving.fair_queue import FairQueue

T = TypeVar("T")
HEAVY = 1 << 20  # bytes; work of this size holds the interpreter's lock for milliseconds at a time
OVERHEAD = 1 << 14  # bytes added to the cost of any work


@dataclass(slots=True, eq=False)
class Job:
    """A function that waits for a thread."""

    function: Callable[[], Any]
    size: int
    caller: str
    future: "asyncio.Future[Any]"

    @property
    def heavy(self) -> bool:
        return self.size >= HEAVY


class CodecPool:
    """Runs functions on `threads` threads, with at most one heavy function at a time: two would contend for the interpreter's lock and
    starve the event loop. Light and heavy functions have one queue each, which is shared fairly between callers, by bytes.

    All methods run on the event loop.
    """

    def __init__(self, threads: int) -> None:
        self._free, self._heavy_free = threads, True
        self._light: FairQueue[Job] = FairQueue(lambda job: job.caller, lambda job: job.size + OVERHEAD)
        self._heavy: FairQueue[Job] = FairQueue(lambda job: job.caller, lambda job: job.size + OVERHEAD)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="codec")

    async def run(self, function: Callable[[], T], size: int, caller: str) -> T:
        """Run a function in a thread and return its result. `size` is the number of bytes it reads or writes, 0 if unknown."""
        loop = asyncio.get_running_loop()
        job = Job(function, size, caller, loop.create_future())
        (self._heavy if job.heavy else self._light).append(job)
        self._next(loop)
        result: T = await job.future
        return result

    def close(self) -> None:
        self._threads.shutdown()

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start as many jobs as threads are free, light ones first."""
        while self._free and (job := self._take()) is not None:
            try:
                running = self._threads.submit(job.function)
            except RuntimeError as error:  # no memory for another thread
                job.future.set_exception(error)
                continue
            self._free -= 1
            self._heavy_free = self._heavy_free and not job.heavy
            running.add_done_callback(lambda ran, job=job: loop.call_soon_threadsafe(self._finish, loop, job, ran))  # type: ignore[misc]

    def _take(self) -> Job | None:
        """Remove and return the next job that is not cancelled; None if no job may start."""
        for queue in (self._light, self._heavy) if self._heavy_free else (self._light,):
            while queue:
                job = next(iter(queue))
                if not job.future.cancelled():
                    queue.serve([job])
                    return job
                queue.remove([job])
        return None

    def _finish(self, loop: asyncio.AbstractEventLoop, job: Job, ran: Any) -> None:
        self._free += 1
        self._heavy_free = self._heavy_free or job.heavy
        if not job.future.done():
            error = ran.exception()
            job.future.set_result(ran.result()) if error is None else job.future.set_exception(error)
        self._next(loop)
