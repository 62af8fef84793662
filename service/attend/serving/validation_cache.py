"""Caches the validation results of one layer by request shape.

Validation, fit and admission depend on the shapes of query, key and value and on the plain fields, not on the numbers, which only must be
finite. For a small request, validation takes as long as its arithmetic. The validity of masks, lengths and biases depends on their values,
so requests with other tensors than query, key and value are always validated.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attend.attention.call import CallOptions
from attend.attention.masks import Masks
from attend.attention.operations import FORWARD, Operation
from attend.serving.cost import Cost
from attend.tensors import shape_alone
from attend.wire.schemas.attend import AttendRequest

SEQUENCE_FIELDS = frozenset({"query", "key", "value"})
MAX_RESULTS = 64  # most results per layer; the oldest is dropped first
MAX_QUERIES = (
    4096  # most queries of a request that is kept: positions of more would take memory, and validation is quick beside such a call
)
MAX_KEY_CHARACTERS = 512  # most characters of the plain fields in a key; longer requests are unlikely to recur


@dataclass(frozen=True, slots=True)
class CachedValidation:
    """The result of validating a request. In the cache it has no numbers: arrays in `request` take no memory."""

    request: AttendRequest
    options: CallOptions
    masks: Masks  # without tensors other than positions
    cost: Cost
    in_parts: bool
    log_fields: Mapping[str, Any]
    operation: Operation = FORWARD


class ValidationCache:
    """The validation results of one layer. Thread-safe without a lock: every operation on the dictionary and the queue is atomic, and
    neither is iterated. Two threads may validate equal requests at the same time.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, CachedValidation] = {}
        self.get = self._results.get
        self._oldest: deque[Hashable] = deque()  # keys, oldest first

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, key: Hashable, validated: CachedValidation) -> None:
        """Store a validated request without its numbers."""
        request = validated.request
        if validated.masks.positions.shape[1] > MAX_QUERIES:
            return
        arrays = {name: array for name in SEQUENCE_FIELDS if (array := getattr(request, name)) is not None}
        shapes = {name: shape_alone(array.shape, array.dtype) for name, array in arrays.items()}
        result = replace(validated, request=request.model_copy(update=shapes))
        if self._results.setdefault(key, result) is result:  # else another thread was first
            self._oldest.append(key)
            if len(self._oldest) > MAX_RESULTS:
                self._results.pop(self._oldest.popleft(), None)


def cache_key(members: Mapping[str, Any]) -> Hashable | None:
    """A key that is equal for requests that differ only in the numbers of query, key and value; None if the request must be validated."""
    parts: list[Any] = []
    length = 0
    for name, value in members.items():
        if isinstance(value, np.ndarray):
            if name not in SEQUENCE_FIELDS:
                return None
            parts += name, value.shape, value.dtype
        else:
            text = repr(value)  # distinguishes True, 1 and 1.0, which are equal
            length += len(text)
            parts += name, text
    return tuple(parts) if length <= MAX_KEY_CHARACTERS and "query" in members else None
