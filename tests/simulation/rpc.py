"""gRPC below its socket: in place of the library's server, its handlers are called with contexts as the library makes them.

The client's end of a call draws when its messages arrive and when it reads replies. It may cancel; then, or at its deadline, the library
cancels the handler.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc

from simulation.network import DELAYS
from simulation.world import Failure, Resume, World, suspended

PATIENCE = 200.0  # seconds in which a call must have ended
CANCELLED, REFUSED, DIED = "cancelled by the client", "refused", "the process died"


class Ended(NamedTuple):
    """How a call ended: its code, or why there is none, the detail, and the messages that came back."""

    code: str
    detail: str
    replies: list[bytes]


class GrpcServer:
    """What `grpc.aio.server` returns, as far as the service uses it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.handlers: list[Any] = []
        self.calls: dict[Call, asyncio.Task[None]] = {}
        self.accepts = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self.handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        return 9000

    async def start(self) -> None:
        self.accepts, self.loop = True, asyncio.get_running_loop()

    async def stop(self, grace: float) -> None:
        """Accept no more calls; cancel those that have not ended in time."""
        self.accepts = False
        if self.calls:
            await asyncio.wait(self.calls.values(), timeout=grace)
        for task in list(self.calls.values()):
            task.cancel()

    def begin(self, call: "Call", method: str) -> None:
        """Start the handler of a call."""
        details = SimpleNamespace(method=method, invocation_metadata=())
        handler = next(found for one in self.handlers if (found := one.service(details)) is not None)
        self.calls[call] = task = self.loop.create_task(handler.stream_stream(None, call))
        task.add_done_callback(lambda done: self._end(call, done))

    def _end(self, call: "Call", task: "asyncio.Task[None]") -> None:
        self.calls.pop(call)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, grpc.aio.AbortError):
            self.world.fail(error)
        code = "CANCELLED" if task.cancelled() else "OK" if error is None else call.aborted.name
        call.end(Ended(code, call.detail, call.replies))


class Call:
    """One call: the context of its handler, and the client's end."""

    def __init__(self, server: GrpcServer, name: str, metadata: dict[str, str], seconds: float | None, slow: float) -> None:
        """`slow`: seconds in which the client does not read replies."""
        self.world, self.server, self.loop = server.world, server, server.loop
        self.draw = self.world.random(f"call {name}")
        self.metadata, self.slow_until = metadata, self.world.now + slow
        self.address = metadata.pop("address")
        self.deadline = None if seconds is None else self.world.now + seconds
        self.arrived: deque[Any] = deque()
        self.replies: list[bytes] = []
        self.aborted, self.detail = grpc.StatusCode.OK, ""
        self.resume: Resume | None = None
        self._reading: asyncio.Future[None] | None = None

    # What handlers call

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self.metadata.items())

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.world.now

    def peer(self) -> str:
        return f"ipv4:{self.address}:40000" if "." in self.address else f"ipv6:%5B{self.address}%5D:40000"

    async def read(self) -> Any:
        while not self.arrived:
            self._reading = self.loop.create_future()
            await self._reading
        return self.arrived.popleft() if self.arrived[0] is not grpc.aio.EOF else grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        """Send a reply, which waits until the client has room for it."""
        room = self.loop.create_future()
        delay = max(0.0, self.slow_until - self.world.now) + self.draw.choice(DELAYS)
        self.world.at(delay, lambda: room.done() or room.set_result(None))
        await room
        self.replies.append(message)

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, detail: str = "", metadata: Any = ()) -> None:
        self.aborted, self.detail = code, detail
        raise grpc.aio.AbortError

    # What the client does

    def arrive(self, messages: Sequence[bytes], whole: bool) -> None:
        """Let the messages arrive one after the other, and then the end, unless the client stops in the middle."""
        delay, travelling = 0.0, deque([*messages, grpc.aio.EOF] if whole else messages[:-1])
        for _ in list(travelling):
            delay += self.draw.choice(DELAYS)
            self.world.at(delay, lambda: self._arrive(travelling.popleft()))

    def _arrive(self, message: Any) -> None:
        self.arrived.append(message)
        if self._reading is not None and not self._reading.done() and not self.loop.is_closed():
            self._reading.set_result(None)

    def end(self, how: Ended) -> None:
        """Tell the client how the call has ended, once."""
        if self.resume is not None:
            self.world.at(self.draw.choice(DELAYS), lambda resume=self.resume: resume(how))  # type: ignore[misc]
            self.resume = None

    def cancel(self, code: str) -> None:
        """The client cancels, or its deadline has passed: it is told at once, and the library cancels the handler."""
        if self.resume is not None:
            self.end(Ended(code, "", list(self.replies)))
            if (task := self.server.calls.get(self)) is not None:
                task.cancel()


async def call_grpc(
    server: GrpcServer | None,
    name: str,
    method: str,
    messages: Sequence[bytes],
    metadata: dict[str, str],
    seconds: float | None = None,
    leaves_after: float | None = None,
    whole: bool = True,
    slow: float = 0.0,
) -> Ended:
    """Make a call and wait for its end. Returns once its handler has ended too."""
    if server is None or not server.accepts or server.loop.is_closed():
        return Ended(REFUSED, "", [])
    call = Call(server, name, metadata, seconds, slow)
    world = call.world

    def begin(resume: Resume) -> None:
        call.resume = resume
        server.begin(call, method)
        call.arrive(messages, whole)
        if seconds is not None:
            world.at(seconds, lambda: call.cancel("DEADLINE_EXCEEDED"))
        if leaves_after is not None:
            world.at(leaves_after, lambda: call.cancel(CANCELLED))
        world.at(PATIENCE, lambda: call.cancel("late"))

    ended: Ended = await suspended(begin)
    if ended.code == "late":
        raise Failure("rule 4: every call is computed or refused", f"{method} of {name} has not ended after {PATIENCE:g} s")
    began = world.now
    while call in server.calls and not server.loop.is_closed():
        await suspended(lambda resume: world.at(0.01, lambda: resume(None)))
        if world.now - began > PATIENCE:
            raise Failure("liveness", f"{method} of {name}, who left {PATIENCE:g} s ago, still runs")
    return ended
