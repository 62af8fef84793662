"""The event loop of a simulated process: asyncio's own, whose clock and selector are the world's.

A process that is alone runs its loop as usual, and the loop's selector lets time pass. Several processes take turns: `turn` runs one
iteration of a loop.

Libraries with a virtual clock exist. looptime waits for real threads and sockets; async-solipsism lets no time pass while callbacks run;
simloop and simloom need Python 3.12. asyncio's base loop needs only a clock and a selector, and the order of its
callbacks is the real one.
"""

import asyncio
import concurrent.futures
import heapq
import math
import sys
import threading
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from simulation.threads import SimulatedExecutor
from simulation.world import World

MakeProtocol = Callable[[], Any]
NO_EVENTS = SimpleNamespace(select=lambda timeout: [], close=lambda: None)  # the selector of a loop for which no time passes


class Selector:
    """What the loop asks for events of sockets. Those of the world are callbacks already, so it returns none."""

    def __init__(self, world: World, stop: Callable[[], None]) -> None:
        self.world, self.stop = world, stop

    def select(self, timeout: float | None) -> list[Any]:
        if not self.world.advance(timeout):
            self.stop()
        return []

    def close(self) -> None:
        pass


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop without sockets, threads or a real clock. `serve` is called with what makes the protocol of a connection."""

    def __init__(self, world: World, serve: Callable[[Any, MakeProtocol], Any], alone: bool = True) -> None:
        super().__init__()
        self.world, self._serve = world, serve
        self._selector = Selector(world, self.stop) if alone else NO_EVENTS
        self._threads = SimulatedExecutor(world, 5, "default")
        self._ties = world.random("timers")
        self.set_exception_handler(self._unhandled)

    def time(self) -> float:
        return self.world.now

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass  # nothing sleeps that would have to be woken

    def call_soon(self, *args: Any, **context: Any) -> asyncio.Handle:
        self.world.let_threads_run()
        try:
            return super().call_soon(*args, **context)
        finally:
            del args  # an error of a thread that ran here has frames that refer to this one; a real thread has a stack of its own

    def call_at(self, when: float, *args: Any, **context: Any) -> asyncio.TimerHandle:
        """As asyncio does, timers of the same time run in an undefined order."""
        return super().call_at(when + self._ties.random() * 1e-9, *args, **context)

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        self.world.fail(context.get("exception") or AssertionError(context["message"]))
        self.world.note("unhandled:", context["message"], repr(context.get("exception")))

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        future: concurrent.futures.Future[Any] = (executor or self._threads).submit(function, *args)
        return asyncio.wrap_future(future, loop=self)

    async def create_server(self, make: MakeProtocol, *args: Any, sock: Any = None, **options: Any) -> Any:
        return self._serve(sock, make)

    def next_at(self) -> float:
        """The time at which the loop has something to do."""
        if self._ready:
            return 0.0
        while self._scheduled and self._scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        return self._scheduled[0].when() if self._scheduled else math.inf

    def turn(self) -> None:
        """Run one iteration, as `run_forever` does again and again."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)
        try:
            with self.running():
                self._run_once()
        finally:
            sys.set_asyncgen_hooks(*hooks)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this block, asyncio takes this loop for the running one."""
        before, thread = events._get_running_loop(), self._thread_id
        self._thread_id = threading.get_ident()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(before)
            self._thread_id = thread

    def timers(self) -> int:
        """Number of timers that are set."""
        return sum(not handle.cancelled() for handle in self._scheduled)
