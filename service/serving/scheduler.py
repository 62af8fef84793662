"""Bound calls -> results, one at a time on the device's own thread, so that the event loop never waits for arithmetic."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from service.attention.call import Call, Result
from service.errors import AttendError, OutOfMemory, ServiceFault
from service.serving.catalogue import HeldLayer


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, and the seconds it waited and took."""

    result: Result
    queue: float
    compute: float


class Scheduler:
    """One device, one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"compute-{device}")

    async def submit(self, layer: HeldLayer, call: Call) -> Outcome:
        """The outcome of the call. Raises OutOfMemory, or ServiceFault where computing failed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _compute, layer, call, time.monotonic())

    def close(self) -> None:
        self._thread.shutdown()


def _compute(layer: HeldLayer, call: Call, submitted: float) -> Outcome:
    started = time.monotonic()
    try:
        result = on_cpu(run(layer, call))
    except AttendError:
        raise
    except Exception as error:
        raise failure(error) from error
    return Outcome(result, started - submitted, time.monotonic() - started)


def run(layer: HeldLayer, call: Call) -> Result:
    """The call through its layer. A reproducible one takes one thread and the one way, whatever runs beside it."""
    call = call.to(layer.attention.device)
    if not call.reproducible:
        return layer.attention(call)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return layer.attention(call)
    finally:
        torch.set_num_threads(threads)


def on_cpu(result: Result) -> Result:
    """The result with its tensors in main memory."""
    return Result({name: tensor.cpu() for name, tensor in result.tensors.items()}, result.fully_masked_rows, result.first_masked)


def failure(error: Exception) -> AttendError:
    """What a caller is told of an exception inside compute."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OutOfMemory("the call passed admission, but the memory for it was not there")
    return ServiceFault("computing failed")
