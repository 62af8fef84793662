"""Threads as events: a job begins when a thread of its pool is free, computes at once, and ends after a drawn time.

While a job computes, the world's clock shows the time that it says to have taken (`World.elapsed`). The moments at which it begins, and at
which the event loop learns its result, fall between any two iterations of the loop, or before any `call_soon` within one, and jobs of
different threads end in any order.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

from simulation.world import World

ALLOCATING = ("codec", "drawing")  # pools whose jobs may find no memory; that of a batch is a fault of computing
DELAYS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)  # seconds until a free thread runs, and until the loop learns of the end


class SimulatedExecutor:
    """A pool of threads, as concurrent.futures has it."""

    all: ClassVar[list["SimulatedExecutor"]] = []  # of the run; cleared by `interposed`

    def __init__(self, world: World, max_workers: int, name: str = "", *initializer: Any) -> None:
        self.world, self.name, self.free, self.process = world, name, max_workers, world.running
        self.queue: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self.closed = self.dead = False
        self._draw = world.random(f"threads {self.process}{name}")
        SimulatedExecutor.all.append(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self.queue.append((future, function, args))
        self._start()
        return future

    def _start(self) -> None:
        """Give a free thread the next job."""
        if self.free and self.queue:
            self.free -= 1
            self.world.at_in_thread(self._draw.choice(DELAYS), self._run)

    def _run(self) -> None:
        if self.dead or not self.queue:  # `shutdown` has run it
            self.free += 1
            return
        future, function, args = self.queue.popleft()
        if not future.set_running_or_notify_cancel():
            self.free += 1
            self._start()
            return
        self.world.elapsed, self.world.in_thread = 0.0, True
        result, error = None, None
        try:
            with self.world.run_by(self.process):
                if self.name.startswith(ALLOCATING) and self.world.lacks_memory():
                    raise MemoryError
                result = function(*args)
        except BaseException as raised:
            error = raised
        seconds, self.world.elapsed, self.world.in_thread = self.world.elapsed, 0.0, False
        self.world.at_in_thread(seconds + self._draw.choice(DELAYS), partial(self._end, future, result, error))
        del (
            function,
            args,
            future,
            result,
            error,
        )  # an exception's traceback refers to this frame; the cycle would keep what it computed with

    def _end(self, future: Future[Any], result: Any, error: BaseException | None) -> None:
        if self.dead:
            return
        self.free += 1
        self._start()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, error

    def kill(self) -> None:
        """The process dies: no job begins or ends any more."""
        self.dead = self.closed = True
        self.queue.clear()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Run the jobs that wait, as a real pool does before its threads end."""
        self.closed = True
        while self.queue:
            future, function, args = self.queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except Exception as error:
                    future.set_exception(error)
            del future, function, args  # as in `_run`


class InlineExecutor:
    """The thread for reproducible calls, for which the thread of a job waits: it computes at once."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future
