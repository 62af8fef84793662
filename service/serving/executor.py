"""Executes one batch: stack the calls, compute on the device, split the result. Independent of queue and event loop.

If the computation raises, every call of the batch gets the error. A batch that runs out of memory is split in halves, which are retried.
"""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import torch

from service.attention.call import Call, Result
from service.attention.layer import Operation
from service.errors import AttendError, OutOfMemory, ServiceFault
from service.serving.batching import Entry, halves, split, stack, stacks
from service.serving.layers.registry import HeldLayer

NO_MEMORY = ("can't allocate memory", "can't start new thread", "failed to map segment")  # messages of torch, Python and the linker


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


Settled = Sequence[tuple[Entry, Outcome | AttendError]]


def compute(batch: Sequence[Entry], clock: Callable[[], float], splitting: Callable[[], None] = lambda: None) -> Settled:
    """Return every entry with its outcome or error; never raise.

    `splitting` is called each time a batch runs out of memory and is split in halves.
    """
    started = clock()
    try:
        results = _results(batch)
    except Exception as error:
        failed, results = failure(error), None
    if results is not None:
        took, together = clock() - started, len(batch)
        execution = Execution(sum(entry.call.query.shape[0] for entry in batch), sum(entry.cost.operations for entry in batch))
        return [(entry, Outcome(result, started - entry.arrived, took, together, execution)) for entry, result in results]
    if isinstance(failed, OutOfMemory) and len(batch) > 1:
        splitting()
        return [pair for half in halves(batch) for pair in compute(half, clock, splitting)]
    return [(entry, failed) for entry in batch]


def _results(batch: Sequence[Entry]) -> list[tuple[Entry, Result]]:
    """Every entry with its result, grouped by stack."""
    stacked = list(stacks(batch))
    results = run(batch[0].layer, [stack([entry.call for entry in entries]) for entries in stacked], batch[0].operation)
    pairs: list[tuple[Entry, Result]] = []
    for entries, result in zip(stacked, results, strict=True):
        pairs += zip(entries, split(_on_cpu(result), [entry.call.query.shape[0] for entry in entries]), strict=True)
    return pairs


def run(layer: HeldLayer, calls: Sequence[Call], operation: Operation | None = None) -> Sequence[Result]:
    """Compute the calls on the layer's device. A call with an operation, or a reproducible one, must be the only one.

    A reproducible call is computed by one thread, so that its result does not depend on the server's number of threads.
    """
    attention = layer.attention
    calls = [call.to(attention.device) for call in calls]
    if len(calls) > 1:
        return attention.forward_batch(calls)
    forward = attention.forward if operation is None else partial(operation.to(attention.device), attention)
    return [one_core().submit(forward, calls[0]).result() if calls[0].reproducible else forward(calls[0])]


@cache
def one_core() -> ThreadPoolExecutor:
    """An executor whose one thread computes on one core. Created by the first call, which must precede computation in other threads.

    `torch.set_num_threads` sets the number for the calling thread and the default for all threads that start to compute later. So it is
    called once in the new thread, and the default is then restored. If it were called around each reproducible call, a thread that starts
    to compute at that moment would keep one core for ever.
    """
    default = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix="one-core")
    thread.submit(_take_one_core).result()
    torch.set_num_threads(default)
    return thread


def _take_one_core() -> None:
    torch.get_num_threads()  # a thread reads the default on first use, which would otherwise undo the next line
    torch.set_num_threads(1)


def _on_cpu(result: Result) -> Result:
    if all(tensor.device.type == "cpu" for tensor in result.tensors.values()):
        return result
    fully_masked = None if result.fully_masked is None else result.fully_masked.cpu()
    return Result({name: tensor.cpu() for name, tensor in result.tensors.items()}, fully_masked)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def failure(error: Exception) -> AttendError:
    """The error for every call of a batch that failed with `error`: OutOfMemory or ServiceFault."""
    if is_out_of_memory(error):
        return OutOfMemory("the call passed admission, but the memory for it was not there")
    fault = ServiceFault("computing failed")
    fault.__cause__ = error  # OutOfMemory gets no cause: the traceback would keep the tensors alive
    return fault
