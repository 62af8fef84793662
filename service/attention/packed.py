"""Computes several sequences that are the rows of one query, one after the other, each with its own keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks

BY_SEQUENCE = frozenset(
    {"attention_weights", "scores", "indexer_mask"}
)  # outputs with an axis of keys, which are returned for each sequence


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """The layer's forward pass for each sequence by itself."""

    queries: tuple[int, ...]  # rows of each sequence
    keys: tuple[int, ...]
    masks: dict[tuple[int, int], Masks]  # by numbers of queries and keys; without tensors other than positions

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The outputs of `call`, with the rows of all sequences, except for BY_SEQUENCE: `attention_weights.0` is of the first sequence."""
        results = [layer.forward(part) for part in self._parts(call)]
        tensors: dict[str, Tensor] = {}
        for name in call.outputs:
            parts = [result.tensors[name] for result in results]
            if name in BY_SEQUENCE:
                tensors |= {f"{name}.{i}": part for i, part in enumerate(parts)}
            else:
                tensors[name] = torch.cat(parts, -1 if name == "log_sum_exp" else -2)
        return Result(tensors, _fully_masked(results, self.queries, layer.spec.num_heads))

    def _parts(self, call: Call) -> Iterator[Call]:
        for q, k in zip(_slices(self.queries), _slices(self.keys), strict=True):
            query = call.query[:, q]
            key = query if call.key is call.query else call.key[:, k]
            yield replace(
                call,
                query=query,
                key=key,
                value=key if call.value is call.key else call.value[:, k],
                masks=self.masks[q.stop - q.start, k.stop - k.start],
                positions=_rows(call.positions, q),
                key_positions=_rows(call.key_positions, k),
                output_gradient=_rows(call.output_gradient, q),
            )

    def to(self, device: torch.device) -> Self:
        return replace(self, masks={n: replace(masks, positions=masks.positions.to(device)) for n, masks in self.masks.items()})


def _slices(lengths: Sequence[int]) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0)))


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, rows]


def _fully_masked(results: Sequence[Result], queries: Sequence[int], heads: int) -> Tensor | None:
    """bool [1, h, rows of all sequences]; None if no row is fully masked."""
    if all(result.fully_masked is None for result in results):
        return None
    none = [torch.zeros(1, heads, n, dtype=torch.bool) for n in queries]
    return torch.cat([zeros if r.fully_masked is None else r.fully_masked.cpu() for r, zeros in zip(results, none, strict=True)], -1)
