"""`Session`: one sequence, and the rows that its layer has projected."""

import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field

from service.attention.cache import KeyValueCache, first_visible
from service.errors import InvalidRequest, LengthMismatch, Problem, SessionConflict
from service.serving.layers.registry import LoadedLayer


@dataclass(slots=True, eq=False)
class Session:
    """One sequence and the rows that its layer has projected. Calls to it run one after the other, in the order in which they arrive."""

    id: str
    layer: LoadedLayer
    cache: KeyValueCache
    owner: str
    capacity: int | None
    idle_seconds: float
    used_at: float
    sequence: tuple[str, ...] | None = None  # owner, layer and id of the sequence of the Open Inference Protocol that it is
    calls: int = 0  # number of calls that use it or wait for it
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def length(self) -> int:
        return self.cache.length

    def require_length(self, expected: int | None) -> None:
        """Raises LengthMismatch if the session has another number of rows."""
        if expected is not None and expected != self.length:
            problem = Problem("/expected_length", str(self.length), str(expected))
            raise LengthMismatch(f"expected {self.length}, the length of the session, got {expected}, at /expected_length", [problem])

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. Raises InvalidRequest, or SessionConflict if rows that later queries need are freed."""
        if length > self.length:
            raise InvalidRequest.where("/length", f"at most {self.length}, the length of the session", str(length))
        if length < self.length:
            if length:
                self.require_visible(length, "/length")
            self.cache.truncate(length)

    def require_visible(self, position: int, at: str) -> None:
        """Raises SessionConflict if a query at this position sees rows that are freed."""
        first, spec = self.cache.first, self.layer.spec
        if first <= first_visible(spec, position):
            return
        lowest = bisect_left(range(self.length), first, key=lambda n: first_visible(spec, n))
        raise SessionConflict.where(
            at, f"at least {lowest}, since the first {first} rows are freed, which the layer's window or chunks hide", str(position)
        )
