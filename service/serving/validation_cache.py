"""Cache of validation results by request shape, one for each layer.

Whether a request is valid, fits its layer and is admitted depends on the shapes of its query, key and value and on its plain fields, never
on the numbers in those three, which only have to be finite. For a small request validation costs as much as its arithmetic. Masks, lengths
and biases are valid by their values, so requests that hold other tensors than the three are validated every time.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from service.attention.call import Call
from service.serving.cost import Cost
from service.wire.schemas.attend import AttendRequest

SEQUENCES = frozenset({"query", "key", "value"})
KEPT = 64  # of one layer; the oldest goes first
LONGEST = 512  # characters of plain fields: longer ones are hardly sent twice


@dataclass(frozen=True, slots=True)
class CachedValidation:
    """A validated request without its numbers: arrays in `request` take no memory, and `options` is the rest of its call."""

    request: AttendRequest
    options: dict[str, Any]
    cost: Cost
    in_parts: bool


class ValidationCache:
    """The validation results of one layer. Threads share it without a lock: each step on the dictionary and on the queue is atomic, and
    neither is iterated. Requests that two threads validate at once are validated twice.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, CachedValidation] = {}
        self._oldest: deque[Hashable] = deque()  # keys in the order in which they were kept

    def get(self, key: Hashable) -> CachedValidation | None:
        return self._results.get(key)

    def keep(self, key: Hashable, request: AttendRequest, call: Call, cost: Cost, in_parts: bool) -> None:
        """Keeps a validated request without its numbers."""
        arrays = {name: array for name in SEQUENCES if (array := getattr(request, name)) is not None}
        hollow = {name: np.broadcast_to(np.zeros((), array.dtype), array.shape) for name, array in arrays.items()}
        options = {field.name: getattr(call, field.name) for field in fields(call) if field.name not in SEQUENCES}
        result = CachedValidation(request.model_copy(update=hollow), options, cost, in_parts)
        if self._results.setdefault(key, result) is result:  # else another thread was first
            self._oldest.append(key)
            if len(self._oldest) > KEPT:
                self._results.pop(self._oldest.popleft(), None)


def cache_key(members: Mapping[str, Any]) -> Hashable | None:
    """Equal for requests that differ in the numbers of their three sequences alone; None for one that has to be validated."""
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
