"""Executes one batch: stack the calls, compute on the device, split the result. Independent of queue and event loop.

If the computation raises, every call of the batch gets the error. A batch that runs out of memory is split in halves, which are retried.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch

from attend.attention.call import Result
from attend.attention.numerics import matmul_precision
from attend.errors import AttendError, OutOfMemory
from attend.serving.batching import Job
from attend.serving.faults import error_of_batch
from attend.serving.prepared import Prepared
from attend.serving.threads import lower_priority

_ON_CPU = nullcontext()  # where products have one precision


class Outcome(NamedTuple):
    """The result of a job; of its batch, the seconds that it took, its jobs (`batch`), and their items and predicted operations."""

    result: Result
    queue: float  # seconds until the batch began
    compute: float
    batch: int  # jobs
    items: int
    operations: int
    is_counted: bool = True  # whether the statistics count the batch with this job: with one of its jobs


Outcomes = Sequence[tuple[Job, Outcome | AttendError]]


def compute_alone(prepared: Prepared, arrived: float, clock: Callable[[], float]) -> Outcome | AttendError:
    """The outcome of a prepared request, or its error."""
    started = clock()
    try:
        [result] = _results([prepared])
    except Exception as error:
        return error_of_batch(error)
    items = 1 if prepared.call is None else prepared.call.options.items
    return Outcome(result, started - arrived, clock() - started, 1, items, prepared.cost.operations)


def compute(batch: Sequence[Job], clock: Callable[[], float], on_split: Callable[[], None] = lambda: None) -> Outcomes:
    """Return every job with its outcome or error.

    `on_split` is called each time a batch runs out of memory and is split in halves.
    """
    if len(batch) == 1:
        return [(batch[0], compute_alone(batch[0].prepared, batch[0].arrived, clock))]
    started = clock()
    prepared = [job.prepared for job in batch]
    try:
        results = _results(prepared)
    except Exception as error:
        failed, results = [error_of_batch(error) for _ in batch], None  # one for each caller: a raised error refers to frames
    if results is not None:
        seconds = clock() - started
        items, operations = sum(each.call.options.items for each in prepared), sum(each.cost.operations for each in prepared)
        totals = seconds, len(batch), items, operations
        counted = _still_awaited(batch)
        return [(job, Outcome(result, started - job.arrived, *totals, job is counted)) for job, result in zip(batch, results, strict=True)]
    if isinstance(failed[0], OutOfMemory):
        on_split()
        middle = len(batch) // 2
        return [pair for half in (batch[:middle], batch[middle:]) for pair in compute(half, clock, on_split)]
    return list(zip(batch, failed, strict=True))


def _still_awaited(batch: Sequence[Job]) -> Job:
    """The first job whose caller still waits, or the first one."""
    return next((job for job in batch if not job.is_abandoned()), batch[0])


def _results(batch: Sequence[Prepared]) -> list[Result]:
    """The result of every prepared request, with tensors on the CPU.

    A reproducible call is computed by one thread, so that its result does not depend on the server's number of threads.
    """
    first = batch[0]
    layer, call, operation = first.layer.attention, first.call, first.operation
    is_cpu = layer.device.type == "cpu"
    with _ON_CPU if is_cpu else matmul_precision(first.layer.spec.matmul_precision, layer.device):
        if len(batch) > 1:
            return operation.run_batch(layer, [(each.operation, each.call) for each in batch])
        if not is_cpu and call is not None:
            call, operation = call.to(layer.device), operation.to(layer.device)
        alone = call is not None and call.options.reproducible
        result = one_core().submit(operation.run, layer, call).result() if alone else operation.run(layer, call)
        return [result if is_cpu else result.cpu()]


@cache
def one_core() -> ThreadPoolExecutor:
    """An executor whose one thread computes on one core. Created by the first call, which must precede computation in other threads.

    `torch.set_num_threads` sets the number for the calling thread and the default for all threads that start to compute later. So it is
    called once in the new thread, and the default is then restored. If it were called around each reproducible call, a thread that starts
    to compute at that moment would keep one core for ever.
    """
    default = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, "one-core", lower_priority)
    thread.submit(_use_one_core).result()
    torch.set_num_threads(default)
    return thread


def _use_one_core() -> None:
    torch.get_num_threads()  # a thread reads the default on first use, which would otherwise undo the next line
    torch.set_num_threads(1)
