"""Caches the validation results of one layer by request shape.

Validation, fit and admission depend on the shapes of tensors and on the plain fields, and not on the numbers, each of which only must be
finite, or what its kind says (`prepared` in `axes.py`). For a small request, validation takes as long as its arithmetic.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attend.attention.call import Call, CallOptions
from attend.attention.masks import MASK_TENSORS, Masks
from attend.attention.operations import FORWARD, Operation
from attend.axes import MASKS, OTHERS, TENSOR_FIELDS
from attend.serving.calls import call_tensors, given_arrays, input_tensors, mask_tensors
from attend.serving.cost import Cost
from attend.spec import LayerSpec
from attend.tensors import shape_alone
from attend.wire.schemas.attend import AttendRequest

PREPARED_FIELDS = frozenset(name for name, field in TENSOR_FIELDS.items() if field.prepared)
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
    masks: Masks  # in the cache without tensors other than positions
    cost: Cost
    in_parts: bool
    log_fields: Mapping[str, Any]
    operation: Operation = FORWARD
    masked: tuple[str, ...] = ()  # the fields of masks that the request has
    others: tuple[str, ...] = ()  # and of other tensors, beside query, key and value

    def call(self, members: Mapping[str, Any], spec: LayerSpec) -> Call | None:
        """The call of a request with the same key. None if an element of a mask is wrong: to validate the request says which one.

        Raises InvalidRequest if a number is not finite in the layer's dtype.
        """
        options, given = self.options, (members["query"], members.get("key"), members.get("value"))
        if not self.masked and not self.others:
            return Call(options, *input_tensors(*given, spec, options.reproducible), self.masks)
        arrays = {}
        for name in (*self.masked, *self.others):
            if (array := AttendRequest.tensors[name].valid(members[name])) is None:
                return None
            arrays[name] = array
        if "valid_lens" in arrays and arrays["valid_lens"].max(initial=0) > options.num_keys:
            return None
        inputs = input_tensors(*given, spec, options.reproducible)
        how = (members["query"].ndim == 3, spec, options.reproducible)
        others = call_tensors(arrays, *how) if self.others else {}
        masks = replace(self.masks, **mask_tensors(arrays, *how)) if self.masked else self.masks
        return Call(options, *inputs, masks, **others)


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
        request, masks = validated.request, validated.masks
        if masks.positions.shape[1] > MAX_QUERIES:
            return
        arrays = given_arrays(request)
        masked, others = tuple(name for name in arrays if name in MASKS), tuple(name for name in arrays if name in OTHERS)
        if masked and request.query_offset == "end":  # of the real keys, which depends on the numbers of masks
            return
        empty: dict[str, Any] = dict.fromkeys(name for name in MASK_TENSORS if name != "positions") | {"bias_blocks": False}
        shapes = {name: shape_alone(array.shape, array.dtype) for name, array in arrays.items()}
        result = replace(validated, request=request.model_copy(update=shapes), masks=replace(masks, **empty), masked=masked, others=others)
        if self._results.setdefault(key, result) is result:  # else another thread was first
            self._oldest.append(key)
            if len(self._oldest) > MAX_RESULTS:
                self._results.pop(self._oldest.popleft(), None)


def cache_key(members: Mapping[str, Any]) -> Hashable | None:
    """A key that is equal for requests that differ only in the numbers of their tensors; None if the request must be validated."""
    parts: list[Any] = []
    length = 0
    for name, value in members.items():
        if isinstance(value, np.ndarray):
            if name not in PREPARED_FIELDS:
                return None
            parts += name, value.shape, value.dtype
        else:
            text = repr(value)  # distinguishes True, 1 and 1.0, which are equal
            length += len(text)
            parts += name, text
    return tuple(parts) if length <= MAX_KEY_CHARACTERS and "query" in members else None
