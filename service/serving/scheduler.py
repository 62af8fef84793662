"""The asyncio shell round `batches`: a bounded queue in front of one device, and the thread on which it computes.

    submit -> waiting -> take -> stack -> compute -> split -> settle

What is there when the device is free is the batch; nothing waits for company unless a delay is set. A future is settled only if it is
not done; a call whose caller has gone is dropped before it costs anything. Whatever fails reaches every call of its batch, and the loop
goes on.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from service.attention.call import Call
from service.errors import AttendError, CallerGone, DeadlinePassed, OutOfMemory, Overloaded, Problem
from service.serving.batches import BatchLimits, Entry, take
from service.serving.catalogue import HeldLayer
from service.serving.computing import Outcome, Settled, compute, failure
from service.serving.cost import Cost
from service.serving.metrics import Metrics

INLINE_OPERATIONS = 1 << 24  # on a CPU, arithmetic of well under a millisecond, less than the way to a thread and back costs others
MOMENT = 0.001  # seconds; what takes less says more of a call's overhead than of the device's speed
RATE = 1e9  # operations per second of a device of which nothing is known yet
OOM_UNREADY = 3  # calls in a row that did not fit into memory after which the device is no longer called ready


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, by cost. `delay` is how long an idle device waits for company, in seconds."""

    operations: int = 2_000_000_000_000
    memory_bytes: int = 1 << 31
    delay: float = 0.0


