"""Request bodies between their first byte and their answer: how many bytes of them a process holds at most. Sizes alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded, Problem


class Bodies:
    """At most `room` bytes at once; a single larger one, which passed its own limit, is taken where nothing else is held."""

    def __init__(self, room: int) -> None:
        self.room, self.held = room, 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Counts a body among those held, from before it is read until it is answered: what it yields is told of bytes to come.

        That raises Overloaded where they would be too many beside those already held.
        """
        own = 0

        def hold(size: int) -> None:
            nonlocal own
            if self.held > own and self.held + size > self.room:
                wanted = f"room for request bodies of {self.room} bytes in all (max_queue_bytes)"
                raise Overloaded(1, problems=[Problem("", wanted, f"{size} beside {self.held}")])
            self.held += size
            own += size

        try:
            yield hold
        finally:
            self.held -= own
