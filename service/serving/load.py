"""The predicted load of a device: bounds the cost of the waiting calls, and estimates how long they will take. Uses no clock."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from service.errors import Problem
from service.serving.cost import Cost

LIGHT_OPERATIONS = 1 << 24  # operations; on a CPU well under a millisecond, less than a thread switch costs other calls
SIZE_CLASS_BOUNDS = (LIGHT_OPERATIONS, 1 << 28, 1 << 32, 1 << 36)  # most operations of each size class; larger calls form one more class
MIN_MEASURED_SECONDS = 0.001  # seconds; shorter measurements show overhead, not the device's speed
DEFAULT_RATE = 1e9  # operations per second, assumed before any measurement
SMOOTHING = 0.25  # weight of a new measurement in the moving average


def size_class(operations: int) -> int:
    """The size class of a call with so many predicted operations: 0 for light calls; the bound of each class is 16 times the last."""
    return bisect_left(SIZE_CLASS_BOUNDS, operations)


class Flow(NamedTuple):
    """The calls of one caller in one size class."""

    caller: str  # empty for internal calls
    size: int


INTERNAL = Flow("", 0)  # light internal calls, such as probes


@dataclass(slots=True)
class Load:
    """Number and predicted cost of the waiting calls, of one flow or of all."""

    calls: int = 0
    operations: int = 0
    memory_bytes: int = 0

    def add(self, cost: Cost, count: int) -> None:
        self.calls += count
        self.operations += count * cost.operations
        self.memory_bytes += count * cost.memory_bytes


class Occupancy:
    """Predicted operations and bytes of the waiting calls, with two bounds on each.

    All calls together stay within the limit, and the calls of one flow take at most as much as stays free. So one flow alone fills at most
    half of the queue, two fill a third each, and there is always room for another. Internal calls are subject to the first bound only.
    """

    def __init__(self, operations: int, memory_bytes: int) -> None:
        self.operations, self.memory_bytes = operations, memory_bytes
        self.total = Load()
        self.flows: dict[Flow, Load] = {}

    def add(self, flow: Flow, cost: Cost) -> None:
        self.total.add(cost, 1)
        self.flows.setdefault(flow, Load()).add(cost, 1)

    def remove(self, flow: Flow, cost: Cost) -> None:
        self.total.add(cost, -1)
        load = self.flows[flow]
        load.add(cost, -1)
        if not load.calls:
            del self.flows[flow]

    def refusal(self, flow: Flow, cost: Cost) -> Problem | None:
        """The bound that a call would exceed, with its setting; None if it may enter the queue. An empty queue accepts any call."""
        total, own = self.total, self.flows.get(flow, Load())
        if not total.calls:
            return None
        bounds = (
            ("max_queue_operations", "operations", self.operations, total.operations, own.operations, cost.operations),
            ("max_queue_bytes", "bytes", self.memory_bytes, total.memory_bytes, own.memory_bytes, cost.memory_bytes),
        )
        for setting, unit, largest, waiting, _, more in bounds:
            if waiting + more > largest:
                return Problem("", f"a queue of at most {largest} {unit} in all ({setting})", f"{more} in addition to {waiting}")
        for setting, unit, largest, waiting, mine, more in bounds if own.calls and flow.caller else ():
            if mine + more > largest - waiting:
                expected = f"waiting calls of one caller and size of at most as many {unit} as are free ({setting})"
                return Problem("", expected, f"{mine + more}, with {largest - waiting} free")
        return None


class Throughput:
    """Moving averages of the seconds per operation, one for each size class, since large and small calls use a device differently."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def calibrate(self, operations: int, seconds: float) -> None:
        """Discard all averages and start from this measurement."""
        self._means = {size_class(operations): max(seconds, MIN_MEASURED_SECONDS / 10) / operations}

    def observe(self, size: int, operations: int, seconds: float) -> None:
        """Record that calls of size class `size` with `operations` in total took `seconds`."""
        if seconds <= MIN_MEASURED_SECONDS or not operations:
            return
        mean = self._means.get(size, seconds / operations)
        self._means[size] = mean + SMOOTHING * (seconds / operations - mean)

    def seconds(self, size: int, operations: int) -> float:
        """Expected seconds for calls of size class `size` with `operations` in total, from the nearest class that was measured."""
        nearest = min(self._means, key=lambda known: abs(known - size), default=None)
        return operations * (1 / DEFAULT_RATE if nearest is None else self._means[nearest])
