"""Bounds the bytes and calls that one process accepts at once, over all protocols, and each caller's share of them.

`admission.py` bounds the cost of one call, `queueing.py` the cost of the calls that wait for the device.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from service.errors import Overloaded, Problem

SHARE_OF_FREE = 2  # a caller may use at most SHARE_OF_FREE times the bytes that stay free
RATE_TIME_CONSTANT = 5.0  # time constant, in seconds, of the decaying average of released bytes
MAX_RETRY_AFTER = 30  # seconds; longer estimates would be meaningless


class ByteBudget:
    """Bounds the bytes of request bodies and replies in memory to `capacity`, and no caller can use all of it.

    A caller may use at most SHARE_OF_FREE times the bytes that stay free: two thirds of the capacity if it is the only caller, less
    otherwise. So there is always room for another one (dynamic threshold; Choudhury and Hahne, "Dynamic queue length thresholds for
    shared-memory packet switches", 1998). One request counts as at most half of the capacity, so that the largest legal request can be
    admitted together with others.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.used, self.clock = capacity, 0, clock
        self.largest_request = capacity // 2  # most bytes that one request counts as
        self._counted = 0  # like `used`, but at most `largest_request` for each request
        self._released, self._at = 0.0, clock()  # decaying sum of released counted bytes, and the time of its last update
        self._callers: dict[str, int] = {}  # caller -> its counted bytes

    def lease(self, caller: str) -> "Lease":
        """A lease for one request of this caller. It starts with 0 bytes and releases them at the end of its `with` block."""
        return Lease(self, caller)

    def check_room(self, caller: str, size: int) -> None:
        """Raises Overloaded if the caller may not use `size` more counted bytes. Does not take them."""
        taken, free = self._callers.get(caller, 0) + size, self.capacity - self._counted - size
        if free < 0:
            expected = f"request bodies and replies of at most {self.capacity} bytes in all (max_queue_bytes)"
            raise Overloaded(self._wait(-free), problems=[Problem("", expected, f"{size} in addition to {self._counted}")])
        if taken > SHARE_OF_FREE * free:
            expected = f"request bodies and replies of one caller of at most {SHARE_OF_FREE} times the free bytes (max_queue_bytes)"
            # that this caller must release; released bytes become free
            missing = (taken - SHARE_OF_FREE * free) / (1 + SHARE_OF_FREE)
            raise Overloaded(self._wait(missing), problems=[Problem("", expected, f"{taken}, with {free} free")])

    def _wait(self, missing: float) -> int:
        """Whole seconds until `missing` bytes are released at the recent rate; at most MAX_RETRY_AFTER."""
        rate = self._released * math.exp((self._at - self.clock()) / RATE_TIME_CONSTANT) / RATE_TIME_CONSTANT
        return math.ceil(min(missing / rate, MAX_RETRY_AFTER)) if rate else MAX_RETRY_AFTER

    def change(self, caller: str, used: int, counted: int) -> None:
        """Add to the bytes of a caller; negative numbers release them."""
        self.used += used
        if not counted:
            return
        self._counted += counted
        if counted < 0:
            now = self.clock()
            self._released, self._at = self._released * math.exp((self._at - now) / RATE_TIME_CONSTANT) - counted, now
        taken = self._callers.get(caller, 0) + counted
        if taken:
            self._callers[caller] = taken
        else:
            del self._callers[caller]


class Lease:
    """The bytes of a ByteBudget that one request uses, from the arrival of its body until its reply is sent."""

    __slots__ = ("_counted", "budget", "caller", "used")

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self.budget, self.caller, self.used, self._counted = budget, caller, 0, 0

    def check_room(self, size: int) -> None:
        """Raises Overloaded if there is no room for `size` more bytes. Does not take them."""
        if growth := min(self.used + size, self.budget.largest_request) - self._counted:
            self.budget.check_room(self.caller, growth)

    def add(self, size: int) -> None:
        """Take `size` more bytes. Raises Overloaded if there is no room."""
        used, largest = self.used + size, self.budget.largest_request
        counted = used if used < largest else largest
        if growth := counted - self._counted:
            self.budget.check_room(self.caller, growth)
        self.budget.change(self.caller, size, growth)
        self.used, self._counted = used, counted

    def resize(self, size: int) -> None:
        """Set the lease to `size` bytes without a check, since they are in memory already."""
        largest = self.budget.largest_request
        counted = size if size < largest else largest
        self.budget.change(self.caller, size - self.used, counted - self._counted)
        self.used, self._counted = size, counted

    def release(self) -> None:
        """Release all bytes. Idempotent."""
        if self.used:
            self.resize(0)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class CallLimit:
    """At most `count` calls at once, and at most half of them from one caller. `what` is their noun in a refusal."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what = count, what
        self._total, self._taken = 0, Counter[str]()

    @contextmanager
    def slot(self, caller: str) -> Iterator[None]:
        """Occupy one slot during the `with` block. Raises Overloaded if none is free."""
        if self._total >= self.count or self._taken[caller] >= max(1, self.count // 2):
            raise Overloaded(1, problems=[Problem("", f"at most {self.count} {self.what} at once, half of them of one caller", "one more")])
        self._total += 1
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._total -= 1
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]
