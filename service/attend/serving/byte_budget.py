"""Bounds the bytes that one process accepts at once, over all protocols, and each caller's share of them.

`admission.py` bounds the cost of one call, `queueing.py` the cost of the calls that wait for the device.
"""

import math
import time
from collections.abc import Callable
from types import TracebackType

from attend.errors import Overloaded, Problem
from attend.serving.fair_share import FairShare

SHARE_OF_FREE = 2  # a caller may use at most SHARE_OF_FREE times the bytes that stay free
RATE_TIME_CONSTANT = 5.0  # time constant, in seconds, of the decaying average of released bytes
MAX_RETRY_AFTER = 30  # seconds; longer estimates would be meaningless


class ByteBudget(FairShare[str]):
    """Bounds the bytes of request bodies and replies in memory to `capacity`, of which each caller has a fair share.

    One request takes at most half of the capacity, so that the largest legal request can be admitted together with others.
    """

    __slots__ = ("_at", "_released", "clock", "held", "largest_request")

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(capacity, SHARE_OF_FREE)
        self.clock = clock
        self.largest_request = capacity // 2  # most bytes that one request takes
        self.held = 0  # like `used`, with all bytes of each request
        self._released, self._at = 0.0, clock()  # decaying sum of the bytes given back, and the time of its last update

    def check_room(self, caller: str, size: int) -> None:
        """Raises Overloaded if the caller may not take `size` more bytes. Does not take them."""
        if (lacking := self.shortage(caller, size)) is None:
            return
        if lacking.of_caller:
            expected = f"request bodies and replies of one caller of at most {self.times} times the free bytes (max_buffered_bytes)"
            got = f"{self.taken(caller) + size}, with {self.capacity - self.used - size} free"
        else:
            expected = f"request bodies and replies of at most {self.capacity} bytes in all (max_buffered_bytes)"
            got = f"{size} in addition to {self.used}"
        raise Overloaded(self._wait(lacking.missing), problems=[Problem("", expected, got)])

    def _wait(self, missing: float) -> int:
        """Whole seconds until `missing` bytes are released at the recent rate; at most MAX_RETRY_AFTER."""
        rate = self._released * math.exp((self._at - self.clock()) / RATE_TIME_CONSTANT) / RATE_TIME_CONSTANT
        return math.ceil(min(missing / rate, MAX_RETRY_AFTER)) if rate else MAX_RETRY_AFTER


class Lease:
    """The bytes of a ByteBudget that one request of a caller uses, from the arrival of its body until its reply is sent. It starts with 0
    bytes; a `with` block releases them at its end."""

    __slots__ = ("budget", "caller", "held", "used")  # all bytes, and those that the budget counts

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self.budget, self.caller, self.held, self.used = budget, caller, 0, 0

    def check_room(self, size: int) -> None:
        """Raises Overloaded if there is no room for `size` more bytes. Does not take them."""
        if growth := min(self.held + size, self.budget.largest_request) - self.used:
            self.budget.check_room(self.caller, growth)

    def add(self, size: int) -> None:
        """Take `size` more bytes. Raises Overloaded if there is no room."""
        self.resize(self.held + size, bounded=True)

    def resize(self, size: int, *, bounded: bool = False) -> None:
        """Set the lease to `size` bytes; 0 releases it. `bounded`: raises Overloaded if these are more than before and there is no room for
        them; else they are in memory already.

        What `shortage`, `take` and `give_back` do is written out, since every request comes here three times.
        """
        budget, caller = self.budget, self.caller
        used = size if size < budget.largest_request else budget.largest_request
        taken = used - self.used
        own = budget._taken.get(caller, 0) + taken
        if bounded and taken > 0:
            free = budget.capacity - budget.used - taken
            if free < 0 or own > budget.times * free:
                budget.check_room(caller, taken)
        budget.held += size - self.held
        budget.used += taken
        self.held, self.used = size, used
        if taken < 0:
            now = budget.clock()
            budget._released, budget._at = budget._released * math.exp((budget._at - now) / RATE_TIME_CONSTANT) - taken, now
        if own:
            budget._taken[caller] = own
        elif taken:
            del budget._taken[caller]

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.resize(0)
