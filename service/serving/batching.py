"""Forms batches of waiting calls, and stacks calls into one. Needs no clock, event loop or thread.

Calls are stacked along the batch axis if layer, other axes, options and kinds of masks are equal. A stacked call is an ordinary call.

Only GPUs stack calls. On a CPU every call runs alone: batches of mixed lengths gained less than a third (docs/performance.md). Steps of
sessions are not stacked: only the products with the layer's weights are shared, on any device (`attention/decoding.py`).
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.decoding import CachedStep
from service.attention.masks import MASK_TENSORS
from service.attention.operations import Operation
from service.serving.cost import Cost
from service.serving.layers.registry import LoadedLayer
from service.serving.queueing import INTERNAL, Flow
from service.serving.rounding import may_amplify_rounding

MAX_STEPS = 64  # of sessions in one batch, on any device: they share the products with the layer's weights
STACKED = ("positions", "key_positions", "head_scale")

BatchKey = tuple[Any, ...]  # calls with equal keys can be stacked


@dataclass(eq=False)
class Entry:
    """A bound call on its way through the scheduler. `arrived` and `deadline` are times of the scheduler's clock."""

    layer: LoadedLayer
    call: Call
    cost: Cost
    arrived: float
    deadline: float | None = None
    gone: Callable[[], bool] = lambda: False  # whether the caller has disconnected
    flow: Flow = INTERNAL
    operation: Operation | None = None  # runs in place of the layer's forward pass
    future: "asyncio.Future[Any] | None" = None  # the caller waits for it
    timer: asyncio.TimerHandle | None = None  # settles the call at its deadline
    is_computing: bool = False  # whether it is a step of a session that the device computes

    def is_settled(self) -> bool:
        """Whether the caller has a result or an error, for example that the deadline passed."""
        return self.future is not None and self.future.done() and not self.future.cancelled()

    def is_abandoned(self) -> bool:
        """Whether the caller has cancelled the call or disconnected."""
        return (self.future is not None and self.future.cancelled()) or self.gone()

    def settle(self, outcome: Any) -> None:
        """Give the caller an outcome or an exception, unless it has one already or was cancelled."""
        if self.future is None or self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)

    @cached_property
    def batch_key(self) -> BatchKey | None:
        """None if the call must run alone."""
        if isinstance(self.operation, CachedStep):
            return step_key_of(self.layer, self.call, self.operation)
        return None if self.operation is not None else batch_key_of(self.layer, self.call)

    def can_share_batch(self, other: "Entry") -> bool:
        return self.batch_key is not None and self.batch_key == other.batch_key


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest cost of one batch. A call that exceeds it runs alone."""

    calls: int = 64
    operations: int = 4_000_000_000
    memory_bytes: int = 1 << 29


def limits_on(device: torch.device, calls: int) -> BatchLimits:
    """The limits for a device: at most `calls` calls on a GPU, one on a CPU."""
    return BatchLimits(1 if device.type == "cpu" else calls)


def form_batch(waiting: Iterable[Entry], limits: BatchLimits, now: float) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """(batch, expired, abandoned): the first live call with every later one that may join it, and the calls that need not be computed.

    Calls that are settled are in none of them.
    """
    batch: list[Entry] = []
    expired, abandoned = [], []
    operations = memory = 0
    for entry in waiting:
        if entry.is_settled():
            continue
        if entry.is_abandoned():
            abandoned.append(entry)
        elif entry.deadline is not None and entry.deadline <= now:
            expired.append(entry)
        elif not batch or (
            len(batch) < (MAX_STEPS if isinstance(entry.operation, CachedStep) else limits.calls)
            and operations + entry.cost.operations <= limits.operations
            and memory + entry.cost.memory_bytes <= limits.memory_bytes
            and entry.can_share_batch(batch[0])
        ):
            batch.append(entry)
            operations += entry.cost.operations
            memory += entry.cost.memory_bytes
    return batch, expired, abandoned


def batch_key_of(layer: LoadedLayer, call: Call) -> BatchKey | None:
    """All properties that must be equal in calls that are stacked; None if the call must run alone.

    A call with dropout runs alone, since its random stream has the shape of the single call, and so does a call with large scores
    (`rounding.py`).
    """
    if call.reproducible or call.output_gradient is not None or call.dropout is not None:
        return None
    if may_amplify_rounding(layer.spec, layer.score_deviation, call):
        return None
    masks = call.masks
    return (
        id(layer),
        call.key is call.query,
        call.value is call.key,
        call.query.shape[1:],
        call.key.shape[1:],
        call.scale,
        call.outputs,
        call.softcap,
        call.fully_masked,
        call.head_scale is None,
        tuple(None if positions is None else positions.shape[1:] for positions in (call.positions, call.key_positions)),
        call.heads,
        call.queries,
        call.average,
        call.top_k,
        tuple(None if (tensor := getattr(masks, name)) is None else tensor.shape[1:] for name in MASK_TENSORS),
        masks.left,
        masks.right,
        masks.chunk,
        masks.aligned,
    )


def step_key_of(layer: LoadedLayer, call: Call, step: CachedStep) -> BatchKey | None:
    """All properties that must be equal in steps of several sessions whose rows are projected together; None if the step must run alone."""
    if call.reproducible or may_amplify_rounding(layer.spec, layer.score_deviation, call, step.key, step.cache.largest_row):
        return None
    positions = None if call.positions is None else call.positions.shape
    return id(layer), call.query.shape, step.key is call.query, step.shapes, positions


def stack(calls: Sequence[Call]) -> Call:
    """Concatenate calls with equal batch keys along the batch axis. A single call is returned as it is."""
    if len(calls) == 1:
        return calls[0]
    first, sizes = calls[0], [call.query.shape[0] for call in calls]
    query = torch.cat([call.query for call in calls])
    key = query if first.key is first.query else torch.cat([call.key for call in calls])
    value = key if first.value is first.key else torch.cat([call.value for call in calls])
    masks: dict[str, Any] = {name: _stacked([getattr(call.masks, name) for call in calls], sizes) for name in MASK_TENSORS}
    others: dict[str, Any] = {name: _stacked([getattr(call, name) for call in calls], sizes) for name in STACKED}
    return replace(
        first,
        query=query,
        key=key,
        value=value,
        masks=replace(first.masks, **masks, bias_blocks=any(call.masks.bias_blocks for call in calls)),
        **others,
    )


def _stacked(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Concatenate tensors [b|1, …] of calls with `sizes` batch items; a tensor that is equal in all calls is returned once, [1, …]."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    if all(t.shape[0] == 1 for t in present) and all(t is present[0] or torch.equal(t, present[0]) for t in present):
        return present[0]
    return torch.cat([t if t.shape[0] == n else t.expand(n, *t.shape[1:]) for t, n in zip(present, sizes, strict=True)])
