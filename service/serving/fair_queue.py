"""Fair order of waiting work. Pure: no clock, no event loop, no thread.

Start-time fair queueing (Goyal, Vin and Cheng, 1996). Items belong to flows. Every flow has a tag: the work it has been served so far, but
never less than the queue's virtual time. The flow with the lowest tag is served next, and its tag grows by the cost of what is served. The
virtual time is the highest tag that was ever chosen: a flow that was idle cannot save up what it did not use.

So flows that always have something waiting are served equal amounts of work, whatever the sizes of their items; the first item of a flow
that was idle waits for the item in service and at most one item of each other flow; within a flow, first come is first served; and the
queue serves whenever it holds anything.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
REMEMBERED = 1024  # flows without items whose tags are kept


class _Flow(Generic[T]):
    """Items of one flow, first come first served."""

    __slots__ = ("items", "tag")

    def __init__(self, tag: float) -> None:
        self.tag = tag
        self.items: deque[T] = deque()


class FairQueue(Generic[T]):
    """Items in the order in which they are to be served. Items are told apart by identity or by their own equality."""

    def __init__(self, flow: Callable[[T], Hashable], cost: Callable[[T], float]) -> None:
        """`flow` and `cost` tell an item's flow and its cost, which is positive; both stay the same as long as the item waits."""
        self._flow, self._cost = flow, cost
        self._flows: dict[Hashable, _Flow[T]] = {}  # that have items
        self._idle: dict[Hashable, float] = {}  # tags of flows that have none, beyond the virtual time
        self._virtual_time = 0.0
        self.length = 0  # of items that wait

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        """All items, in the order in which they would be served one by one if nothing else came. The queue must not change meanwhile."""
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
        """The item is the last of its flow."""
        key = self._flow(item)
        flow = self._flows.get(key)
        if flow is None:
            tag = max(self._virtual_time, self._idle.pop(key, 0.0))
            flow = self._flows[key] = _Flow(tag)
        flow.items.append(item)
        self.length += 1

    def serve(self, items: Sequence[T]) -> None:
        """Removes these items, the first of which was chosen and the others went along, and counts their cost as work that their flows were
        served."""
        if items:
            first = self._flows[self._flow(items[0])]
            self._virtual_time = max(self._virtual_time, first.tag)
            if len(items) == 1 and first.items[0] is items[0]:  # the common case, as a few steps
                first.tag += self._cost(items[0])
                first.items.popleft()
                self.length -= 1
                self._drop_if_empty(self._flow(items[0]), first)
                return
        for item in items:
            self._flows[self._flow(item)].tag += self._cost(item)
        self.remove(items)

    def remove(self, items: Iterable[T]) -> None:
        """Removes these items, which were not served."""
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
        """Drops a flow without items; its tag is kept as long as it is ahead of the virtual time."""
        if flow.items:
            return
        del self._flows[key]
        tag = flow.tag
        if tag <= self._virtual_time:
            return
        self._idle[key] = tag
        if len(self._idle) > REMEMBERED:
            ahead = {one: tag for one, tag in self._idle.items() if tag > self._virtual_time}
            self._idle = dict(list(ahead.items())[-REMEMBERED // 2 :])
