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
import torch

from service.attention.call import Call
from service.serving.cost import Cost
from service.wire.schemas.attend import AttendRequest

SEQUENCE_FIELDS = frozenset({"query", "key", "value"})
MAX_RESULTS = 64  # most results per layer; the oldest is dropped first
MAX_KEY_CHARACTERS = 512  # most characters of the plain fields in a key; longer requests are unlikely to recur


@dataclass(frozen=True, slots=True)
class CachedValidation:
    """The result of validating a request. In the cache it has no numbers: arrays in `request` and tensors in `call` take no memory."""

    request: AttendRequest
    call: Call
    cost: Cost
    in_parts: bool
    log_fields: Mapping[str, Any]
    is_short: bool = False  # whether C can compute the call (`ShortCall`)


class ValidationCache:
    """The validation results of one layer. Thread-safe without a lock: every operation on the dictionary and the queue is atomic, and
    neither is iterated. Two threads may validate equal requests at the same time.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, CachedValidation] = {}
        self.get = self._results.get
        self._oldest: deque[Hashable] = deque()  # keys, oldest first

    def keep(self, key: Hashable, validated: CachedValidation) -> None:
        """Store a validated request without its numbers."""
        request, call = validated.request, validated.call
        arrays = {name: array for name in SEQUENCE_FIELDS if (array := getattr(request, name)) is not None}
        placeholders = {name: np.broadcast_to(np.zeros((), array.dtype), array.shape) for name, array in arrays.items()}
        tensors: dict[str, Any] = {name: torch.zeros(()).expand(getattr(call, name).shape) for name in SEQUENCE_FIELDS}
        result = replace(validated, request=request.model_copy(update=placeholders), call=replace(call, **tensors))
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
