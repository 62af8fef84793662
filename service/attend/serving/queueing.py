"""A queue that is fair to callers, bounds on the cost of what waits in it, and an estimate of how long that takes.

Calls of one caller with costs of one size class are a flow, and flows take turns. Nothing here uses a clock, an event loop or a thread.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996). A flow's tag is the cost of its served items, but at least the queue's
virtual time when the flow becomes active. The flow with the lowest tag is served next, and its tag grows by the cost of the served item.
The virtual time is the highest tag that was ever chosen, so an idle flow cannot accumulate credit.

Consequences: flows that always have waiting items are served equal costs, whatever the sizes of their items. The first item of a flow that
was idle waits for the item in service and at most one item of each other flow. Within a flow, items are served in order of arrival.
"""

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from attend.errors import Problem
from attend.serving.cost import Cost
from attend.serving.fair_share import FairShare

T = TypeVar("T", bound=Hashable)
MAX_IDLE_FLOWS = 1024  # most empty flows whose tags are kept
INLINE_OPERATIONS = 1 << 24  # operations; on a CPU well under a millisecond, less than a thread switch costs other calls
SIZE_CLASS_BOUNDS = (INLINE_OPERATIONS, 1 << 28, 1 << 32, 1 << 36)  # most operations of each size class; larger calls form one more class
MIN_MEASURED_SECONDS = 0.001  # seconds; shorter measurements show overhead, not the device's speed
DEFAULT_RATE = 1e9  # operations per second, assumed before any measurement
SMOOTHING = 0.25  # weight of a new measurement in the moving average


def size_class(operations: int) -> int:
    """The size class of a call with so many predicted operations: 0 if it may be computed inline. Each bound is 16 times the last."""
    return bisect_left(SIZE_CLASS_BOUNDS, operations)


class Flow(NamedTuple):
    """The calls of one caller in one size class."""

    caller: str  # empty for internal calls
    size: int


class _FlowItems(Generic[T]):
    """The items of one flow, oldest first: a linked list, in which any item is found and removed in constant time."""

    __slots__ = ("items", "number", "tag")

    def __init__(self, tag: float, number: int) -> None:
        self.tag, self.number = tag, number
        self.items: OrderedDict[T, None] = OrderedDict()


