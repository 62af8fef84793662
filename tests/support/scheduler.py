"""A scheduler with a layer that computes when the test opens its gate, and a clock that the test sets."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch

from attend.attention.call import Call, Result
from attend.attention.operations import FORWARD
from attend.limits import BatchLimits, QueueLimits, ServingLimits
from attend.serving.batching import batch_key
from attend.serving.calls import make_call
from attend.serving.cost import Cost
from attend.serving.executor import Outcome
from attend.serving.layers.registry import LayerRegistry, LoadedLayer
from attend.serving.metrics import Metrics
from attend.serving.prepared import Prepared
from attend.serving.queueing import INLINE_OPERATIONS
from attend.serving.requests import Request
from attend.serving.scheduler import Scheduler
from attend.spec import LayerSpec
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.waiting import PATIENCE

SPEC = LayerSpec(d_model=6, num_heads=3, seed=1)
REGISTRY = LayerRegistry(torch.device("cpu"), ServingLimits())
REAL = REGISTRY.make("layer", SPEC)
HEAVY = INLINE_OPERATIONS + 1  # operations of a call that the event loop leaves to the device's thread


class Attention:
    """The arithmetic of a layer behind a gate: a call waits until the gate is open (set), and fails if `fault` raises.

    `seen` has every call that has reached the gate; `entered` is released once for each.
    """

    def __init__(self, real: Callable[[Call], Result] = REAL.attention.forward) -> None:
        self.real, self.device, self.short = real, torch.device("cpu"), None
        self.seen: list[Call] = []
        self.threads: list[int] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Callable[[Call], Any] = lambda call: None

    def forward(self, call: Call) -> Result:
        self.seen.append(call)
        self.threads.append(threading.get_ident())
        self.entered.release()
        assert self.gate.wait(PATIENCE), "the test did not open the gate"
        self.fault(call)
        return self.real(call)

    @property
    def sizes(self) -> list[int]:
        """Items of each call seen, in order."""
        return [call.query.shape[0] for call in self.seen]


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """A scheduler with one gated layer, and its metrics. To be used on a running loop."""

    def __init__(self, clock: Callable[[], float] | None = None, **limits: Any) -> None:
        self.attention = Attention()
        self.layer = layer_with(self.attention)
        self.metrics = Metrics()
        names = {"operations": "max_queue_operations", "memory_bytes": "max_queue_bytes", "delay": "batch_delay"}
        queue = QueueLimits(**{field: limits.pop(name) for name, field in names.items() if name in limits})
        knobs = {} if clock is None else {"clock": clock}
        self.scheduler = Scheduler(torch.device("cpu"), self.metrics, queue, BatchLimits(**limits), **knobs)
        self.unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.unhandled.append(context))

    def start(self, call: Call | None = None, operations: int = HEAVY, memory: int = 1, **knobs: Any) -> asyncio.Task[Outcome]:
        """Submit a call, by default of one item and too heavy for the event loop."""
        call = request(1) if call is None else call
        layer = knobs.pop("layer", self.layer)
        operation = knobs.pop("operation", FORWARD)
        key = batch_key(layer, call, operation)
        prepared = Prepared(layer, call, Cost({}, operations, 0, memory, 0), operation, batch_key=key)
        return asyncio.get_running_loop().create_task(self.scheduler.submit(prepared, Request(**knobs)))

    async def occupy(self) -> asyncio.Task[Outcome]:
        """Close the gate and submit a call that waits there, so that the device is busy."""
        self.attention.gate.clear()
        task = self.start()
        await self.until_entered()
        return task

    async def until_entered(self) -> None:
        """Wait until one more call has reached the gate."""
        assert await asyncio.to_thread(self.attention.entered.acquire, timeout=PATIENCE)

    def counted(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(name)
        assert value is not None
        return value


def layer_with(attention: Any, name: str = "layer") -> LoadedLayer:
    """A loaded layer that computes with `attention`."""
    return LoadedLayer(name, SPEC, "fingerprint", attention)


def heavy_call(attention: Any, operations: int = HEAVY, b: int = 1) -> Prepared:
    """A call that `attention` computes, of so many operations."""
    return Prepared(layer_with(attention), request(b), Cost({}, operations, 0, 1, 0))


def request(b: int, seed: int = 0, queries: int = 4, **fields: Any) -> Call:
    """A call of b items, with nothing left to refuse."""
    query = np.random.default_rng(seed).standard_normal((b, queries, 6))
    return make_call(validate(AttendRequest, {"layer": "layer", "query": query, **fields}), SPEC)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run the test on a new event loop; it fails if it hangs."""

    async def with_timeout() -> None:
        await asyncio.wait_for(test, PATIENCE)

    asyncio.run(with_timeout())


async def loop_iterations(n: int = 5) -> None:
    """Let the event loop run what is due."""
    for _ in range(n):
        await asyncio.sleep(0)


async def outcomes_of(*tasks: asyncio.Task[Outcome]) -> list[Any]:
    """The outcome or the exception of each call. Fails if some do not end."""
    _, pending = await asyncio.wait(tasks, timeout=PATIENCE)
    lost = [i for i, task in enumerate(tasks) if task in pending]
    for task in pending:
        task.cancel()
    assert not lost, f"calls {lost} of {len(tasks)} do not end"
    return await asyncio.gather(*tasks, return_exceptions=True)


def assert_answers(outcomes: list[Any], calls: list[Call]) -> None:
    """Every outcome is the result of its own call."""
    for outcome, call in zip(outcomes, calls, strict=True):
        assert isinstance(outcome, Outcome), repr(outcome)
        expected = REAL.attention.forward(call)
        for name, tensor in expected.tensors.items():
            error = (outcome.result.tensors[name] - tensor).abs().max().item() if tensor.numel() else 0.0
            assert error <= 1e-6 * tensor.abs().max().item() if tensor.numel() else True
            assert outcome.result.tensors[name].shape == tensor.shape
