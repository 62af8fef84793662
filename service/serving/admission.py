"""Budget for the bytes of request bodies and replies that one process holds at once, whatever protocol brought them."""

import math
import time
from collections.abc import Callable
from types import TracebackType

from service.errors import Overloaded, Problem

SHARE = 2  # times the free bytes that one caller may hold
MEMORY = 5.0  # seconds after which a release counts for 1/e in the rate of releases
LONGEST_WAIT = 30  # seconds: later the rate says nothing


class ByteBudget:
    """At most `capacity` bytes at once, of which no caller can take all.

    A caller may hold at most SHARE times what stays free (a dynamic threshold as in Choudhury and Hahne, "Dynamic queue length thresholds
    for shared-memory packet switches", 1998): two thirds of the capacity where nobody else holds anything, less beside others. Whoever
    comes later finds room. One request counts as half of the capacity at most, so that the largest legal one is admitted beside others.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.held, self.clock = capacity, 0, clock
        self._released, self._at = 0.0, clock()  # counted bytes, fading with time; as of then
        self._counted = 0  # of `held`, with at most half of the capacity for each request
        self._callers: dict[str, int] = {}  # what each caller has of `_counted`

    def lease(self, caller: str) -> "Lease":
        """The bytes of one request of that caller: empty at first, given back when the block ends."""
        return Lease(self, caller)

    def count(self, held: int) -> int:
        """What a request that holds so many bytes counts as."""
        return min(held, self.capacity // 2)

    def demand(self, caller: str, size: int) -> None:
        """Raises Overloaded where the caller may not have `size` counted bytes more."""
        owned, free = self._callers.get(caller, 0) + size, self.capacity - self._counted - size
        if free < 0:
            expected = f"room for request bodies and replies of {self.capacity} bytes in all (max_queue_bytes)"
            raise Overloaded(self._wait(-free), problems=[Problem("", expected, f"{size} beside {self._counted}")])
        if owned > SHARE * free:
            expected = f"one caller's request bodies and replies to be at most {SHARE} times what is left free (max_queue_bytes)"
            missing = (owned - SHARE * free) / (1 + SHARE)  # the caller's own bytes, which become free ones
            raise Overloaded(self._wait(missing), problems=[Problem("", expected, f"{owned} bytes beside {free} free ones")])

    def _wait(self, missing: float) -> int:
        """Seconds until so many bytes are released, at the rate of the last seconds."""
        rate = self._released * self._fading() / MEMORY
        return math.ceil(min(missing / rate, LONGEST_WAIT)) if rate else LONGEST_WAIT

    def _fading(self) -> float:
        return math.exp((self._at - self.clock()) / MEMORY)

    def take(self, caller: str, held: int, counted: int) -> None:
        """Adds to what the caller holds, or takes away from it."""
        self.held += held
        self._counted += counted
        if counted < 0:
            self._released = self._released * self._fading() - counted
            self._at = self.clock()
        owned = self._callers.get(caller, 0) + counted
        if owned:
            self._callers[caller] = owned
        else:
            self._callers.pop(caller, None)


class Lease:
    """The share of a ByteBudget that one request holds, from before its body is read until its reply is sent."""

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self.budget, self.caller, self.held = budget, caller, 0

    def demand(self, size: int) -> None:
        """Raises Overloaded where there is no room for `size` more bytes. Takes none."""
        count = self.budget.count
        if growth := count(self.held + size) - count(self.held):
            self.budget.demand(self.caller, growth)

    def add(self, size: int) -> None:
        """Take `size` more bytes. Raises Overloaded where there is no room for them."""
        self.demand(size)
        self.resize(self.held + size)

    def resize(self, size: int) -> None:
        """Hold `size` bytes from now on, whether there is room for them or not: they are there already."""
        count = self.budget.count
        self.budget.take(self.caller, size - self.held, count(size) - count(self.held))
        self.held = size

    def release(self) -> None:
        """Give all bytes back. A second time it does nothing."""
        self.resize(0)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
