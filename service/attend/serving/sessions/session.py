"""A session: one sequence, whose projected keys and values the server keeps."""

import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field

from attend.attention.cache import KeyValueCache, first_visible
from attend.errors import InvalidRequest, LengthMismatch, Problem, SessionConflict
from attend.serving.layers.registry import LoadedLayer
from attend.spec import LayerSpec

SequenceKey = tuple[str, str, str]  # owner, layer and id of a sequence of the Open Inference Protocol


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
    sequence: SequenceKey | None = None  # the sequence of the Open Inference Protocol that it is
    calls: int = 0  # number of calls that use it or wait for it
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the call that uses it

    @property
    def length(self) -> int:
        return self.cache.length

    def require_length(self, expected: int | None) -> None:
        """Raises LengthMismatch if the session has another number of rows."""
        if expected is not None and expected != self.length:
            problem = Problem("/expected_length", str(self.length), str(expected))
            raise LengthMismatch(f"the length of the session is {self.length}, but expected_length is {expected}", [problem], self.length)

    def require_finite_rows(self, spec: LayerSpec) -> None:
        """Raises InvalidRequest if the projections of the rows of the last step overflow: no later step could use them."""
        if not self.cache.finite:
            expected = f"rows whose projected keys and values are finite in {spec.dtype}"
            raise InvalidRequest.where("", expected, "some that overflow")

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
