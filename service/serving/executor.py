"""Executes one batch: stack, compute on the device, split. Knows no queue and no event loop.

An exception anywhere reaches every call of the batch. A batch that runs out of memory is computed in halves.
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

NO_MEMORY = ("can't allocate memory", "can't start new thread", "failed to map segment")  # as torch, Python and the linker say it


@dataclass(slots=True, eq=False)
class Execution:
    """The number of items that the calls of one batch have together, and whether they are counted in the statistics."""

    items: int
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, the seconds it waited and took, the number of calls in its batch, and the batch's execution."""

    result: Result
    queue: float
    compute: float
    batch: int
    execution: Execution


Settled = Sequence[tuple[Entry, Outcome | AttendError]]


def compute(batch: Sequence[Entry], clock: Callable[[], float], splitting: Callable[[], None] = lambda: None) -> Settled:
    """Every entry with its outcome or error. Never raises: a failure reaches every call of the batch.

    `splitting` is called for each batch that ran out of memory and is computed in halves.
    """
    started = clock()
    try:
        results = _results(batch)
    except Exception as error:
        failed, results = failure(error), None
    if results is not None:
        took, together = clock() - started, len(batch)
        execution = Execution(sum(entry.call.query.shape[0] for entry in batch))
        return [(entry, Outcome(result, started - entry.arrived, took, together, execution)) for entry, result in results]
    if isinstance(failed, OutOfMemory) and len(batch) > 1:
        splitting()
        return [pair for half in halves(batch) for pair in compute(half, clock, splitting)]
    return [(entry, failed) for entry in batch]


def _results(batch: Sequence[Entry]) -> list[tuple[Entry, Result]]:
    """Every entry with its result, stack after stack."""
    stacked = list(stacks(batch))
    results = run(batch[0].layer, [stack([entry.call for entry in entries]) for entries in stacked], batch[0].operation)
    pairs: list[tuple[Entry, Result]] = []
    for entries, result in zip(stacked, results, strict=True):
        pairs += zip(entries, split(_on_cpu(result), [entry.call.query.shape[0] for entry in entries]), strict=True)
    return pairs


def run(layer: HeldLayer, calls: Sequence[Call], operation: Operation | None = None) -> Sequence[Result]:
    """The result of each call, on the layer's device. A call with an operation comes alone.

    A reproducible call also comes alone, and is computed by one thread, however many the server was given.
    """
    attention = layer.attention
    calls = [call.to(attention.device) for call in calls]
    if len(calls) > 1:
        return attention.forward_batch(calls)
    forward = attention.forward if operation is None else partial(operation.to(attention.device), attention)
    return [one_core().submit(forward, calls[0]).result() if calls[0].reproducible else forward(calls[0])]


@cache
def one_core() -> ThreadPoolExecutor:
    """A thread whose arithmetic takes one core, made when first needed: an engine does so before it serves.

    `torch.set_num_threads` sets the number for the thread that calls it, and besides the default for all threads that start to compute
    later. So it is called once in the new thread, and that default is then set back; calling it around each reproducible call would let
    whatever thread starts at that moment have one core for ever.
    """
    default = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix="one-core")
    thread.submit(_take_one_core).result()
    torch.set_num_threads(default)
    return thread


def _take_one_core() -> None:
    torch.get_num_threads()  # a thread takes the default when it first asks: later, it would undo the next line
    torch.set_num_threads(1)


def _on_cpu(result: Result) -> Result:
    if all(tensor.device.type == "cpu" for tensor in result.tensors.values()):
        return result
    fully_masked = None if result.fully_masked is None else result.fully_masked.cpu()
    return Result({name: tensor.cpu() for name, tensor in result.tensors.items()}, fully_masked)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the host or of the device."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def failure(error: Exception) -> AttendError:
    """The error that every call of the batch gets."""
    if is_out_of_memory(error):
        return OutOfMemory("the call passed admission, but the memory for it was not there")
    fault = ServiceFault("computing failed")
    fault.__cause__ = error  # but not of the one above: its frames hold the memory that was too much
    return fault
