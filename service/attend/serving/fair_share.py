"""A fair share of a bounded thing: bytes, calls, streams, the queue, sessions, pictures.

A caller may take at most `times` times what then stays free: 2 lets one caller alone take two thirds, two callers two fifths each. So no
caller takes all of it, and there is room for another (dynamic threshold; Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", 1998). Nothing here knows what is taken, or waits for it.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from attend.errors import Overloaded, Problem

C = TypeVar("C", bound=Hashable)  # the key of a caller: its name, or the name and size class of one of its flows


class Shortage(NamedTuple):
    """Why a caller may not take more: `missing` units have to be given back, by the caller itself if `of_caller`, else by anyone."""

    missing: int
    of_caller: bool  # whether the caller has taken its share; else the capacity is used up


def shortage(capacity: int, used: int, taken: int, size: int, times: int, least: int = 0) -> Shortage | None:
    """What a caller lacks to take `size` more than the `taken` that it has, while all have `used`; None if it may.

    Each caller may have `least`, as long as there is any room.
    """
    free = capacity - used - size
    if free < 0:
        return Shortage(-free, of_caller=False)
    excess = taken + size - times * free
    if excess > 0 and taken + size > least:
        return Shortage(-(-excess // (1 + times)), of_caller=True)  # what the caller gives back becomes free
    return None


class FairShare(Generic[C]):
    """Counts what callers take of a `capacity`, and what each may take. All methods take constant time."""

    __slots__ = ("_taken", "capacity", "least", "times", "used")

    def __init__(self, capacity: int, times: int, least: int = 0) -> None:
        """`least`: what each caller may have, as long as there is any room."""
        self.capacity, self.times, self.least = capacity, times, least
        self.used = 0
        self._taken: dict[C, int] = {}

    def __len__(self) -> int:
        """Number of callers that have something."""
        return len(self._taken)

    def items(self) -> Iterable[tuple[C, int]]:
        """Each caller that has something, and what it has."""
        return self._taken.items()

    def taken(self, caller: C) -> int:
        """What the caller has."""
        return self._taken.get(caller, 0)

    def shortage(self, caller: C, size: int) -> Shortage | None:
        """What is missing for `size` more; None if the caller may take it."""
        return shortage(self.capacity, self.used, self.taken(caller), size, self.times, self.least)

    def take(self, caller: C, size: int) -> None:
        """Count `size` more, without a check: what is there already has to be counted."""
        if size:
            self.used += size
            self._taken[caller] = self.taken(caller) + size

    def give_back(self, caller: C, size: int) -> None:
        """Count `size` less."""
        if size:
            self.used -= size
            if left := self._taken[caller] - size:
                self._taken[caller] = left
            else:
                del self._taken[caller]

    @contextmanager
    def slot(self, caller: C, what: str, retry_after: int = 1) -> Iterator[None]:
        """Take 1 during the `with` block. Raises Overloaded if there is none; `what` is the noun of the refusal."""
        if (lacking := self.shortage(caller, 1)) is not None:
            times = "" if self.times == 1 else f"{self.times} times "
            of_caller = f", and of one caller at most {times}as many as are free" if lacking.of_caller else ""
            raise Overloaded(retry_after, problems=[Problem("", f"at most {self.capacity} {what} at once{of_caller}", "one more")])
        self.take(caller, 1)
        try:
            yield
        finally:
            self.give_back(caller, 1)
