"""Forms batches of waiting calls. Needs no clock, event loop or thread.

Calls whose operations have equal batch keys may share a batch. Only GPUs stack calls (`attention/stacking.py`). On a CPU every call runs
alone: batches of mixed lengths gained less than a third (docs/performance.md). Steps of sessions share batches on any device.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attend.attention.call import Call
from attend.attention.operations import FORWARD, Operation
from attend.limits import BatchLimits
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.queueing import Flow
from attend.serving.requests import Request
from attend.serving.rounding import may_amplify_rounding

MAX_EXAMINED = 4096  # waiting calls that are looked at for one batch, so that forming it takes a few milliseconds at most


def batch_key(layer: LoadedLayer, call: Call, operation: Operation = FORWARD) -> tuple[Any, ...] | None:
    """Calls with equal keys may share a batch; None if the call must run alone. Reads the numbers of the call, so it may take long."""
    key = operation.batch_key(call)
    if key is None or may_amplify_rounding(layer.spec, layer.score_deviation, call, operation.largest_cached_row()):
        return None
    return id(layer), *key


@dataclass(slots=True, eq=False)
class Job:
    """A prepared request in the queue, or on the device's thread."""

    prepared: Prepared
    request: Request
    arrived: float  # on the scheduler's clock
    flow: Flow
    future: "asyncio.Future[Any] | None" = None  # the caller waits for it
    timer: asyncio.TimerHandle | None = None  # settles the call at its deadline
    is_computing: bool = False  # whether it is a step of a session that the device computes

    def is_abandoned(self) -> bool:
        """Whether the caller has cancelled the call or disconnected."""
        return (self.future is not None and self.future.cancelled()) or self.request.gone()

    def settle(self, outcome: Any) -> None:
        """Give the caller an outcome or an exception, unless it has one already or was cancelled."""
        if self.future is None or self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def limits_on(device: torch.device, calls: int) -> BatchLimits:
    """The limits for a device: at most `calls` calls on a GPU, one on a CPU."""
    return BatchLimits(1 if device.type == "cpu" else calls)


def form_batch(waiting: Iterable[Job], limits: BatchLimits, now: float) -> tuple[list[Job], list[Job], list[Job]]:
    """(batch, expired, abandoned): the first live call with later ones that may join it, and the calls found that need not be computed.

    Calls are looked at until the batch can take no more, at most MAX_EXAMINED after the first of the batch.
    """
    batch: list[Job] = []
    expired, abandoned = [], []
    operations = memory = examined = 0
    largest = limits.calls
    for job in waiting:
        cost, deadline = job.prepared.cost, job.request.deadline
        if job.is_abandoned():
            abandoned.append(job)
        elif deadline is not None and deadline <= now:
            expired.append(job)
        elif not batch or (
            operations + cost.operations <= limits.operations
            and memory + cost.memory_bytes <= limits.memory_bytes
            and job.prepared.batch_key == batch[0].prepared.batch_key
        ):
            batch.append(job)
            operations += cost.operations
            memory += cost.memory_bytes
            largest = job.prepared.operation.largest_batch or limits.calls
        examined += len(batch) > 0
        if batch and (len(batch) >= largest or examined > MAX_EXAMINED or batch[0].prepared.batch_key is None):
            break
    return batch, expired, abandoned