class FairQueue(Generic[T]):
    """A fair queue. Items are compared with == and hashed. Adding, finding the first item and removing take O(log flows) for each item."""

    def __init__(self, flow: Callable[[T], Hashable], cost: Callable[[T], float]) -> None:
        """`flow` and `cost` return an item's flow and its positive cost; both must not change while the item waits."""
        self._flow, self._cost = flow, cost
        self._flows: dict[Hashable, _FlowItems[T]] = {}  # flows with items
        self._by_tag: list[tuple[float, int, Hashable]] = []  # heap of (tag, number, flow); outdated unless the flow has both
        self._idle: dict[Hashable, float] = {}  # tags of empty flows, if above the virtual time
        self._virtual_time = 0.0
        self._numbers = count()  # of flows, in order of their first items: of equal tags, the oldest is served first
        self.length = 0  # number of items

    def __len__(self) -> int:
        return self.length

    def __contains__(self, item: T) -> bool:
        flow = self._flows.get(self._flow(item))
        return flow is not None and item in flow.items

    def __iter__(self) -> Iterator[T]:
        """All items, in the order in which they would be served if no more were added. The queue must not change during iteration.

        The first item costs little, so that a consumer that needs no more does not pay for all flows.
        """
        if (first := self.first()) is None:
            return
        yield first
        heap = [(flow.tag, flow.number, iter(flow.items)) for flow in self._flows.values()]
        heapq.heapify(heap)
        while heap:
            tag, number, items = heap[0]
            item = next(items, None)
            if item is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (tag + self._cost(item), number, items))
                if item is not first:
                    yield item

    def first(self) -> T | None:
        """The item that is served next; None if the queue is empty."""
        while self._by_tag:
            tag, number, key = self._by_tag[0]
            flow = self._flows.get(key)
            if flow is not None and (flow.tag, flow.number) == (tag, number):
                return next(iter(flow.items))
            heapq.heappop(self._by_tag)
        return None

    def append(self, item: T) -> None:
        """Add an item at the end of its flow."""
        key = self._flow(item)
        flow = self._flows.get(key)
        if flow is None:
            tag = max(self._virtual_time, self._idle.pop(key, 0.0))
            flow = self._flows[key] = _FlowItems(tag, next(self._numbers))
            self._order(key, flow)
        flow.items[item] = None
        self.length += 1

    def serve(self, items: Sequence[T]) -> None:
        """Remove these items and charge their costs to their flows. Only the first was chosen by the queue and advances the virtual
        time; the others share its batch."""
        if items:
            first = self._flows[self._flow(items[0])]
            self._virtual_time = max(self._virtual_time, first.tag)
        charged: dict[Hashable, _FlowItems[T]] = {}
        for item in items:
            key = self._flow(item)
            charged[key] = flow = self._flows[key]
            flow.tag += self._cost(item)
        self.remove(items)
        for key, flow in charged.items():
            if flow.items:
                self._order(key, flow)

    def remove(self, items: Iterable[T]) -> None:
        """Remove these items without charging their flows."""
        for item in items:
            key = self._flow(item)
            flow = self._flows[key]
            del flow.items[item]
            self.length -= 1
            if not flow.items:
                self._drop_empty(key, flow)

    def _order(self, key: Hashable, flow: _FlowItems[T]) -> None:
        """Enter a flow with a new tag into the heap, which is rebuilt when most of its entries are outdated."""
        heapq.heappush(self._by_tag, (flow.tag, flow.number, key))
        if len(self._by_tag) > 2 * len(self._flows) + MAX_IDLE_FLOWS:
            self._by_tag = [(one.tag, one.number, name) for name, one in self._flows.items()]
            heapq.heapify(self._by_tag)

    def _drop_empty(self, key: Hashable, flow: _FlowItems[T]) -> None:
        """Remove an empty flow. Its tag is remembered if it is above the virtual time."""
        del self._flows[key]
        tag = flow.tag
        if tag <= self._virtual_time:
            return
        self._idle[key] = tag
        if len(self._idle) > MAX_IDLE_FLOWS:
            ahead = {one: tag for one, tag in self._idle.items() if tag > self._virtual_time}
            self._idle = dict(list(ahead.items())[-MAX_IDLE_FLOWS // 2 :])


class Occupancy:
    """Predicted operations and bytes of the waiting calls, of which each flow has a fair share.

    The calls of a flow take at most as much as stays free: one flow alone fills at most half of the queue, two fill a third each. The first
    call of a flow needs only room.
    """

    def __init__(self, operations: int, memory_bytes: int) -> None:
        self.calls = 0
        self.operations: FairShare[Flow] = FairShare(operations, times=1)
        self.memory_bytes: FairShare[Flow] = FairShare(memory_bytes, times=1)

    def add(self, flow: Flow, cost: Cost) -> None:
        self.calls += 1
        self.operations.take(flow, cost.operations)
        self.memory_bytes.take(flow, cost.memory_bytes)

    def remove(self, flow: Flow, cost: Cost) -> None:
        self.calls -= 1
        self.operations.give_back(flow, cost.operations)
        self.memory_bytes.give_back(flow, cost.memory_bytes)

    def refusal(self, flow: Flow, cost: Cost) -> Problem | None:
        """The bound that a call would exceed, with its setting; None if it may enter the queue. An empty queue accepts any call."""
        is_first = not (self.operations.taken(flow) or self.memory_bytes.taken(flow))
        shares = (
            ("max_queue_operations", "operations", self.operations, cost.operations),
            ("max_queue_bytes", "bytes", self.memory_bytes, cost.memory_bytes),
        )
        for setting, unit, share, more in shares if self.calls else ():
            lacking = share.shortage(flow, more)
            if lacking is None or (lacking.of_caller and is_first):
                continue
            if lacking.of_caller:
                expected = f"waiting calls of one caller and size of at most as many {unit} as are free ({setting})"
                return Problem("", expected, f"{share.taken(flow) + more}, with {share.capacity - share.used} free")
            expected = f"a queue of at most {share.capacity} {unit} in all ({setting})"
            return Problem("", expected, f"{more} in addition to {share.used}")
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
