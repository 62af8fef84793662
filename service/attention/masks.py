"""Which keys each query may attend to: all masks of a call, combined for one block of query rows at a time. True means "may attend".

Lengths, causality and windows leave each row an interval of keys and take no [q, k] memory. Attend masks, key masks and a bias of -inf
leave an arbitrary set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """All masks of one call; None masks nothing. b, h, q and k are those of the call; an axis of 1 is broadcast."""

    positions: Tensor  # [b|1, q]: where query i stands among the keys, i + offset
    num_keys: int
    attend_mask: Tensor | None = None  # bool [b|1, h|1, q|1, k|1]
    attend_keys: Tensor | None = None  # bool [b|1, k|1]
    lengths: Tensor | None = None  # int64 [b, q|1]: only the first n keys are real
    bias: Tensor | None = None  # [b|1, h|1, q|1, k|1], added to the scores; -inf blocks
    bias_blocks: bool = False  # whether the bias holds a -inf
    left: int | None = None  # keys from position - left ...
    right: int | None = None  # ... to position + right; 0 is causal
    aligned: bool = False  # q = k and query i stands at key i

    @property
    def intervals(self) -> bool:
        """Whether anything leaves a row an interval of keys."""
        return self.lengths is not None or self.left is not None or self.right is not None

    @property
    def sets(self) -> bool:
        """Whether anything leaves a row an arbitrary set of keys."""
        return self.attend_mask is not None or self.attend_keys is not None or self.bias_blocks

    @property
    def blocks(self) -> bool:
        return self.intervals or self.sets

    def clamped_positions(self, rows: slice) -> Tensor:
        """[b|1, rows]: the place among the keys that is nearest to each query's position."""
        return self.positions[:, rows].clamp(0, max(0, self.num_keys - 1))

    @property
    def plainly_causal(self) -> bool:
        """Whether all there is is the lower triangle of a square, which fused kernels know without a mask."""
        rest = self.sets or self.bias is not None or self.lengths is not None or self.left is not None
        return self.aligned and self.right == 0 and not rest

    @property
    def _own_keys_seen(self) -> bool:
        """Whether every query has the key at its own position, by causality and windows alone."""
        plain = self.aligned and self.lengths is None and not self.sets
        return plain and min(0 if self.left is None else self.left, 0 if self.right is None else self.right) >= 0

    def same_keys(self) -> slice | None:
        """The keys that every row sees, where all see the same first ones and nothing else is asked: they need no mask, only a cut."""
        if self.lengths is None or self.sets or self.bias is not None or self.left is not None or self.right is not None:
            return None
        shortest, longest = (int(n) for n in self.lengths.aminmax()) if self.lengths.numel() else (0, 0)
        return slice(0, longest) if 0 < shortest == longest else None

    def interval(self, rows: slice) -> tuple[Tensor, Tensor]:
        """First and last key of each row, both included, each [b|1, rows]; the row is empty where last < first."""
        at = self.positions[:, rows]
        first = torch.zeros_like(at) if self.left is None else (at - self.left).clamp(min=0)
        last = torch.full_like(at, self.num_keys - 1) if self.right is None else (at + self.right).clamp(max=self.num_keys - 1)
        if self.lengths is not None:
            n = self.lengths if self.lengths.shape[1] == 1 else self.lengths[:, rows]
            last = torch.minimum(last, n - 1)
        return first, last

    def visible(self, rows: slice, keys: slice | None = None) -> Tensor | None:
        """bool [b|1, h|1, rows|1, keys|1] for these rows and keys; None if nothing blocks anything."""
        keys = keys or slice(0, self.num_keys)
        seen = self._sets(rows, keys)
        if not self.intervals:
            return seen
        j, at = torch.arange(keys.start, keys.stop, device=self.positions.device), self.positions[:, rows]
        if self.right is not None:
            seen = _both(seen, j <= (at + self.right)[:, None, :, None])
        if self.left is not None:
            seen = _both(seen, j >= (at - self.left)[:, None, :, None])
        if self.lengths is not None:
            n = self.lengths if self.lengths.shape[1] == 1 else self.lengths[:, rows]
            seen = _both(seen, j < n[:, None, :, None])
        return seen

    def _sets(self, rows: slice, keys: slice) -> Tensor | None:
        parts: list[Tensor] = []
        if self.attend_mask is not None:
            parts.append(_cut(self.attend_mask, rows, keys))
        if self.attend_keys is not None:
            parts.append(self.attend_keys[:, None, None, keys] if self.attend_keys.shape[1] > 1 else self.attend_keys[:, None, None])
        if self.bias is not None and self.bias_blocks:
            parts.append(_cut(self.bias, rows, keys) != -torch.inf)
        return reduce(_both, parts, None)

    def bias_at(self, rows: slice, keys: slice) -> Tensor | None:
        """The bias for these rows and keys, [b|1, h|1, rows|1, keys|1]."""
        return None if self.bias is None else _cut(self.bias, rows, keys)

    def fully_masked(self, block: int) -> Tensor | None:
        """bool [b|1, h|1, q]: rows that no key is left for; None if there can be none. Takes [block, k] memory at most."""
        q = self.positions.shape[1]
        if self.num_keys and (not self.blocks or self._own_keys_seen):
            return None
        if not self.sets:
            first, last = self.interval(slice(0, q))
            return (last < first)[:, None]
        parts = []
        for start in range(0, q, block):
            seen = self.visible(slice(start, min(start + block, q)))
            assert seen is not None
            rows = min(block, q - start)
            parts.append(~seen.any(-1).expand(-1, -1, rows) if self.num_keys else torch.ones(1, 1, rows, dtype=torch.bool))
        return torch.cat(parts, -1) if parts else None

    def narrowed(self, heads: Sequence[int] | None, queries: Sequence[int] | None) -> "Masks":
        """The same masks for some of the heads and queries, in the order given."""
        heads_at = None if heads is None else torch.tensor(heads, device=self.positions.device)
        rows_at = None if queries is None else torch.tensor(queries, device=self.positions.device)

        def cut(tensor: Tensor | None, axis: int, index: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or index is None or tensor.shape[axis] == 1 else tensor.index_select(axis, index)

        return replace(
            self,
            positions=self.positions if rows_at is None else self.positions.index_select(1, rows_at),
            attend_mask=cut(cut(self.attend_mask, 1, heads_at), 2, rows_at),
            bias=cut(cut(self.bias, 1, heads_at), 2, rows_at),
            lengths=cut(self.lengths, 1, rows_at),
        )


def _both(seen: Tensor | None, part: Tensor) -> Tensor:
    return part if seen is None else seen & part


def _cut(tensor: Tensor, rows: slice, keys: slice) -> Tensor:
    if tensor.shape[2] > 1:
        tensor = tensor[:, :, rows]
    return tensor[..., keys] if tensor.shape[3] > 1 else tensor


def open_keys(masks: Masks, batch: int) -> Tensor:
    """bool [b, k]: the keys that lengths and key masks leave open to any query; the others are padding."""
    real = torch.ones(batch, masks.num_keys, dtype=torch.bool, device=masks.positions.device)
    j = torch.arange(masks.num_keys, device=masks.positions.device)
    if masks.attend_keys is not None:
        real &= masks.attend_keys
    if masks.lengths is not None:
        real &= j < masks.lengths.amax(1, keepdim=True) if masks.lengths.shape[1] else False
    return real


def last_keys(masks: Masks, batch: int) -> Tensor:
    """[b]: 1 + the highest key that lengths and key masks leave open, 0 if none; where `query_offset: "end"` puts the last query."""
    j = torch.arange(masks.num_keys, device=masks.positions.device)
    return torch.where(open_keys(masks, batch), j + 1, 0).amax(1) if masks.num_keys else torch.zeros(batch, dtype=torch.int64)
