"""Admission: the bytes, calls and messages that one process takes at once, whatever protocol brings them, and the share of one caller.

What a call costs to compute is predicted in `cost.py`, and how many calls wait for the device is bounded in `occupancy.py`.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from service.errors import DeadlinePassed, InvalidRequest, Overloaded, Problem

SHARE = 2  # times the free bytes that one caller may hold
MEMORY = 5.0  # seconds after which a release counts for 1/e in the rate of releases
LONGEST_WAIT = 30  # seconds: later the rate says nothing
MOST_TURNS = 64
Receive = Callable[[], Awaitable[Any]]  # the next message, or anything but bytes where there are no more


class ByteBudget:
    """The bytes of request bodies and replies in memory: at most `capacity` at once, of which no caller can take all.

    A caller may hold at most SHARE times what stays free (a dynamic threshold as in Choudhury and Hahne, "Dynamic queue length thresholds
    for shared-memory packet switches", 1998): two thirds of the capacity where nobody else holds anything, less beside others. So there is
    always room for another caller. One request counts as half of the capacity at most, so that the largest legal one is admitted beside
    others.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.held, self.clock = capacity, 0, clock
        self.largest_request = capacity // 2  # bytes that one request counts as, at most
        self._counted = 0  # of `held`, with at most `largest_request` for each request
        self._released, self._at = 0.0, clock()  # counted bytes, fading with time; as of then
        self._callers: dict[str, int] = {}  # what each caller has of `_counted`

    def lease(self, caller: str) -> "Lease":
        """The bytes of one request of that caller: none at first, given back when the block ends."""
        return Lease(self, caller)

    def demand(self, caller: str, size: int) -> None:
        """Raises Overloaded where the caller may not have `size` counted bytes more. Takes none."""
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

    def change(self, caller: str, held: int, counted: int) -> None:
        """Adds to what the caller holds, or takes away from it."""
        self.held += held
        if not counted:
            return
        self._counted += counted
        if counted < 0:
            self._released = self._released * self._fading() - counted
            self._at = self.clock()
        owned = self._callers.get(caller, 0) + counted
        if owned:
            self._callers[caller] = owned
        else:
            del self._callers[caller]


class Lease:
    """The bytes of a ByteBudget that one request holds, from when its body comes until its reply is sent."""

    __slots__ = ("_counted", "budget", "caller", "held")

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self.budget, self.caller, self.held, self._counted = budget, caller, 0, 0

    def demand(self, size: int) -> None:
        """Raises Overloaded where there is no room for `size` more bytes. Takes none."""
        if growth := min(self.held + size, self.budget.largest_request) - self._counted:
            self.budget.demand(self.caller, growth)

    def add(self, size: int) -> None:
        """Takes `size` more bytes. Raises Overloaded where there is no room for them."""
        held, largest = self.held + size, self.budget.largest_request
        counted = held if held < largest else largest
        if growth := counted - self._counted:
            self.budget.demand(self.caller, growth)
        self.budget.change(self.caller, size, growth)
        self.held, self._counted = held, counted

    def resize(self, size: int) -> None:
        """Holds `size` bytes from now on, whether there is room for them or not: they are there already."""
        largest = self.budget.largest_request
        counted = size if size < largest else largest
        self.budget.change(self.caller, size - self.held, counted - self._counted)
        self.held, self._counted = size, counted

    def release(self) -> None:
        """Gives all bytes back. A second time it does nothing."""
        if self.held:
            self.resize(0)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class CallLimit:
    """At most `count` calls at once, half of them of one caller; `what` is what a refusal calls them."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what = count, what
        self._total, self._taken = 0, Counter[str]()

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """A place until the block ends. Raises Overloaded where there is none."""
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


class ReceivingTurns:
    """At most `count` messages are received at once, half of them of one caller; others wait for a turn. Each takes at most `seconds`.

    For a protocol that hands over messages whole: how far one has come cannot be seen, so each counts as the largest allowed meanwhile.
    """

    def __init__(self, count: int, largest: int, seconds: float) -> None:
        self.count, self.largest, self.seconds = count, largest, seconds
        self._all = asyncio.Semaphore(count)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def receive(self, read: Receive, lease: Lease) -> bytes:
        """The message that `read` returns, whose bytes the lease holds then.

        Raises Overloaded where there is no room for it, DeadlinePassed where it does not come, InvalidRequest where there is none.
        """
        own = self._own.setdefault(lease.caller, asyncio.Semaphore(max(1, self.count // 2)))
        turn = False
        try:
            async with asyncio.timeout(self.seconds) as limit, own, self._all:
                turn = True
                limit.reschedule(asyncio.get_running_loop().time() + self.seconds)
                lease.add(self.largest)
                message = await read()
        except TimeoutError:
            if not turn:
                waited = Problem("", f"a turn among the {self.count} messages that are read at once", f"none in {self.seconds:g} seconds")
                raise Overloaded(1, problems=[waited]) from None
            raise DeadlinePassed(too_late(self.seconds)) from None
        lease.release()
        if not isinstance(message, bytes):
            raise InvalidRequest.where("", f"a message, of at most {self.largest} bytes (max_grpc_bytes)", "none")
        lease.add(len(message))
        return message


def turns_within(budget: ByteBudget, largest: int, seconds: float) -> ReceivingTurns:
    """As many turns as half of the budget has room for, since the messages are counted in it."""
    return ReceivingTurns(max(1, min(MOST_TURNS, budget.capacity // 2 // largest)), largest, seconds)


def too_late(seconds: float) -> str:
    """The detail of the error for a message that does not come."""
    return f"the message was not there {seconds:g} seconds (client_timeout) after it could come"