class Scheduler:
    """One device, one thread. All methods but the computing itself run on the event loop."""

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
        self.waiting: deque[Entry] = deque()
        self.out_of_memory = 0  # calls in a row
        self._asides: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        self._busy = self._planned = self._aside_last = self._swept = False
        self._operations = self._memory = 0  # of all that waits
        self._rate = RATE  # operations per second, learnt
        self.finished_at = -math.inf  # when something last came back from the device
        self._finished = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"compute-{device}")

    @property
    def healthy(self) -> bool:
        return self.out_of_memory < OOM_UNREADY

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being computed."""
        return self._busy or bool(self.waiting)

    @property
    def load(self) -> tuple[int, int, int]:
        """Calls, predicted operations and predicted bytes that wait."""
        return len(self.waiting), self._operations, self._memory

    @property
    def backlog(self) -> float:
        """Predicted seconds until the queue is empty."""
        return self._operations / self._rate

    async def submit(
        self, layer: HeldLayer, call: Call, cost: Cost, deadline: float | None = None, gone: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """The outcome of a bound call. Raises Overloaded, DeadlinePassed, OutOfMemory, CallerGone, or ServiceFault."""
        self._admit(cost)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        abandoned = lambda: future.cancelled() or gone()  # noqa: E731  # two things to ask of a future
        answered = lambda: future.done() and not future.cancelled()  # noqa: E731
        entry = Entry(layer, call, cost, self.clock(), deadline, abandoned, answered, partial(_settle, future))
        self.waiting.append(entry)
        self._operations += cost.operations
        self._memory += cost.memory_bytes
        self._next(loop)
        timer = None if deadline is None else loop.call_later(max(0.0, deadline - self.clock()), entry.settle, _too_late())
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()

    async def moves(self, seconds: float) -> bool:
        """Whether anything comes back from the device within that time."""
        self._finished.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._finished.wait(), seconds)
            return True
        return False

    def learn(self, operations: int, seconds: float) -> None:
        """Takes the device's speed from one call as it is; what follows only corrects it."""
        self._rate = operations / max(seconds, MOMENT / 10)

    async def aside(self, work: Callable[[], None]) -> None:
        """Runs something else on the device's thread, between batches: nothing computes beside it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._asides.append((work, future))
        self._next(loop)
        await future

    def close(self) -> None:
        self._thread.shutdown()

    def _admit(self, cost: Cost) -> None:
        """A full queue is an answer. An empty one takes any call that passed admission."""
        if not self.waiting or self._fits(cost):
            return
        if not self._swept:  # once between two batches: looking at all that wait for each that comes would be work without end
            self._swept = True
            self._drop([entry for entry in self.waiting if entry.gone() and not entry.done()])
            self.waiting = deque(entry for entry in self.waiting if not entry.done() and not entry.gone())
            self._count()
        if self.waiting and not self._fits(cost):
            wanted = f"room in a queue of {self.limits.operations} operations and {self.limits.memory_bytes} bytes (max_queue_…)"
            got = f"{cost.operations} operations and {cost.memory_bytes} bytes beside {len(self.waiting)} waiting calls"
            raise Overloaded(max(1, math.ceil(self.backlog)), problems=[Problem("", wanted, got)])

    def _fits(self, cost: Cost) -> bool:
        operations, memory = self._operations + cost.operations, self._memory + cost.memory_bytes
        return operations <= self.limits.operations and memory <= self.limits.memory_bytes

    def _count(self) -> None:
        """Adds up what waits; in between, each that comes is added."""
        self._operations = sum(entry.cost.operations for entry in self.waiting)
        self._memory = sum(entry.cost.memory_bytes for entry in self.waiting)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives a free device something to do: a batch, once the loop has taken in whatever else has arrived by now, or an aside.

        Where both wait they take turns, so that neither waits for ever.
        """
        if self._busy:
            return
        if self._asides and not (self.waiting and self._aside_last):
            work, future = self._asides.popleft()
            self._busy = self._aside_last = True
            done = self._thread.submit(work)
            done.add_done_callback(lambda ran: loop.call_soon_threadsafe(self._aside_done, loop, future, ran.exception()))
        elif self.waiting and not self._planned:
            self._planned = True
            if self.limits.delay:
                loop.call_later(self.limits.delay, self._dispatch, loop)
            else:
                loop.call_soon(self._dispatch, loop)

    def _aside_done(self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]", error: BaseException | None) -> None:
        self._busy = False
        if error is None:
            self._moved()
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)
        self._next(loop)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._planned = False
        if self._busy:  # an aside came first; what ends it plans again
            return
        self._aside_last = False
        everyone = list(self.waiting)
        try:
            batch, expired, abandoned = take(self.waiting, self.batch_limits, self.clock())
            self._count()
            self._swept, everyone = False, batch
            for entry in expired:
                entry.settle(_too_late())
            self._drop(abandoned)
            if batch:
                self.metrics.batched(len(batch))
                self._start(loop, batch)
            else:
                self._next(loop)
        except Exception as error:  # whatever it is, nobody may wait for ever
            self.waiting = deque(entry for entry in self.waiting if entry not in everyone)
            self._count()
            self._finish(loop, [(entry, failure(error)) for entry in everyone])

    def _start(self, loop: asyncio.AbstractEventLoop, batch: list[Entry]) -> None:
        operations = sum(entry.cost.operations for entry in batch)
        small = operations <= INLINE_OPERATIONS and batch[0].call.question is None  # metrics are many small steps
        if self.device.type == "cpu" and small and not self.limits.delay:
            self._finish(loop, compute(batch, self.clock, self.metrics.split))
        else:
            self._busy = True
            done = self._thread.submit(compute, batch, self.clock, self.metrics.split)
            done.add_done_callback(lambda future: loop.call_soon_threadsafe(self._finish, loop, future.result()))

    def _moved(self) -> None:
        self.finished_at = self.clock()
        self._finished.set()

    def _drop(self, abandoned: Sequence[Entry]) -> None:
        """Lets go of calls that nobody waits for; their coroutines, if they still do, end as well."""
        for entry in abandoned:
            entry.settle(CallerGone())
        if abandoned:
            self.metrics.abandoned(len(abandoned))

    def _finish(self, loop: asyncio.AbstractEventLoop, settled: Settled) -> None:
        self._busy = False
        if any(isinstance(outcome, Outcome) for _, outcome in settled):
            self._moved()
        for entry, outcome in settled:
            fits = not isinstance(outcome, OutOfMemory)
            self.out_of_memory = 0 if fits else self.out_of_memory + 1
            if isinstance(outcome, Outcome) and outcome.compute > MOMENT and entry.cost.operations:
                self._rate += 0.1 * (entry.cost.operations * outcome.batch / outcome.compute - self._rate)
            entry.settle(outcome)
        self._next(loop)


def _settle(future: "asyncio.Future[Outcome]", outcome: Outcome | AttendError) -> None:
    if future.done():
        return
    if isinstance(outcome, Outcome):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _too_late() -> DeadlinePassed:
    return DeadlinePassed("the caller's deadline (X-Request-Timeout, or the protocol's own) passed before there was an answer")
