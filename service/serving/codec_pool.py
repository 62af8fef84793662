"""Threads that decode and encode what is too large for the event loop, fairly: light work does not wait behind heavy work."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from service.serving.fair_queue import FairQueue

T = TypeVar("T")
HEAVY = 1 << 20  # bytes from which on work is heavy: it holds the interpreter's lock for milliseconds at a time
OVERHEAD = 1 << 14  # bytes that any work costs at least


@dataclass(slots=True, eq=False)
class Job:
    """Work that waits for a thread."""

    function: Callable[[], Any]
    size: int
    caller: str
    future: "asyncio.Future[Any]"

    @property
    def heavy(self) -> bool:
        return self.size >= HEAVY


class CodecPool:
    """Runs functions on `threads` threads, of which one at a time does heavy work: two would only contend for the interpreter's lock,
    and between them hardly leave it to the event loop. Callers share each of the two kinds of work fairly, by bytes.

    All methods run on the event loop.
    """

    def __init__(self, threads: int) -> None:
        self._free, self._heavy_free = threads, True
        self._light: FairQueue[Job] = FairQueue(lambda job: job.caller, lambda job: job.size + OVERHEAD)
        self._heavy: FairQueue[Job] = FairQueue(lambda job: job.caller, lambda job: job.size + OVERHEAD)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="codec")

    async def run(self, function: Callable[[], T], size: int, caller: str) -> T:
        """What the function returns, computed off the event loop; `size` is how many bytes it reads or writes, as far as is known."""
        loop = asyncio.get_running_loop()
        job = Job(function, size, caller, loop.create_future())
        (self._heavy if job.heavy else self._light).append(job)
        self._next(loop)
        result: T = await job.future
        return result

    def close(self) -> None:
        self._threads.shutdown()

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts what can be started, light work first."""
        while self._free and (job := self._take()) is not None:
            self._free -= 1
            self._heavy_free = self._heavy_free and not job.heavy
            running = self._threads.submit(job.function)
            running.add_done_callback(lambda ran, job=job: loop.call_soon_threadsafe(self._finish, loop, job, ran))  # type: ignore[misc]

    def _take(self) -> Job | None:
        """The next job whose caller still waits for it."""
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
