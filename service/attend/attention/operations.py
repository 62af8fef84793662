"""What is computed with a layer for a call: an `Operation`, which also says which calls of it may be computed together."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from attend.attention.call import Call, Result
from attend.attention.kernels.short import ShortKernel, has_masks
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.stacking import stack, stacking_key
from attend.axes import CALL_TENSORS


class Operation(ABC):
    """A computation on a layer and a call: the forward pass, or another such as metrics or the data of a figure."""

    __slots__ = ()
    is_one_pass: ClassVar[bool] = False  # whether it takes the predicted operations in one pass, without many small steps
    changes_state: ClassVar[bool] = False  # whether a call that has begun must be finished, although nobody waits for it any more
    largest_batch: ClassVar[int | None] = None  # most calls that are computed together; None: as many as suit the device

    @abstractmethod
    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        """Compute the operation's tensors; each is [b, …] unless the operation says otherwise."""

    def batch_key(self, call: Call) -> tuple[Any, ...] | None:
        """Calls to one layer with equal keys may be computed together by `run_batch`; one with None is computed alone."""
        return None

    def largest_cached_row(self) -> float:
        """The largest row (`largest_row`) among keys that are projected already."""
        return 1.0

    def run_batch(self, layer: MultiHeadAttention, batch: Sequence[tuple[Self, Call]]) -> list[Result]:
        """Compute calls with equal batch keys together. Tensors of the calls are on the CPU."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Self:
        """The operation with its tensors on `device`."""
        return self


@dataclass(frozen=True, slots=True)
class ForwardPass(Operation):
    """The forward pass of the layer. Several calls are stacked into one."""

    is_one_pass = True

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        return layer.forward(call)

    def batch_key(self, call: Call) -> tuple[Any, ...] | None:
        return stacking_key(call)

    def run_batch(self, layer: MultiHeadAttention, batch: Sequence[tuple[Self, Call]]) -> list[Result]:
        calls = [call for _, call in batch]
        return layer.forward(stack(calls).to(layer.device)).cpu().split([call.options.items for call in calls])


FORWARD = ForwardPass()


@dataclass(frozen=True, slots=True)
class ShortForwardPass(Operation):
    """A forward pass by the C kernel for short calls, chosen once for all calls of one shape. Calls are not stacked into batches."""

    is_one_pass = True

    kernel: ShortKernel
    masked: bool

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        result = self.kernel.compute(call, self.masked)
        return layer.forward(call) if result is None else result


def forward_pass(layer: MultiHeadAttention, call: Call) -> Operation:
    """The forward pass of this call and of calls with equal options and masks; whether it is short is decided once."""
    short = layer.short
    return ShortForwardPass(short, has_masks(call)) if short and short.computes(call) and short.is_short(call) else FORWARD


@dataclass(frozen=True, slots=True)
class PackedAttention(Operation):
    """The layer's forward pass for each sequence by itself. Sequences with equal numbers of rows are items of one batch."""

    queries: tuple[int, ...]  # rows of each sequence
    keys: tuple[int, ...]
    masks: dict[tuple[int, int], Masks]  # by numbers of queries and keys; without tensors other than positions

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The outputs of `call`, with the rows of all sequences; those `by_sequence` apart, `attention_weights.0` for the first one."""
        starts = list(zip(accumulate(self.queries, initial=0), accumulate(self.keys, initial=0), strict=True))
        results: dict[int, Result] = {}
        for (q, k), members in self._groups().items():
            for batch in [[i] for i in members] if call.options.reproducible else [members]:  # reproducible: each sequence alone
                result = layer.forward(self._batch(call, [starts[i] for i in batch], q, k))
                results |= zip(batch, result.split([1] * len(batch)), strict=True)
        ordered = [results[i] for i in range(len(self.queries))]
        tensors: dict[str, Tensor] = {}
        for name in call.options.outputs:
            of_sequences = [result.tensors[name] for result in ordered]
            if layer.spec.every_output[name].by_sequence:
                tensors |= {f"{name}.{i}": x for i, x in enumerate(of_sequences)}
            else:
                tensors[name] = torch.cat(of_sequences, layer.spec.every_output[name].row_axis)
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

        inputs = call.options.inputs(lambda name: rows(call.query, 0, q) if name == "query" else rows(getattr(call, name), 1, k))
        optional_inputs = dict(call.optional_inputs)
        for name, tensor in call.optional_inputs.items():
            field = CALL_TENSORS[name]
            if "q" in field or "k" in field:
                optional_inputs[name] = rows(tensor, 0, q) if "q" in field else rows(tensor, 1, k)
        return replace(
            call,
            options=replace(call.options, items=len(starts), num_queries=q, num_keys=k),
            **inputs,
            masks=self.masks[q, k],
            optional_inputs=optional_inputs,
        )

    def to(self, device: torch.device) -> Self:
        return replace(self, masks={n: masks._replace(positions=masks.positions.to(device)) for n, masks in self.masks.items()})


def _fully_masked(results: Sequence[Result], queries: Sequence[int], heads: int) -> Tensor | None:
    """bool [1, h, rows of all sequences]; None if no row is fully masked."""
    if all(result.fully_masked is None for result in results):
        return None
    none = [torch.zeros(1, heads, n, dtype=torch.bool) for n in queries]
    return torch.cat([zeros if r.fully_masked is None else r.fully_masked.cpu() for r, zeros in zip(results, none, strict=True)], -1)
