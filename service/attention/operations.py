"""Operations, which replace a layer's forward pass: their interface, short calls whose inputs are arrays, and packed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, Self

import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks
from service.tensors import Array

BY_SEQUENCE = frozenset({"attention_weights", "scores", "indexer_mask"})  # have an axis of keys, so each sequence has its own


class Operation(Protocol):
    """A computation on a layer and a call that replaces the layer's forward pass, such as metrics or the data of a figure."""

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        """Compute the operation's tensors; each is [b, …] unless the operation says otherwise."""
        ...

    def to(self, device: torch.device) -> Self:
        """The operation with its tensors on `device`."""
        ...


@dataclass(frozen=True, slots=True)
class ShortCall:
    """The forward pass of a call that `ShortKernel` suits, with inputs in NumPy arrays: converting them takes as long as computing.

    Only the shapes of the call's own tensors are used.
    """

    query: Array  # float32 [b, q, width]
    key: Array  # [b, k, width]
    value: Array

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        result = None if layer.short is None else layer.short.forward_arrays(call, self.query, self.key, self.value)
        return layer.forward(self.with_numbers(call)) if result is None else result

    def with_numbers(self, call: Call) -> Call:
        """The call with these numbers."""
        query = torch.from_numpy(self.query)
        key = query if self.key is self.query else torch.from_numpy(self.key)
        return replace(call, query=query, key=key, value=key if self.value is self.key else torch.from_numpy(self.value))

    def to(self, device: torch.device) -> Self:
        """Itself: only layers on a CPU have short calls."""
        return self


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """The layer's forward pass for each sequence by itself. Sequences with equal numbers of rows are items of one batch."""

    queries: tuple[int, ...]  # rows of each sequence
    keys: tuple[int, ...]
    masks: dict[tuple[int, int], Masks]  # by numbers of queries and keys; without tensors other than positions

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The outputs of `call`, with the rows of all sequences, except for BY_SEQUENCE: `attention_weights.0` is of the first sequence."""
        starts = list(zip(accumulate(self.queries, initial=0), accumulate(self.keys, initial=0), strict=True))
        results: dict[int, Result] = {}
        for (q, k), members in self._groups().items():
            for batch in [[i] for i in members] if call.reproducible else [members]:  # reproducible: each sequence alone
                result = layer.forward(self._batch(call, [starts[i] for i in batch], q, k))
                results |= zip(batch, result.split([1] * len(batch)), strict=True)
        ordered = [results[i] for i in range(len(self.queries))]
        tensors: dict[str, Tensor] = {}
        for name in call.outputs:
            parts = [result.tensors[name] for result in ordered]
            if name in BY_SEQUENCE:
                tensors |= {f"{name}.{i}": part for i, part in enumerate(parts)}
            else:
                tensors[name] = torch.cat(parts, -1 if name == "log_sum_exp" else -2)
        return Result(tensors, _fully_masked(ordered, self.queries, layer.spec.num_heads))

    def _groups(self) -> dict[tuple[int, int], list[int]]:
        """Numbers of queries and keys -> the sequences that have them."""
        groups: dict[tuple[int, int], list[int]] = {}
        for i, lengths in enumerate(zip(self.queries, self.keys, strict=True)):
            groups.setdefault(lengths, []).append(i)
        return groups

    def _batch(self, call: Call, starts: Sequence[tuple[int, int]], q: int, k: int) -> Call:
        """The call of sequences of q queries and k keys that begin at these rows of query and key."""

        def rows(tensor: Tensor, side: int, n: int) -> Tensor:
            return torch.cat([tensor[:, start[side] : start[side] + n] for start in starts])

        query = rows(call.query, 0, q)
        key = query if call.key is call.query else rows(call.key, 1, k)
        return replace(
            call,
            query=query,
            key=key,
            value=key if call.value is call.key else rows(call.value, 1, k),
            masks=self.masks[q, k],
            positions=None if call.positions is None else rows(call.positions, 0, q),
            key_positions=None if call.key_positions is None else rows(call.key_positions, 1, k),
            output_gradient=None if call.output_gradient is None else rows(call.output_gradient, 0, q),
        )

    def to(self, device: torch.device) -> Self:
        return replace(self, masks={n: replace(masks, positions=masks.positions.to(device)) for n, masks in self.masks.items()})


def _fully_masked(results: Sequence[Result], queries: Sequence[int], heads: int) -> Tensor | None:
    """bool [1, h, rows of all sequences]; None if no row is fully masked."""
    if all(result.fully_masked is None for result in results):
        return None
    none = [torch.zeros(1, heads, n, dtype=torch.bool) for n in queries]
    return torch.cat([zeros if r.fully_masked is None else r.fully_masked.cpu() for r, zeros in zip(results, none, strict=True)], -1)
