"""Queues calls for one device, fairly and within bounds, and runs batches of them on the device's thread or the event loop.

    submit -> waiting -> take -> stack -> compute -> split -> settle

A flow is the calls of one caller in one size class; flows share the device fairly. On a CPU, light calls have a separate queue and are
computed on the event loop, even while the device's thread computes others. When the device becomes free, a batch is formed from the calls
that are queued then; no call waits for more calls unless a delay is set. A call whose caller has disconnected is dropped before it is
computed. If a batch fails, all of its calls get the error, and later batches are not affected.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from service.attention.call import Call
from service.attention.layer import Operation
from service.errors import AttendError, CallerGone, DeadlinePassed, OutOfMemory, Overloaded
from service.serving.batching import BatchLimits, Entry, take
from service.serving.cost import Cost
from service.serving.executor import Execution, Outcome, Settled, compute, failure
from service.serving.fair_queue import FairQueue
from service.serving.layers.registry import HeldLayer
from service.serving.metrics import Metrics
from service.serving.occupancy import Flow, Occupancy
from service.serving.requests import TOO_LATE
from service.serving.throughput import LIGHT, Throughput, size_class

INLINE_OPERATIONS = LIGHT  # most operations of a batch that is computed on the event loop
OVERHEAD = 1 << 20  # operations added to the cost of any call
SLOWEST = 10  # a batch that takes longer than this many times its predicted seconds is overdue
OOM_UNREADY = 3  # after so many consecutive calls that ran out of memory, the device is unhealthy


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The largest total cost of the waiting calls. `delay`: seconds that a call to an idle device waits for others."""

    operations: int = 2_000_000_000_000
    memory_bytes: int = 1 << 31
    delay: float = 0.0


