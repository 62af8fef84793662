"""Counts the work of an operation on the event loop beside n things, and beside 10 n: `python -m tests.simulation growth`.

Work is the number of Python instructions that the event loop executes, and the bytes that it allocates: an instruction that copies or
sorts a list, joins texts or writes JSON counts as one, but allocates in proportion. No clock is read. Jobs of threads and the clients do
not count.
"""

import io
import json
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from simulation.caller import Caller, Reply
from simulation.configuration import WIDTH, Configuration, draw_configuration
from simulation.interposition import interposed
from simulation.network import Peer
from simulation.process import Process
from simulation.run import end, keys_file, quiet
from simulation.world import Actor, World, sleep

FEW, MANY = 30, 300  # between which dictionaries of so many keys do not grow
GROWS, GROWS_BYTES = 4, 16  # an operation grows if it has so many more instructions, or bytes at a time, for each thing
# more beside it. A copy of a list of references has 8 bytes for each, and takes nanoseconds.
ROW = [[1.0] * WIDTH]
CALL = json.dumps({"layer": "plain", "query": ROW}).encode()
STEP = json.dumps({"query": ROW, "outputs": ["output"]}).encode()
WAITING = json.dumps({"layer": "plain", "query": ROW, "reproducible": True}).encode()  # is not computed inline
PUT = json.dumps({"spec": {"d_model": WIDTH, "num_heads": 2}}).encode()


