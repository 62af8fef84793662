"""Combines the masks of a call, for one block of query rows at a time. True means "may attend".

Two kinds of masks are handled apart. Lengths, causality, windows and chunks restrict a row to an interval of keys, first to last, which
needs no [q, k] memory. Attend masks, key masks, segments and biases of -inf restrict it to an arbitrary set of keys. `visible` combines
both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from attend.attention.rows import block_of

MASK_TENSORS = ("positions", "attend_mask", "attend_keys", "query_segments", "key_segments", "lengths", "bias")  # fields of Masks
PAIR_AXES = ("b", "h", "q", "k")
PADDING = -2  # the segment of keys that no query has


class Masks(NamedTuple):
    """All masks of one call; None blocks nothing. Axes are those of the call; an axis of 1 is broadcast."""

    positions: Tensor  # [b|1, q]: key position of query i, i + offset
    num_keys: int
    attend_mask: Tensor | None = None  # bool [b|1, h|1, q|1, k|1]
    attend_keys: Tensor | None = None  # bool [b|1, k|1]
    query_segments: Tensor | None = None  # int64 [b|1, q|1]: a query attends to keys of its own segment
    key_segments: Tensor | None = None  # int64 [b|1, k|1]; PADDING is in no query's segment
    lengths: Tensor | None = None  # int64 [b, q|1]: only the first n keys are real
    longest: Tensor | None = None  # int64 [b, 1]: the largest of the lengths of all queries, where some queries are selected
    bias: Tensor | None = None  # [b|1, h|1, q|1, k|1], added to the scores; -inf blocks
    bias_blocks: bool = False  # whether the bias contains -inf
    left: int | None = None  # keys from position - left ...
    right: int | None = None  # ... to position + right; 0 is causal
    chunk: int | None = None  # and only keys in the same chunk of this many positions
    aligned: bool = False  # q = k, and query i has the position of key i

    @property
    def has_intervals(self) -> bool:
        """Whether lengths, causality, a window or chunks restrict rows to intervals of keys."""
        return self.lengths is not None or self.right is not None or self._has_lower_bound

    @property
    def _has_lower_bound(self) -> bool:
        """Whether the intervals of some rows may begin after the first key."""
        return self.left is not None or self.chunk is not None

    @property
    def has_sets(self) -> bool:
        """Whether masks or a bias restrict rows to arbitrary sets of keys."""
        return self.bias_blocks or self.attend_mask is not None or self.attend_keys is not None or self.key_segments is not None

    @property
    def has_any(self) -> bool:
        """Whether anything restricts the keys of a row."""
        return self.has_intervals or self.has_sets

    @property
    def only_causal(self) -> bool:
        """Whether the only mask is causal and aligned with q = k, which fused kernels support without a mask tensor."""
        has_others = self.has_sets or self.bias is not None or self.lengths is not None or self._has_lower_bound
        return self.aligned and self.right == 0 and not has_others

    @property
    def _sees_own_key(self) -> bool:
        """Whether causality and windows, with no other mask, leave every query the key at its own position."""
        plain = self.aligned and self.lengths is None and not self.has_sets
        return plain and min(0 if self.left is None else self.left, 0 if self.right is None else self.right) >= 0

    def shared_keys(self) -> slice | None:
        """The visible keys as a slice, if equal lengths in all rows are the only mask and there is no bias; else None."""
        if self.lengths is None or self.has_sets or self.bias is not None or self.right is not None or self._has_lower_bound:
            return None
        shortest, longest = (int(n) for n in self.lengths.aminmax()) if self.lengths.numel() else (0, 0)
        return slice(0, longest) if 0 < shortest == longest else None

    def interval(self, rows: slice) -> tuple[Tensor, Tensor]:
        """First and last key of each row, inclusive, each [b|1, rows]; a row is empty if last < first."""
        position, last_key = self.positions[:, rows], self.num_keys - 1
        first = torch.zeros_like(position) if self.left is None else (position - self.left).clamp(min=0)
        last = torch.full_like(position, last_key) if self.right is None else (position + self.right).clamp(max=last_key)
        if self.chunk is not None:
            start = position - position % self.chunk
            first, last = torch.maximum(first, start), torch.minimum(last, start + self.chunk - 1)
        if self.lengths is not None:
            n = self.lengths if self.lengths.shape[1] == 1 else self.lengths[:, rows]
            last = torch.minimum(last, n - 1)
        return first, last

    def visible(self, rows: slice, keys: slice | None = None) -> Tensor | None:
        """bool [b|1, h|1, rows|1, keys|1]: the keys that each query may attend to; None if nothing is blocked."""
        keys = keys or slice(0, self.num_keys)
        masks: list[Tensor] = []
        if self.attend_mask is not None:
            masks.append(block_of(self.attend_mask, PAIR_AXES, rows, keys))
        if self.attend_keys is not None:
            masks.append(block_of(self.attend_keys[:, None, None], PAIR_AXES, rows, keys))
        if self.query_segments is not None and self.key_segments is not None:
            query_segments, key_segments = self.query_segments[:, None, :, None], self.key_segments[:, None, None]
            masks.append(block_of(query_segments, PAIR_AXES, rows, keys) == block_of(key_segments, PAIR_AXES, rows, keys))
        if self.bias is not None and self.bias_blocks:
            masks.append(block_of(self.bias, PAIR_AXES, rows, keys) != -torch.inf)
        if self.has_intervals:
            first, last = (index[:, None, :, None] for index in self.interval(rows))
            j = torch.arange(keys.start, keys.stop, device=self.positions.device)
            masks += [j <= last, j >= first] if self._has_lower_bound else [j <= last]
        return reduce(and_, masks) if masks else None

    def fully_masked(self, blocks: Iterable[slice]) -> Tensor | None:
        """bool [b|1, h|1, q]: the rows without a visible key; None if there cannot be any. `blocks` are the rows to compute at a time."""
        if self.num_keys and (not self.has_any or self._sees_own_key):
            return None
        if not self.has_sets:
            first, last = self.interval(slice(0, self.positions.shape[1]))
            return (last < first)[:, None]
        empty = []
        for rows in blocks:
            visible = self.visible(rows)
            assert visible is not None
            is_empty = ~visible.any(-1) if self.num_keys else visible.new_ones(1, 1, 1)
            empty.append(is_empty.expand(-1, -1, rows.stop - rows.start))
        return torch.cat(empty, -1)

    def real_keys(self, batch: int) -> Tensor:
        """bool [b, k]: the keys that lengths, key masks and segments do not block for every query. The others are padding."""
        real = torch.ones(batch, self.num_keys, dtype=torch.bool, device=self.positions.device)
        j = torch.arange(self.num_keys, device=self.positions.device)
        if self.attend_keys is not None:
            real &= self.attend_keys
        if self.key_segments is not None:
            real &= self.key_segments != PADDING
        if self.lengths is not None:
            longest = self.lengths if self.longest is None else self.longest
            real &= j < longest.amax(1, keepdim=True) if longest.shape[1] else False
        return real

    def select(self, heads: Sequence[int] | None, queries: Sequence[int] | None) -> "Masks":
        """The masks of some heads and queries, in the given order; None: all."""
        return self._replace(
            positions=self.positions if queries is None else self.positions[:, list(queries)],
            attend_mask=select_indices(select_indices(self.attend_mask, 1, heads), 2, queries),
            bias=select_indices(select_indices(self.bias, 1, heads), 2, queries),
            query_segments=select_indices(self.query_segments, 1, queries),
            lengths=select_indices(self.lengths, 1, queries),
            longest=self.lengths.amax(1, keepdim=True) if queries and self.lengths is not None else self.longest,
        )


@dataclass(frozen=True, slots=True)
class MaskBlock:
    """The masks of some rows and keys of a call: what steps of a program read."""

    masks: Masks
    rows: slice
    keys: slice

    def visible(self) -> Tensor:
        """bool [b|1, h|1, rows|1, keys|1]: the keys that each query may attend to."""
        visible = self.masks.visible(self.rows, self.keys)
        assert visible is not None
        return visible

    def keys_in_sequence(self, batch: int) -> Tensor:
        """bool [b, rows|1, k]: the keys that are neither padding nor of other segments than the query."""
        masks, keys = self.masks, self.masks.real_keys(batch)[:, None]
        if masks.query_segments is None or masks.key_segments is None:
            return keys
        queries = masks.query_segments[:, self.rows] if masks.query_segments.shape[1] > 1 else masks.query_segments
        return keys & (queries[:, :, None] == masks.key_segments[:, None])


def select_indices(tensor: Tensor | None, axis: int, indices: Sequence[int] | None) -> Tensor | None:
    """These indices of an axis; unchanged if the axis is broadcast."""
    if tensor is None or indices is None or tensor.shape[axis] == 1:
        return tensor
    return tensor.index_select(axis, torch.tensor(indices, device=tensor.device))


def end_of_real_keys(masks: Masks, batch: int) -> Tensor:
    """[b]: 1 + the index of the last key that is not padding, 0 if none. `query_offset: "end"` aligns the last query with that key."""
    j = torch.arange(masks.num_keys, device=masks.positions.device)
    return torch.where(masks.real_keys(batch), j + 1, 0).amax(1) if masks.num_keys else torch.zeros(batch, dtype=torch.int64)
