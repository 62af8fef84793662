"""Budget for the bytes of request bodies and replies that one process holds at once, whatever protocol brought them."""

from types import TracebackType

from service.errors import Overloaded, Problem


class ByteBudget:
    """At most `capacity` bytes at once. A single larger body, which passed its own limit, is admitted while nothing else is held."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, 0

    def lease(self, caller: str) -> "Lease":
        """The bytes of one request of that caller: empty at first, given back when the block ends."""
        return Lease(self, caller)


class Lease:
    """The share of a ByteBudget that one request holds, from before its body is read until its reply is sent."""

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self.budget, self.caller, self.held = budget, caller, 0

    def add(self, size: int) -> None:
        """Take `size` more bytes. Raises Overloaded where the budget has no room for them."""
        budget = self.budget
        if budget.held > self.held and budget.held + size > budget.capacity:
            expected = f"room for request bodies of {budget.capacity} bytes in all (max_queue_bytes)"
            raise Overloaded(1, problems=[Problem("", expected, f"{size} beside {budget.held}")])
        budget.held += size
        self.held += size

    def release(self) -> None:
        """Give all bytes back. A second time it does nothing."""
        self.budget.held -= self.held
        self.held = 0

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
