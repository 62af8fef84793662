"""The arguments of a call of the reference, and which keys they block: masks, lengths, segments, and the positions of queries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from attend.axes import PROGRAM_TENSORS, TENSOR_FIELDS, TensorField
from attend.spec import LayerSpec
from attend.tensors import Array

# Those that get a batch axis if the query has none
PER_ITEM = [name for name, field in TENSOR_FIELDS.items() if all("b" in shape for shape in field.shapes)]


@dataclass(slots=True)
class ReferenceCall:
    """The arguments, named and shaped as the fields of requests (`axes.py`); if the query is [q, query_dim], none has a batch axis.

    A key defaults to the query, a value to the key.
    ValueError: a value without a key.
    """

    query: Any  # [b, q, query_dim]
    key: Any = None  # [b, k, key_dim]
    value: Any = None  # [b, k, value_dim]
    attend_mask: ArrayLike | None = None  # 1 = may attend
    block_mask: ArrayLike | None = None  # 1 = blocked
    attend_keys: Any = None  # [b, k]
    block_keys: Any = None  # [b, k]
    valid_lens: Any = None  # [b] or [b, q]
    segments: Any = None  # of queries and keys
    query_segments: Any = None  # [b, q]
    key_segments: Any = None  # [b, k]
    bias: ArrayLike | None = None
    query_offset: ArrayLike | Literal["end"] | None = None  # an integer or [b]
    positions: Any = None  # [b, q] or [b, q, axes], by which RoPE rotates
    key_positions: Any = None  # [b, k] or [b, k, axes]
    causal: bool = False
    window: Mapping[str, int | None] | None = None
    fully_masked: Literal["zero", "uniform", "error"] = "zero"
    dropout: Mapping[str, Any] | None = None
    scale: float | None = None  # in place of the layer's
    softcap: float | None = None  # in place of the layer's
    tensors: Mapping[str, Any] = field(default_factory=dict)  # the fields that steps read (`PROGRAM_TENSORS`), such as `head_scale`
    batched: bool = field(init=False)
    has_values: bool = field(init=False)  # whether values are not the keys

    @classmethod
    def from_fields(cls, **fields: Any) -> Self:
        """The call of a request with these fields."""
        tensors = {name: fields.pop(name) for name in PROGRAM_TENSORS if name in fields}
        return cls(**fields, tensors=tensors)

    def __post_init__(self) -> None:
        if self.value is not None and self.key is None:
            raise ValueError("expected a key beside the value, got a value alone")
        self.batched, self.has_values = np.ndim(self.query) == 3, self.value is not None
        self.key = self.query if self.key is None else self.key
        self.value = self.key if self.value is None else self.value
        if self.segments is not None:
            self.query_segments = self.key_segments = self.segments
        for name in PER_ITEM:
            if (x := getattr(self, name, None)) is not None:
                setattr(self, name, self.as_batch(x))

    def as_batch(self, x: ArrayLike) -> Array:
        return np.asarray(x) if self.batched else np.asarray(x)[None]

    def per_pair(self, x: ArrayLike) -> Array:
        """A mask or bias [b|1, h|1, q|1, k|1]; rank 3 is [b, q, k], or [h, q, k] without a batch."""
        x = np.asarray(x)
        x = x[:, None] if x.ndim == 3 and self.batched else x
        return x.reshape((1,) * (4 - x.ndim) + x.shape)

    def program_tensor(self, name: str, field: TensorField) -> Array | None:
        """A tensor of the call as the program gets it, with all axes, in float64 or as booleans; None if it is not given."""
        if (tensor := self.tensors.get(name)) is None:
            return None
        x = np.asarray(self.as_batch(tensor) if name in PER_ITEM else tensor, bool if field.kind == "mask" else np.float64)
        if "k" in field or "value_head_dim" in field:
            return self.per_pair(x)
        return x[..., None] if x.ndim == (3 if self.batched else 2) and "q" in field else x[..., None, None]

    def masks(self, spec: LayerSpec, positions: Array) -> "Masks":
        """Which keys are visible to queries at these positions [b, q]."""
        return Masks(self, spec, np.arange(self.key.shape[1]) - positions[:, None, :, None], positions)

    def blocked_by_masks(self) -> Array:
        """Pairs that attend_mask and block_mask block, to be broadcast to [b, h, q, k]."""
        blocked: Array = np.zeros((1, 1, 1, 1), bool)
        if self.attend_mask is not None:
            blocked = blocked | ~self.per_pair(np.asarray(self.attend_mask, bool))
        if self.block_mask is not None:
            blocked = blocked | self.per_pair(np.asarray(self.block_mask, bool))
        return blocked

    def blocked_keys(self) -> Array:
        """Keys that valid_lens, the key masks, and padding among the segments block, to be broadcast to [b, q, k]."""
        blocked: Array = np.zeros((1, 1, 1), bool)
        if self.valid_lens is not None:
            per_query = self.valid_lens[:, None] if self.valid_lens.ndim == 1 else self.valid_lens  # [b, 1] or [b, q]
            blocked = blocked | (np.arange(self.key.shape[1]) >= per_query[..., None])
        if self.attend_keys is not None:
            blocked = blocked | ~self.attend_keys.astype(bool)[:, None]
        if self.block_keys is not None:
            blocked = blocked | self.block_keys.astype(bool)[:, None]
        if self.key_segments is not None:
            blocked = blocked | (self.key_segments < 0)[:, None]
        return blocked

    def real_keys(self) -> Array:
        """Keys that are not blocked for every query: [b, k]."""
        real = ~self.blocked_keys().all(axis=1)
        return np.broadcast_to(real, self.key.shape[:2])

    def other_segments(self) -> Array:
        """Pairs of different segments, to be broadcast to [b, q, k]."""
        if self.query_segments is None or self.key_segments is None:
            return np.zeros((1, 1, 1), bool)
        differ: Array = self.query_segments[:, :, None] != self.key_segments[:, None]
        return differ

    def query_indices(self, shape: tuple[int, ...], needed: bool) -> Array:
        """The key position of each query, i + offset, for scores of this shape: [b, q]. `needed`: whether anything depends on it.

        "end" puts the last query on the last real key of the item: offset = n - q, where n is 1 + the highest real key, 0 if there is none.
        ValueError: an offset that is needed and not given, though q != k.
        """
        b, _, q, k = shape
        offset = self.query_offset
        if needed and offset is None and q != k:
            raise ValueError(f"expected query_offset, since {q} queries and {k} keys do not say how they line up")
        if isinstance(offset, str):
            offset = np.where(self.real_keys(), np.arange(1, k + 1), 0).max(axis=1, initial=0) - q
        indices: Array = np.arange(q) + np.broadcast_to(0 if offset is None else offset, (b,))[:, None]
        return indices


@dataclass(frozen=True)
class Masks:
    """What masks, lengths, segments and positions leave to each query."""

    call: ReferenceCall
    spec: LayerSpec
    ahead: Array  # [b, 1, q, k], the position of key j less that of query i
    positions: Array  # [b, q]

    def visible(self) -> Array:
        """To be broadcast to [b, h, q, k]."""
        return self._visible

    @cached_property
    def _visible(self) -> Array:
        call, spec = self.call, self.spec
        blocked: Array = call.blocked_by_masks() | (call.blocked_keys() | call.other_segments())[:, None]
        if call.bias is not None:
            blocked = blocked | np.isneginf(call.per_pair(np.asarray(call.bias, np.float64)))
        if call.causal:
            blocked = blocked | (self.ahead > 0)
        for window in (call.window or {}, spec.window.model_dump() if spec.window else {}):
            left, right = window.get("left"), window.get("right")
            if left is not None:
                blocked = blocked | (self.ahead < -left)
            if right is not None:
                blocked = blocked | (self.ahead > right)
        if spec.chunk_size is not None:
            blocked = blocked | (self.positions[:, None, :, None] // spec.chunk_size != np.arange(self.ahead.shape[3]) // spec.chunk_size)
        return ~blocked

    def keys_in_sequence(self, batch: int) -> Array:
        """The keys that are neither padding nor of other segments than the query, to be broadcast to [b, q, k]."""
        return np.asarray(self.call.real_keys()[:, None] & ~self.call.other_segments())
