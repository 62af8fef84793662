"""The queue of a device: its order, which is fair between flows, the bounds on its cost, and the time that it will take. A flow is the
calls of one caller in one size class. Nothing here uses a clock, an event loop or a thread.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996). A flow's tag is the cost of its served items, but at least the queue's
virtual time when the flow becomes active. The flow with the lowest tag is served next, and its tag grows by the cost of the served item.
The virtual time is the highest tag that was ever chosen, so an idle flow cannot accumulate credit.

Consequences: flows that always have waiting items are served equal costs, whatever the sizes of their items. The first item of a flow that
was idle waits for the item in service and at most one item of each other flow. Within a flow, items are served in order of arrival.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from service.errors import Problem
from service.serving.cost import Cost

T = TypeVar("T", bound=Hashable)
MAX_IDLE_FLOWS = 1024  # most empty flows whose tags are kept
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


class _FlowItems(Generic[T]):
    """The items of one flow, oldest first."""

    __slots__ = ("items", "tag")

    def __init__(self, tag: float) -> None:
        self.tag = tag
        self.items: deque[T] = deque()


class FairQueue(Generic[T]):
    """A fair queue. Items are compared with == and hashed."""

    def __init__(self, flow: Callable[[T], Hashable], cost: Callable[[T], float]) -> None:
        """`flow` and `cost` return an item's flow and its positive cost; both must not change while the item waits."""
        self._flow, self._cost = flow, cost
        self._flows: dict[Hashable, _FlowItems[T]] = {}  # flows with items
        self._idle: dict[Hashable, float] = {}  # tags of empty flows, if above the virtual time
        self._virtual_time = 0.0
        self.length = 0  # number of items

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        """All items, in the order in which they would be served if no more were added. The queue must not change during iteration."""
        if len(self._flows) == 1:
            yield from next(iter(self._flows.values())).items
            return
        heap = [(flow.tag, place, iter(flow.items)) for place, flow in enumerate(self._flows.values())]
        heapq.heapify(heap)
        while heap:
            tag, place, items = heap[0]
            item = next(items, None)
            if item is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (tag + self._cost(item), place, items))
                yield item

    def append(self, item: T) -> None:
        """Add an item at the end of its flow."""
        key = self._flow(item)
        flow = self._flows.get(key)
        if flow is None:
            tag = max(self._virtual_time, self._idle.pop(key, 0.0))
            flow = self._flows[key] = _FlowItems(tag)
        flow.items.append(item)
        self.length += 1

    def serve(self, items: Sequence[T]) -> None:
        """Remove these items and charge their costs to their flows. Only the first was chosen by the queue and advances the virtual
        time; the others share its batch."""
        if items:
            first = self._flows[self._flow(items[0])]
            self._virtual_time = max(self._virtual_time, first.tag)
        for item in items:
            self._flows[self._flow(item)].tag += self._cost(item)
        self.remove(items)

    def remove(self, items: Iterable[T]) -> None:
        """Remove these items without charging their flows."""
        leaving: dict[Hashable, set[T]] = {}
        for item in items:
            leaving.setdefault(self._flow(item), set()).add(item)
        for key, some in leaving.items():
            flow = self._flows[key]
            self.length -= len(some)
            while flow.items and flow.items[0] in some:
                some.remove(flow.items.popleft())
            if some:
                flow.items = deque(item for item in flow.items if item not in some)
            self._drop_if_empty(key, flow)

    def _drop_if_empty(self, key: Hashable, flow: _FlowItems[T]) -> None:
        """Remove the flow if it is empty. Its tag is remembered if it is above the virtual time."""
        if flow.items:
            return
        del self._flows[key]
        tag = flow.tag
        if tag <= self._virtual_time:
            return
        self._idle[key] = tag
        if len(self._idle) > MAX_IDLE_FLOWS:
            ahead = {one: tag for one, tag in self._idle.items() if tag > self._virtual_time}
            self._idle = dict(list(ahead.items())[-MAX_IDLE_FLOWS // 2 :])


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