class Counter:
    """Counts the instructions of the event loop, and the bytes that it allocates at a time, while `counting`."""

    def __init__(self, loop: Any) -> None:
        self.total = self.iteration = self.largest = self.bytes = 0
        self.counting, self.world = False, loop.world
        self._select = loop._selector.select
        loop._selector.select = self._between

    def _between(self, timeout: float | None) -> list[Any]:
        """What happens outside the loop does not count."""
        sys.settrace(None)
        self.largest, self.iteration = max(self.largest, self.iteration), 0
        if tracemalloc.is_tracing():
            self.bytes = max(self.bytes, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        self._select(timeout)
        if self.counting:
            tracemalloc.start()
            sys.settrace(self._trace)
        return []

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and not self.world.in_thread:  # a job of a thread may run within an iteration
            self.total += 1
            self.iteration += 1
        return self._trace


@dataclass
class Beside:
    """A process, a caller of it, and the things that are there."""

    process: Process
    caller: Caller
    sessions: list[str]
    peers: list[Peer]

    async def ask(self, method: str, target: str, body: bytes = b"", caller: Caller | None = None) -> Any:
        reply = await (caller or self.caller).call(method, target, body, {"Content-Type": "application/json"} if body else {})
        assert isinstance(reply, Reply) and reply.status < 300, (method, target, reply)
        return json.loads(reply.body) if reply.body.startswith(b"{") else reply.body

    async def session(self, **fields: Any) -> str:
        """The id of a new session with a row."""
        made = await self.ask("POST", "/sessions", json.dumps({"layer": "plain", **fields}).encode())
        await self.ask("POST", f"/sessions/{made['id']}/attend", STEP)
        return str(made["id"])


AT_ONCE = ("attend.web.slow_peers.CHECKED_AT_ONCE", "attend.serving.sessions.registry.SESSIONS_AT_ONCE")
Fill = Callable[[Beside, int], Awaitable[None]]
Operation = Callable[[Beside], Awaitable[None]]


async def _sessions(beside: Beside, n: int) -> None:
    beside.sessions += [await beside.session() for _ in range(n)]


async def _layers(beside: Beside, n: int) -> None:
    for i in range(n):
        await beside.ask("PUT", f"/layers/more-{i}", PUT)


async def _connections(beside: Beside, n: int) -> None:
    """Connections of callers with addresses of their own, each after a request."""
    for i in range(n):
        caller = Caller(beside.process, f"caller {i}", f"10.1.{i // 250}.{i % 250}", None)
        await beside.ask("POST", "/attend", CALL, caller)


async def _waiting_calls(beside: Beside, n: int) -> None:
    """Calls that wait for the device, which computes nothing."""
    beside.process.service.scheduler._thread.free = 0
    for i in range(n):
        caller = Caller(beside.process, f"waiting {i}", f"10.2.{i // 250}.{i % 250}", None)
        Actor(beside.process.world, _ignored(caller, WAITING)).start(0.0)
    await sleep(beside.process.world, 1.0)
    assert beside.process.service.scheduler.load[0] >= n - 1


async def _ignored(caller: Caller, body: bytes) -> None:
    await caller.call("POST", "/attend", body, {"Content-Type": "application/json"})


FILLS: dict[str, Fill] = {"sessions": _sessions, "layers": _layers, "connections": _connections, "waiting calls": _waiting_calls}


async def _attend(beside: Beside) -> None:
    await beside.ask("POST", "/attend", CALL)


async def _step(beside: Beside) -> None:
    await beside.ask("POST", f"/sessions/{beside.sessions[0]}/attend", STEP)


async def _create(beside: Beside) -> None:
    await beside.ask("POST", "/sessions", b'{"layer": "plain"}')


async def _fork(beside: Beside) -> None:
    await beside.ask("POST", f"/sessions/{beside.sessions[0]}/fork", b"{}")


async def _delete(beside: Beside) -> None:
    await beside.ask("DELETE", f"/sessions/{beside.sessions[0]}")


async def _evict(beside: Beside) -> None:
    """A new session for which another one has to end."""
    registry = beside.process.service.engine.sessions
    assert registry is not None
    registry.capacity = registry.pool.used
    await beside.session()


async def _put_layer(beside: Beside) -> None:
    await beside.ask("PUT", "/layers/new", PUT)


async def _delete_layer(beside: Beside) -> None:
    await beside.ask("DELETE", "/layers/first")


async def _ready(beside: Beside) -> None:
    await beside.ask("GET", "/health/ready")


async def _connect(beside: Beside) -> None:
    """A new connection, a request, and its end."""
    caller = Caller(beside.process, "another", "10.9.0.1", None)
    await beside.ask("POST", "/attend", CALL, caller)
    caller.close()
    await sleep(beside.process.world, 0.1)


async def _second(beside: Beside) -> None:
    """A second in which nobody calls: timers of connections, sessions and metrics."""
    await sleep(beside.process.world, 1.05)


async def _list_layers(beside: Beside) -> None:
    await beside.ask("GET", "/layers")


async def _index_models(beside: Beside) -> None:
    await beside.ask("POST", "/v2/repository/index")


async def _index(beside: Beside) -> None:
    await beside.ask("GET", "/")


async def _statistics(beside: Beside) -> None:
    await beside.ask("GET", "/v2/models/stats")


async def _export(beside: Beside) -> None:
    await beside.ask("GET", f"/sessions/{beside.sessions[0]}/cache")


async def _list_sessions(beside: Beside) -> None:
    await beside.ask("GET", "/sessions")


async def _metrics(beside: Beside) -> None:
    await beside.ask("GET", "/metrics")


async def _wait(beside: Beside) -> None:
    """A call that waits for the device."""
    caller = Caller(beside.process, "one more", "10.9.0.2", None)
    Actor(beside.process.world, _ignored(caller, WAITING)).start(0.0)
    await sleep(beside.process.world, 0.3)


OPERATIONS: dict[str, Operation] = {
    "attend": _attend,
    "a call that waits": _wait,
    "step of a session": _step,
    "create a session": _create,
    "fork a session": _fork,
    "delete a session": _delete,
    "a step that ends another session": _evict,
    "put a layer": _put_layer,
    "delete a layer": _delete_layer,
    "ready": _ready,
    "connect and leave": _connect,
    "a second without calls": _second,
    "list layers": _list_layers,
    "index of models": _index_models,
    "index": _index,
    "statistics of models": _statistics,
    "export a session": _export,
    "list sessions": _list_sessions,
    "read metrics": _metrics,
}
# Operations whose work may grow if it is spread over iterations: the check of all connections may fall into them.
SPREAD = ("a second without calls", "connect and leave", "a call that waits")
LISTS = ("list layers", "index of models", "index", "statistics of models", "list sessions")
# Their replies have an entry for each, which threads write; the event loop sends the bytes.
COMPUTING = ("step of a session", "a step that ends another session", "put a layer", "ready", "export a session")
IMPOSSIBLE = {(name, "waiting calls") for name in COMPUTING}


@dataclass(frozen=True)
class Work:
    """Instructions of an operation in all, and in the iteration of the loop that has most of them; most bytes that it allocates in one."""

    total: int
    largest: int
    bytes: int


def work(operation: Operation, fill: Fill, n: int) -> Work:
    """The work of an operation beside n things."""
    world = World(0)
    chosen = _plain(draw_configuration(world, keys_file()))
    with interposed(world, chosen), quiet(io.StringIO()):
        process = Process(world, chosen)
        counter = Counter(process.loop)
        Actor(world, _measure(process, counter, operation, fill, n)).start(1.0)
        with suppress(RuntimeError):  # it is stopped
            process.loop.run_until_complete(process.serve())
        sys.settrace(None)
        tracemalloc.stop()
        end(process)
    if not isinstance(world.failure, _Done):
        raise world.failure or AssertionError("the operation did not end")
    return Work(counter.total, counter.largest, counter.bytes)


class _Done(Exception):
    """The operation is done."""


async def _measure(process: Process, counter: Counter, operation: Operation, fill: Fill, n: int) -> None:
    beside = Beside(process, Caller(process, "caller", "127.0.0.1", None), [], [])
    beside.sessions.append(await beside.session())
    await beside.ask("PUT", "/layers/first", PUT)
    await fill(beside, n)
    await sleep(process.world, 0.01)
    counter.counting, counter.largest, counter.bytes = True, 0, 0
    await operation(beside)
    counter.counting = False
    process.world.fail(_Done())


def _plain(chosen: Configuration) -> Configuration:
    """The configuration without faults, drawn sizes and short timeouts."""
    changes = {"keys_file": None, "request_timeout": None, "client_timeout": 20.0, "keepalive_timeout": 1e6, "compress_replies": False}
    changes |= {"session_memory": 1 << 30, "max_queue_bytes": 1 << 31, "layers_dir": None, "grpc_port": None}
    settings = chosen.settings.model_copy(update=changes)
    sizes = dict.fromkeys(AT_ONCE, 10) | {"simulation.network.PIECES": 0.0} | {"attend.attention.cache.PAGE_BYTES": 1 << 10}
    return replace(chosen, settings=settings, sizes=sizes, compute_seconds=0.0, pauses=0.0, kernel=1 << 20, files=None, kill_after=None)


def grows(operation: str, beside: str) -> tuple[bool, Work, Work]:
    """Whether the work of an operation grows with what is beside it; a second without calls may, if no iteration of it does."""
    _, few, many = (work(OPERATIONS[operation], FILLS[beside], n) for n in (1, FEW, MANY))  # the first one imports and fills caches
    more = many.largest - few.largest if operation in SPREAD else many.total - few.total
    more_bytes = 0 if operation in LISTS else many.bytes - few.bytes
    return more > GROWS * (MANY - FEW) or more_bytes > GROWS_BYTES * (MANY - FEW), few, many


def main(only: list[str]) -> str | None:
    """Print the table, or the row of `only`, an operation and what is beside it; returns what grows."""
    print(f"| operation | beside | work at {FEW} | at {MANY} | most in one iteration, at {FEW} | at {MANY} | bytes at {FEW} | at {MANY} |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    found = []
    for name, beside in [tuple(only)] if only else product(OPERATIONS, FILLS):
        if (name, beside) not in IMPOSSIBLE:
            more, few, many = grows(name, beside)
            found += [f"{name} beside {beside} grows"] if more else []
            numbers = few.total, many.total, few.largest, many.largest, few.bytes, many.bytes
            print(f"| {name} | {beside} | {' | '.join(map(str, numbers))} |", flush=True)
    return "\n".join(found) or None
