"""The event loop of the simulated process: asyncio's own, whose clock and selector are the world's.

Libraries with a virtual clock exist. looptime waits for real threads and sockets; async-solipsism lets no time pass while callbacks run;
simloop and simloom need Python 3.12. asyncio's base loop needs only a clock and a selector, and the order of its
callbacks is the real one.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

from simulation.threads import SimulatedExecutor
from simulation.world import World

MakeProtocol = Callable[[], Any]


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

    def __init__(self, world: World, serve: Callable[[Any, MakeProtocol], Any]) -> None:
        super().__init__()
        self.world, self._serve = world, serve
        self._selector = Selector(world, self.stop)
        self._threads = SimulatedExecutor(world, 5, "default")
        self.set_exception_handler(self._unhandled)

    def time(self) -> float:
        return self.world.now

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass  # nothing sleeps that would have to be woken

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        self.world.fail(context.get("exception") or AssertionError(context["message"]))
        self.world.note("unhandled:", context["message"], repr(context.get("exception")))

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        future: concurrent.futures.Future[Any] = (executor or self._threads).submit(function, *args)
        return asyncio.wrap_future(future, loop=self)

    async def create_server(self, make: MakeProtocol, *args: Any, sock: Any = None, **options: Any) -> Any:
        return self._serve(sock, make)

    def timers(self) -> int:
        """Number of timers that are set."""
        return sum(not handle.cancelled() for handle in self._scheduled)