class Scheduler:
    """Schedules the calls of one device, which has one thread. All methods run on the event loop."""

    def __init__(
        self,
        device: torch.device,
        metrics: Metrics,
        queue: QueueLimits | None = None,
        batch: BatchLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.metrics, self.clock = device, metrics, clock
        self.limits, self.batch_limits = queue or QueueLimits(), batch or BatchLimits()
        self._on_cpu = device.type == "cpu"  # cached: reading `device.type` takes microseconds
        self.out_of_memory = 0  # consecutive calls that ran out of memory
        self._light: FairQueue[Entry] = FairQueue(lambda entry: entry.flow, _work)  # computed on the event loop
        self._heavy: FairQueue[Entry] = FairQueue(lambda entry: entry.flow, _work)  # computed on the device's thread
        self._occupancy = Occupancy(self.limits.operations, self.limits.memory_bytes)
        self._throughput = Throughput()
        self._asides: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        self._busy = self._apart = self._planned = self._aside_last = self._swept = False
        self._running = (0.0, 0.0)  # when the batch on the device's thread started, and the seconds it was predicted to take
        self.finished_at = -math.inf  # when the device last finished something
        self._finished = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"compute-{device}")

    @property
    def healthy(self) -> bool:
        return self.out_of_memory < OOM_UNREADY

    @property
    def waiting(self) -> list[Entry]:
        """The waiting calls, light ones first, each queue in the order in which it would be served without batching."""
        return [*self._light, *self._heavy]

    @property
    def busy(self) -> bool:
        """Whether any call waits or is being computed."""
        return self._busy or self._light.length > 0 or self._heavy.length > 0

    @property
    def load(self) -> tuple[int, int, int]:
        """Number, predicted operations and predicted bytes of the waiting calls."""
        total = self._occupancy.total
        return total.calls, total.operations, total.memory_bytes

    @property
    def backlog(self) -> float:
        """Predicted seconds until all current calls are finished, estimated per size class."""
        started, predicted = self._running
        running = max(0.0, started + predicted - self.clock()) if self._busy else 0.0
        flows = self._occupancy.flows.items()
        return running + sum(self._throughput.seconds(flow.size, held.operations) for flow, held in flows)

    @property
    def overdue(self) -> float:
        """Seconds by which the running batch exceeds SLOWEST times its predicted seconds; 0 if it does not."""
        started, predicted = self._running
        return max(0.0, self.clock() - started - SLOWEST * predicted) if self._busy else 0.0

    @property
    def retry_after(self) -> int:
        """Whole seconds until the queue is empty if no calls arrive; at least 1."""
        return max(1, round(self.backlog))

    async def submit(
        self,
        layer: HeldLayer,
        call: Call,
        cost: Cost,
        deadline: float | None = None,
        gone: Callable[[], bool] = lambda: False,
        caller: str = "",
        operation: Operation | None = None,
    ) -> Outcome:
        """Queue a bound call and return its outcome. Runs `operation` if given, else the layer's forward pass.

        Raises Overloaded, DeadlinePassed, OutOfMemory, CallerGone, or ServiceFault.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        abandoned = lambda: future.cancelled() or gone()  # noqa: E731  # the caller no longer waits
        answered = lambda: future.done() and not future.cancelled()  # noqa: E731
        flow = Flow(caller, size_class(cost.operations))
        entry = Entry(layer, call, cost, self.clock(), deadline, abandoned, answered, partial(_settle, future), flow, operation)
        self._admit(entry)
        rested = not self.busy
        self._queue_of(entry).append(entry)
        self._occupancy.add(entry.flow, cost)
        delayed = self.limits.delay and rested and entry.may_share  # `may_share` last: a batch key is expensive for a short call
        self._next(loop, self.limits.delay if delayed else 0.0)
        timer = None if deadline is None else loop.call_later(max(0.0, deadline - self.clock()), entry.settle, _too_late())
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()

    async def moves(self, seconds: float) -> bool:
        """Wait until the device finishes something, at most `seconds`. Returns whether it did."""
        self._finished.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._finished.wait(), seconds)
            return True
        return False

    def learn(self, operations: int, seconds: float) -> None:
        """Set the device's estimated speed from one measured call; later calls correct it."""
        self._throughput.learn(operations, seconds)

    async def aside(self, work: Callable[[], None]) -> None:
        """Run `work` on the device's thread between batches, while no call is computed, not even on the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._asides.append((work, future))
        self._next(loop)
        await future

    def close(self) -> None:
        self._thread.shutdown()

    def _queue_of(self, entry: Entry) -> FairQueue[Entry]:
        """The light queue for light calls on a CPU, except operations, which are many small steps. With a delay, there is one queue."""
        light = entry.cost.operations <= INLINE_OPERATIONS and entry.operation is None
        return self._light if light and self._on_cpu and not self.limits.delay else self._heavy

    def _admit(self, entry: Entry) -> None:
        """Raises Overloaded if the queue is full. An empty queue accepts any call."""
        flow, cost = entry.flow, entry.cost
        if self._occupancy.has_room(flow, cost):
            return
        if not self._swept:  # at most once between batches: sweeping the queues for every refused call would be too slow
            self._swept = True
            for queue in (self._light, self._heavy):
                self._drop([entry for entry in queue if entry.gone() and not entry.done()])
                self._remove(queue, [entry for entry in queue if entry.gone() or entry.done()])
        if (refusal := self._occupancy.refusal(flow, cost)) is not None:
            raise Overloaded(self.retry_after, problems=[refusal])

    def _remove(self, queue: FairQueue[Entry], entries: Sequence[Entry], served: Sequence[Entry] = ()) -> None:
        """Remove entries from a queue, and charge those in `served` to their flows."""
        for entry in entries:
            self._occupancy.remove(entry.flow, entry.cost)
        queue.serve(served)
        if len(served) < len(entries):
            queue.remove([entry for entry in entries if entry not in served] if served else entries)

    def _next(self, loop: asyncio.AbstractEventLoop, delay: float = 0.0) -> None:
        """Start other work, or plan to form batches in the next iteration of the event loop, so that calls that arrive first are included.

        If both wait for the device, they alternate. `delay` postpones the batches by so many seconds.
        """
        if self._apart or self._planned:
            return
        if self._asides and not self._busy and not ((self._light.length or self._heavy.length) and self._aside_last):
            work, future = self._asides.popleft()
            self._busy = self._apart = self._aside_last = True
            self._running = (self.clock(), 0.0)
            done = self._thread.submit(work)
            done.add_done_callback(lambda ran: loop.call_soon_threadsafe(self._aside_done, loop, future, ran.exception()))
        elif self._light.length or (self._heavy.length and not self._busy):
            self._planned = True
            if delay:
                loop.call_later(delay, self._dispatch, loop)
            else:
                loop.call_soon(self._dispatch, loop)

    def _aside_done(self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]", error: BaseException | None) -> None:
        self._busy = self._apart = False
        if error is None:
            self._moved()
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)
        self._next(loop)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a batch on the device if it is free, and compute a batch of light calls on the event loop."""
        self._planned = False
        if self._apart:  # `_aside_done` calls `_next`
            return
        if not self._busy:
            self._aside_last = False
            if self._heavy.length:
                self._serve(loop, self._heavy, self.batch_limits)
        if self._light.length:
            limits = self.batch_limits
            if self._busy:
                limits = replace(limits, operations=min(limits.operations, INLINE_OPERATIONS))
            self._serve(loop, self._light, limits)
        self._next(loop)

    def _serve(self, loop: asyncio.AbstractEventLoop, queue: FairQueue[Entry], limits: BatchLimits) -> None:
        """Form a batch from a queue and compute it."""
        everyone = list(queue)
        affected: Sequence[Entry] = everyone
        try:
            left = deque(everyone)
            batch, expired, abandoned = take(left, limits, self.clock())
            staying = set(left)
            self._remove(queue, [entry for entry in everyone if entry not in staying] if left else everyone, batch)
            self._swept, everyone, affected = False, [], batch
            for entry in expired:
                entry.settle(_too_late())
            self._drop(abandoned)
            if batch:
                self.metrics.batched(len(batch))
                self._start(loop, batch, queue is self._light)
        except Exception as error:  # every call must be settled, whatever failed
            self._remove(queue, everyone)
            self._finish(loop, [(entry, failure(error)) for entry in affected])

    def _start(self, loop: asyncio.AbstractEventLoop, batch: list[Entry], light: bool) -> None:
        """Compute a batch on the event loop if it is small and from the light queue, else on the device's thread."""
        operations = sum(entry.cost.operations for entry in batch)
        if light and operations <= INLINE_OPERATIONS:
            self._finish(loop, compute(batch, self.clock, self.metrics.split))
            return
        self._busy, self._running = True, (self.clock(), self._throughput.seconds(batch[0].flow.size, operations))
        done = self._thread.submit(compute, batch, self.clock, self.metrics.split)
        done.add_done_callback(lambda future: loop.call_soon_threadsafe(self._finish_device, loop, future.result()))

    def _moved(self) -> None:
        self.finished_at = self.clock()
        self._finished.set()

    def _drop(self, abandoned: Sequence[Entry]) -> None:
        """Settle calls whose callers have disconnected."""
        for entry in abandoned:
            entry.settle(CallerGone())
        if abandoned:
            self.metrics.abandoned(len(abandoned))

    def _finish_device(self, loop: asyncio.AbstractEventLoop, settled: Settled) -> None:
        self._busy = False
        self._finish(loop, settled)

    def _finish(self, loop: asyncio.AbstractEventLoop, settled: Settled) -> None:
        """Settle calls. If the device is busy, these were computed on the event loop and do not show that the device works."""
        if not self._busy and any(isinstance(outcome, Outcome) for _, outcome in settled):
            self._moved()
        measured: Execution | None = None
        for entry, outcome in settled:
            fits = not isinstance(outcome, OutOfMemory)
            self.out_of_memory = 0 if fits else self.out_of_memory + 1
            if isinstance(outcome, Outcome) and outcome.execution is not measured:
                measured = outcome.execution
                self._throughput.observe(entry.flow.size, outcome.execution.operations, outcome.compute)
            entry.settle(outcome)
        self._next(loop)


def _work(entry: Entry) -> float:
    """The cost of a call in the fair queue, in operations."""
    return entry.cost.operations + OVERHEAD


def _settle(future: "asyncio.Future[Outcome]", outcome: Outcome | AttendError) -> None:
    if future.done():
        return
    if isinstance(outcome, Outcome):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _too_late() -> DeadlinePassed:
    return DeadlinePassed(TOO_LATE)
