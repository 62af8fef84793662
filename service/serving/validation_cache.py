"""What has been found out about requests of one shape, so that the next of them need not be looked at again.

Whether a request is valid, fits its layer and is admitted depends on the shapes of its query, key and value, and on its plain fields: never
on the numbers in those three, of which `bind` alone asks that they be finite. For a small request finding it out costs as much as its
arithmetic. So it is kept with the layer, and ends with it. Masks, lengths and biases are judged by their values: requests that hold other
tensors than the three are looked at every time.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from service.attention.call import Call
from service.serving.binding import sequences
from service.serving.cost import Cost
from service.spec import LayerSpec
from service.wire.schemas.attend import AttendRequest

SEQUENCES = frozenset({"query", "key", "value"})
KEPT = 64  # of one layer; the oldest goes first
LONGEST = 512  # characters of plain fields: longer ones are hardly sent twice


@dataclass(frozen=True, slots=True)
class CachedValidation:
    """All of a bound request but the numbers: in `request` stand arrays that take no memory, and `options` is the rest of its call."""

    request: AttendRequest
    options: dict[str, Any]
    cost: Cost
    in_parts: bool

    def filled(self, members: Mapping[str, Any], spec: LayerSpec) -> Call:
        """The call with these numbers. Raises InvalidRequest where one is not finite in the layer's dtype."""
        query, key, value = sequences(members["query"], members.get("key"), members.get("value"), spec)
        return Call(query, key, value, **self.options)


class ValidationCache:
    """The prepared requests of one layer. Threads share it without a lock: each step on the dictionary and on the queue is atomic, and
    neither is iterated. What one thread misses is found out again.
    """

    def __init__(self) -> None:
        self._prepared: dict[Hashable, CachedValidation] = {}
        self._oldest: deque[Hashable] = deque()  # shapes in the order in which they were kept

    def get(self, shape: Hashable) -> CachedValidation | None:
        return self._prepared.get(shape)

    def keep(self, shape: Hashable, request: AttendRequest, call: Call, cost: Cost, in_parts: bool) -> None:
        """Keeps what was found out about a request of that shape, without its numbers."""
        arrays = {name: array for name in SEQUENCES if (array := getattr(request, name)) is not None}
        hollow = {name: np.broadcast_to(np.zeros((), array.dtype), array.shape) for name, array in arrays.items()}
        options = {field.name: getattr(call, field.name) for field in fields(call) if field.name not in SEQUENCES}
        prepared = CachedValidation(request.model_copy(update=hollow), options, cost, in_parts)
        if self._prepared.setdefault(shape, prepared) is prepared:  # else another thread was first
            self._oldest.append(shape)
            if len(self._oldest) > KEPT:
                self._prepared.pop(self._oldest.popleft(), None)


def shape_of(members: Mapping[str, Any]) -> Hashable | None:
    """Equal for requests that differ in the numbers of their three sequences alone; None for one that has to be looked at."""
    parts: list[Any] = []
    length = 0
    for name, value in members.items():
        if isinstance(value, np.ndarray):
            if name not in SEQUENCES:
                return None
            parts += name, value.shape, value.dtype
        else:
            text = repr(value)  # which tells true from 1, and 1 from 1.0
            length += len(text)
            parts += name, text
    return tuple(parts) if length <= LONGEST and "query" in members else None
