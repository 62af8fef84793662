"""Keeps the prepared requests of one layer by request shape.

Validation, fit, admission and the choice of a kernel depend on the shapes of tensors and on the plain fields, and not on the numbers, each
of which only must be finite, or what its kind says (`prepared_once` in `axes.py`). For a small request all this takes longer than the
arithmetic.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from attend.axes import TENSOR_FIELDS

PREPARED_ONCE = frozenset(name for name, field in TENSOR_FIELDS.items() if field.prepared_once)
MAX_REQUESTS = 64  # most requests per layer; the oldest is dropped first
MAX_KEY_CHARACTERS = 512  # most characters of the plain fields in a key; longer requests are unlikely to recur


class PreparedCache:
    """Prepared requests without their numbers. Thread-safe without a lock: every operation on the dictionary and the queue is atomic, and
    neither is iterated. Two threads may prepare equal requests at the same time.
    """

    def __init__(self) -> None:
        self._requests: dict[Hashable, Any] = {}  # `Prepared`, which refers to layers, and so cannot be imported here
        self.get = self._requests.get
        self._oldest: deque[Hashable] = deque()  # keys, oldest first

    def __len__(self) -> int:
        return len(self._requests)

    def keep(self, key: Hashable, prepared: Any) -> None:
        """Store a prepared request, without its numbers."""
        if self._requests.setdefault(key, prepared) is prepared:  # else another thread was first
            self._oldest.append(key)
            if len(self._oldest) > MAX_REQUESTS:
                self._requests.pop(self._oldest.popleft(), None)


def cache_key(members: Mapping[str, Any]) -> Hashable | None:
    """A key that is equal for requests that differ only in the numbers of their tensors; None if each such request must be prepared."""
    parts: list[Any] = []
    length = 0
    for name, value in members.items():
        if isinstance(value, np.ndarray):
            if name not in PREPARED_ONCE:
                return None
            parts += name, value.shape, value.dtype
        else:
            text = repr(value)  # distinguishes True, 1 and 1.0, which are equal
            length += len(text)
            parts += name, text
    return tuple(parts) if length <= MAX_KEY_CHARACTERS and "query" in members else None
