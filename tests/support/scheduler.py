"""A scheduler over a layer that computes when a test lets it, and a clock that a test sets."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch

from service.attention.call import Call, Result
from service.serving.admission import ServingLimits
from service.serving.batching import BatchLimits
from service.serving.binding import make_call
from service.serving.cost import Cost
from service.serving.executor import Outcome
from service.serving.layers.registry import LayerRegistry, LoadedLayer
from service.serving.load import LIGHT_OPERATIONS
from service.serving.metrics import Metrics
from service.serving.scheduler import QueueLimits, Scheduler
from service.spec import LayerSpec
from service.wire.problems import validate
from service.wire.schemas.attend import AttendRequest

SPEC = LayerSpec(d_model=6, num_heads=3, seed=1)
REGISTRY = LayerRegistry(torch.device("cpu"), ServingLimits())
REAL = REGISTRY.make("layer", SPEC)
HEAVY = LIGHT_OPERATIONS + 1  # operations of a call that the event loop leaves to the device's thread
PATIENCE = 60  # seconds after which a test that hangs is given up; no test that passes comes near it
LOST = 5  # seconds after which a caller counts as forgotten, once everything it waited for has happened


class Attention:
    """A layer's arithmetic with a door: a call waits before it until the door is open, and may be told to fail.

    `seen` has every call that got there; `entered` is released once for each.
    """

    def __init__(self, real: Callable[[Call], Result] = REAL.attention.forward) -> None:
        self.real, self.device, self.short = real, torch.device("cpu"), None
        self.seen: list[Call] = []
        self.threads: list[int] = []
        self.entered = threading.Semaphore(0)
        self.door = threading.Event()
        self.door.set()
        self.fault: Callable[[Call], Any] = lambda call: None

    def forward(self, call: Call) -> Result:
        self.seen.append(call)
        self.threads.append(threading.get_ident())
        self.entered.release()
        assert self.door.wait(PATIENCE), "the test forgot to open the door"
        self.fault(call)
        return self.real(call)

    @property
    def sizes(self) -> list[int]:
        """Items of each call seen, in order."""
        return [call.query.shape[0] for call in self.seen]


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A scheduler over one layer with a door, and what it counts. To be used on a running loop."""

    def __init__(self, clock: Callable[[], float] | None = None, **limits: Any) -> None:
        self.attention = Attention()
        self.layer = held(self.attention)
        self.metrics = Metrics()
        queue = QueueLimits(**{name: limits.pop(name) for name in ("operations", "memory_bytes", "delay") if name in limits})
        knobs = {} if clock is None else {"clock": clock}
        self.scheduler = Scheduler(torch.device("cpu"), self.metrics, queue, BatchLimits(**limits), **knobs)
        self.unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.unhandled.append(context))

    def start(self, call: Call | None = None, operations: int = HEAVY, memory: int = 1, **knobs: Any) -> asyncio.Task[Outcome]:
        """A caller; by default with one item, and too much for the event loop."""
        call = request(1) if call is None else call
        layer = knobs.pop("layer", self.layer)
        cost = Cost({}, operations, 0, memory, 0)
        return asyncio.get_running_loop().create_task(self.scheduler.submit(layer, call, cost, **knobs))

    async def occupy(self) -> asyncio.Task[Outcome]:
        """Closes the door and waits until a call stands before it: from here on the device is busy."""
        self.attention.door.clear()
        task = self.start()
        await self.until_entered()
        return task

    async def until_entered(self) -> None:
        """Until one more call has come to the door."""
        assert await asyncio.to_thread(self.attention.entered.acquire, timeout=PATIENCE)

    def counted(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(name)
        assert value is not None
        return value


def held(attention: Any, name: str = "layer") -> LoadedLayer:
    return LoadedLayer(name, SPEC, "fingerprint", attention)


def request(b: int, seed: int = 0, queries: int = 4, **fields: Any) -> Call:
    """A bound call of b items with four queries each, unless told."""
    query = np.random.default_rng(seed).standard_normal((b, queries, 6))
    return make_call(validate(AttendRequest, {"layer": "layer", "query": query, **fields}), SPEC)


def run(test: Coroutine[Any, Any, None]) -> None:
    """The test on a loop of its own, given up if it hangs."""

    async def guarded() -> None:
        await asyncio.wait_for(test, PATIENCE)

    asyncio.run(guarded())


async def turns(n: int = 5) -> None:
    """Lets everything that is due on the loop happen."""
    for _ in range(n):
        await asyncio.sleep(0)


async def settled(*tasks: asyncio.Task[Outcome]) -> list[Any]:
    """What became of each: its outcome, or the exception. Fails, naming them, if some never end."""
    _, pending = await asyncio.wait(tasks, timeout=LOST)
    lost = [i for i, task in enumerate(tasks) if task in pending]
    for task in pending:
        task.cancel()
    assert not lost, f"calls {lost} of {len(tasks)} wait for ever"
    return await asyncio.gather(*tasks, return_exceptions=True)
