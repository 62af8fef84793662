"""A queue that orders items fairly between flows. Uses no clock, event loop or thread.

Start-time fair queueing (Goyal, Vin and Cheng, 1996). Items belong to flows. A flow's tag is the cost of its served items, but at least
the queue's virtual time when the flow becomes active. The flow with the lowest tag is served next, and its tag grows by the cost of the
served item. The virtual time is the highest tag that was ever chosen, so an idle flow cannot accumulate credit.

Consequences: flows that always have waiting items are served equal costs, whatever the sizes of their items. The first item of a flow that
was idle waits for the item in service and at most one item of each other flow. Within a flow, items are served in order of arrival.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
MAX_IDLE_FLOWS = 1024  # most empty flows whose tags are kept


class _Flow(Generic[T]):
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
        self._flows: dict[Hashable, _Flow[T]] = {}  # flows with items
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
            flow = self._flows[key] = _Flow(tag)
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

    def _drop_if_empty(self, key: Hashable, flow: _Flow[T]) -> None:
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
