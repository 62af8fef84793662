"""Executes one batch: stack the calls, compute on the device, split the result. Independent of queue and event loop.

If the computation raises, every call of the batch gets the error. A batch that runs out of memory is split in halves, which are retried.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from attend.attention.call import Result
from attend.attention.numerics import matmul_precision
from attend.errors import AttendError, OutOfMemory
from attend.serving.batching import Entry
from attend.serving.faults import error_of_batch
from attend.serving.threads import lower_priority


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of a batch: the number of its items, its predicted operations, and whether the statistics have counted it."""

    items: int
    operations: int = 0
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, its seconds in the queue and in computation, the number of calls in its batch, and the batch's execution."""

    result: Result
    queue: float
    compute: float
    batch: int
    execution: Execution


Outcomes = Sequence[tuple[Entry, Outcome | AttendError]]


def compute(batch: Sequence[Entry], clock: Callable[[], float], on_split: Callable[[], None] = lambda: None) -> Outcomes:
    """Return every entry with its outcome or error.

    `on_split` is called each time a batch runs out of memory and is split in halves.
    """
    started = clock()
    try:
        layer = batch[0].bound.layer
        with matmul_precision(layer.spec.matmul_precision, layer.attention.device):
            results = _results(batch)
    except Exception as error:
        failed, results = [error_of_batch(error) for _ in batch], None  # one for each caller: a raised error refers to frames
    if results is not None:
        seconds, execution = clock() - started, Execution(0)
        outcomes = []
        for entry, result in zip(batch, results, strict=True):
            execution.items += entry.bound.call.options.items
            execution.operations += entry.bound.cost.operations
            outcomes.append((entry, Outcome(result, started - entry.arrived, seconds, len(batch), execution)))
        return outcomes
    if isinstance(failed[0], OutOfMemory) and len(batch) > 1:
        on_split()
        middle = len(batch) // 2
        return [pair for half in (batch[:middle], batch[middle:]) for pair in compute(half, clock, on_split)]
    return list(zip(batch, failed, strict=True))


def _results(batch: Sequence[Entry]) -> list[Result]:
    """The result of every entry, with tensors on the CPU.

    A reproducible call is computed by one thread, so that its result does not depend on the server's number of threads.
    """
    first = batch[0].bound
    layer, call, operation = first.layer.attention, first.call, first.operation
    if len(batch) > 1:
        return operation.run_batch(layer, [(entry.bound.operation, entry.bound.call) for entry in batch])
    is_cpu = layer.device.type == "cpu"
    if not is_cpu:
        call, operation = call.to(layer.device), operation.to(layer.device)
    result = one_core().submit(operation.run, layer, call).result() if call.options.reproducible else operation.run(layer, call)
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
