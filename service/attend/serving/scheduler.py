"""Queues calls for one device, fairly and within bounds, and runs them on the device's thread.

    submit -> waiting -> form_batch -> stack -> compute -> split -> settle

| state | `_running` | `_scheduled` | calls wait | what ends it |
|---|---|---|---|---|
| idle | no | no | no | a call is submitted: scheduled |
| scheduled | no | yes | yes | `_dispatch` in the next iteration of the event loop, or after `delay`: running, or idle if no call is left |
| running | yes | no | perhaps | the thread has computed the batch: scheduled if calls wait, else idle |

A flow is the calls of one caller in one size class; flows share the device fairly. When the device becomes free, a batch is formed from the
calls that wait then. On a CPU a batch is one call, or several steps of sessions, and calls of few operations are computed inline: at once,
on the event loop, in any state. Handing one over to the thread takes longer than computing it. A call that is too large for one process
does not wait either: other processes compute its parts (`shards.py`).

A call whose caller has disconnected is dropped before it is computed. If a batch fails, all of its calls get the error, and later batches
are not affected.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from attend.errors import AttendError, CallerGone, DeadlinePassed, OutOfMemory, Overloaded
from attend.limits import BatchLimits, QueueLimits
from attend.serving.admission import cost_of_part
from attend.serving.batching import Job, form_batch
from attend.serving.executor import Outcome, Outcomes, compute, compute_alone
from attend.serving.faults import error_of_batch
from attend.serving.metrics import Metrics
from attend.serving.prepared import Prepared
from attend.serving.queueing import INLINE_OPERATIONS, FairQueue, Flow, Occupancy, Throughput, size_class
from attend.serving.requests import TOO_LATE, Request
from attend.serving.shards import Shards, merge_results, split_call
from attend.serving.threads import call_in_loop, lower_priority

OVERHEAD_OPERATIONS = 1 << 20  # operations added to the cost of any call
OVERDUE_FACTOR = 10  # a batch that takes longer than this many times its predicted seconds is overdue
SWEEP_SHARE = 16  # the waiting calls are swept once for this share of their number of new calls
UNHEALTHY_AFTER = 3  # after so many consecutive calls that ran out of memory, the device is unhealthy


class Running(NamedTuple):
    """The batch on the device's thread: when it started, and the seconds it was predicted to take."""

    started: float
    predicted: float


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
        self.shards: Shards | None = None  # compute the jobs that are too large for one process; engine.py
        self.out_of_memory = 0  # consecutive calls that ran out of memory
        self.finished_at = -math.inf  # when the device last finished something
        self._finished = asyncio.Event()
        self._inline = device.type == "cpu" and not self.limits.batch_delay
        self._queue: FairQueue[Job] = FairQueue(lambda job: job.flow, lambda job: job.prepared.cost.operations + OVERHEAD_OPERATIONS)
        self._occupancy = Occupancy(self.limits.max_queue_operations, self.limits.max_queue_bytes)
        self._throughput = Throughput()
        self._running: Running | None = None
        self._scheduled = False  # whether `_dispatch` will be called
        self._arrivals = 0  # calls since the waiting ones were last swept
        self._thread = ThreadPoolExecutor(1, f"compute-{device}", lower_priority)

    @property
    def healthy(self) -> bool:
        return self.out_of_memory < UNHEALTHY_AFTER

    @property
    def waiting(self) -> list[Job]:
        """The waiting calls, in the order in which they would be served without batching."""
        return list(self._queue)

    @property
    def busy(self) -> bool:
        """Whether any call waits or is being computed."""
        return self._running is not None or len(self._queue) > 0

    @property
    def load(self) -> tuple[int, int, int]:
        """Number, predicted operations and predicted bytes of the waiting calls."""
        return self._occupancy.calls, self._occupancy.operations.used, self._occupancy.memory_bytes.used

    @property
    def backlog(self) -> float:
        """Predicted seconds until all current calls are finished, estimated per size class."""
        running = 0.0 if self._running is None else max(0.0, self._running.started + self._running.predicted - self.clock())
        return running + sum(self._throughput.seconds(flow.size, operations) for flow, operations in self._occupancy.operations.items())

    @property
    def overdue(self) -> float:
        """Seconds by which the running batch exceeds OVERDUE_FACTOR times its predicted seconds; 0 if it does not."""
        return 0.0 if self._running is None else max(0.0, self.clock() - self._running.started - OVERDUE_FACTOR * self._running.predicted)

    @property
    def retry_after(self) -> int:
        """Whole seconds until the queue is empty if no calls arrive; at least 1."""
        return max(1, round(self.backlog))

    async def submit(self, prepared: Prepared, request: Request | None = None) -> Outcome:
        """Compute a prepared request and return its outcome. Without `request` nobody waits for it.

        Raises Overloaded, DeadlinePassed, OutOfMemory, CallerGone, ServiceFault, or what `Shards.compute` raises.
        """
        arrived, request = self.clock(), request or Request()
        if prepared.in_parts and self.shards is not None:
            return await self._compute_in_parts(prepared, request.deadline, arrived, self.shards)
        if not self.computes_inline(prepared):
            return await self._enqueue(prepared, request, arrived)
        if request.gone():
            self.metrics.count_abandoned(1)
            raise CallerGone
        if request.deadline is not None and request.deadline <= arrived:
            raise DeadlinePassed(TOO_LATE)
        self.metrics.count_batch(1)
        outcome = compute_alone(prepared, arrived, self.clock)
        self._record(outcome)
        try:
            if isinstance(outcome, AttendError):
                raise outcome
            return outcome
        finally:
            del outcome  # an error's traceback refers to this frame; such a cycle would keep the tensors

    def computes_inline(self, prepared: Prepared) -> bool:
        """Whether it is computed on the event loop at once, alone."""
        if not self._inline or not prepared.operation.is_one_pass or prepared.cost.operations > INLINE_OPERATIONS:
            return False
        # a reproducible call may wait for the one thread that computes such calls, and the first gradient loads modules of torch
        call = prepared.call
        return call is None or not (call.options.reproducible or "output_gradient" in call.optional_inputs)

    async def wait_for_progress(self, seconds: float) -> bool:
        """Wait until the device finishes something, at most `seconds`. Returns whether it did."""
        self._finished.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # asyncio.wait_for of Python 3.11 may ignore that its caller is cancelled
                await self._finished.wait()
            return True
        return False

    def calibrate(self, operations: int, seconds: float) -> None:
        """Set the device's estimated speed from one measured call; later calls correct it."""
        self._throughput.calibrate(operations, seconds)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _compute_in_parts(self, prepared: Prepared, deadline: float | None, arrived: float, shards: Shards) -> Outcome:
        """The outcome of a request that the shards compute. Their results are merged on the device's thread."""
        layer, call, cost = prepared.layer, prepared.call, prepared.cost
        parts = split_call(call, shards.count)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - arrived):
                results = await shards.compute(layer, parts, cost_of_part(cost, len(parts)))
        except TimeoutError:
            raise DeadlinePassed(TOO_LATE) from None
        result = await asyncio.get_running_loop().run_in_executor(self._thread, merge_results, layer.attention, call, results)
        return Outcome(result, 0.0, self.clock() - arrived, 1, call.options.items, cost.operations)

    async def _enqueue(self, prepared: Prepared, request: Request, arrived: float) -> Outcome:
        """Wait for the outcome of a call in the queue."""
        job = Job(prepared, request, arrived, Flow(request.caller, size_class(prepared.cost.operations)))
        self._require_room(job)
        loop = asyncio.get_running_loop()
        job.future = future = loop.create_future()
        is_first = not self.busy
        self._queue.append(job)
        self._occupancy.add(job.flow, prepared.cost)
        self._schedule_batch(loop, self.limits.batch_delay if is_first else 0.0)
        if request.deadline is not None:
            job.timer = loop.call_later(max(0.0, request.deadline - self.clock()), self._expire, job)
        try:
            outcome: Outcome = await (asyncio.shield(future) if prepared.operation.changes_state else future)
            return outcome
        except asyncio.CancelledError:
            future.add_done_callback(_retrieve)
            if job.is_computing:  # its session is in use until it is computed
                await asyncio.wait([future])
            else:
                future.cancel()
                if job in self._queue:
                    self._drop([job])
            raise
        finally:
            if job.timer is not None:
                job.timer.cancel()
            del job, future  # which have an error whose traceback refers to this frame, as in `submit`

    def _require_room(self, job: Job) -> None:
        """Raises Overloaded if the queue is full, also without the calls whose callers have disconnected. An empty queue accepts any call.

        To sweep the queue takes time in proportion to its length, so there is one sweep for a share of that number of calls.
        """
        self._arrivals += 1
        if self._occupancy.refusal(job.flow, job.prepared.cost) is None:
            return
        if self._arrivals * SWEEP_SHARE >= len(self._queue):
            self._arrivals = 0
            self._drop([waiting for waiting in self._queue if waiting.is_abandoned()])
        if (refusal := self._occupancy.refusal(job.flow, job.prepared.cost)) is not None:
            raise Overloaded(self.retry_after, problems=[refusal])

    def _schedule_batch(self, loop: asyncio.AbstractEventLoop, delay: float = 0.0) -> None:
        """If calls wait and the device is free, form a batch soon: in the next iteration of the event loop, so that it includes the calls
        that arrive until then, or in `delay` seconds.
        """
        if self._running is not None or self._scheduled or not len(self._queue):
            return
        self._scheduled = True
        if delay:
            loop.call_later(delay, self._dispatch, loop)
        else:
            loop.call_soon(self._dispatch, loop)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Form a batch and start to compute it on the device's thread."""
        self._scheduled = False
        affected: Sequence[Job] = ()
        try:
            affected, expired, abandoned = form_batch(self._queue, self.batch_limits, self.clock())
            for job in expired:
                self._expire(job)
            self._drop(abandoned)
            self._remove(affected, served=True)
            if affected:
                self.metrics.count_batch(len(affected))
                self._start(loop, affected)
        except Exception as error:  # every call must be settled, whatever failed
            affected = affected or self.waiting
            self._remove([job for job in affected if job in self._queue])
            self._finish(loop, [(job, error_of_batch(error)) for job in affected])
        self._schedule_batch(loop)

    def _start(self, loop: asyncio.AbstractEventLoop, batch: Sequence[Job]) -> None:
        """Compute a batch on the device's thread."""
        predicted = self._throughput.seconds(batch[0].flow.size, sum(job.prepared.cost.operations for job in batch))
        self._running = Running(self.clock(), predicted)
        for job in batch:
            job.is_computing = job.prepared.operation.changes_state
            if job.is_computing and job.timer is not None:
                job.timer.cancel()  # its session is in use until it is computed, so the next call to it has to wait

        def finish(computed: Future[Outcomes]) -> None:  # a parameter: a closure would be a cycle, which would keep the tensors
            error = computed.exception()
            self._finish(loop, computed.result() if error is None else [(job, error_of_batch(error)) for job in batch])

        computed = self._thread.submit(compute, batch, self.clock, self.metrics.count_split)
        computed.add_done_callback(lambda done: call_in_loop(loop, finish, done))

    def _finish(self, loop: asyncio.AbstractEventLoop, settled: Outcomes) -> None:
        """Settle the calls of a batch that was computed or failed, and schedule the next one."""
        self._running = None
        for job, outcome in settled:
            self._record(outcome)
            if isinstance(outcome, Outcome) and outcome.is_counted:
                self._throughput.observe(job.flow.size, outcome.operations, outcome.compute)
            job.settle(outcome)
        self._schedule_batch(loop)

    def _record(self, outcome: Outcome | AttendError) -> None:
        """Update the health of the device from a computed call. Calls that the event loop computes while the device is busy do not show
        that the device works."""
        self.out_of_memory = self.out_of_memory + 1 if isinstance(outcome, OutOfMemory) else 0
        if self._running is None and isinstance(outcome, Outcome):
            self.finished_at = self.clock()
            self._finished.set()

    def _remove(self, jobs: Sequence[Job], served: bool = False) -> None:
        """Remove jobs from the queue; charge them to their flows if they are served."""
        for job in jobs:
            self._occupancy.remove(job.flow, job.prepared.cost)
        if served:
            self._queue.serve(jobs)
        else:
            self._queue.remove(jobs)

    def _expire(self, job: Job) -> None:
        """Settle a call whose deadline has passed."""
        if job in self._queue:
            self._remove([job])
        job.settle(DeadlinePassed(TOO_LATE))

    def _drop(self, abandoned: Sequence[Job]) -> None:
        """Remove, settle and count waiting calls whose callers have disconnected."""
        self._remove(abandoned)
        for job in abandoned:
            job.settle(CallerGone())
        if abandoned:
            self.metrics.count_abandoned(len(abandoned))


def _retrieve(future: asyncio.Future[Outcome]) -> None:
    """Look at the error of a call whose caller has left, which asyncio would otherwise log as never retrieved."""
    if not future.cancelled():
        future.exception()
