"""Forms batches of waiting calls, stacks calls into one, and splits its result. Uses no clock, event loop or thread.

Calls are stacked along the batch axis if layer, other axes, options and kinds of masks are equal. A stacked call is an ordinary call.
Short calls to one layer that differ in shapes, options or masks may share a batch as several stacks: the rows of all stacks are projected
by one matrix product, and each stack is attended separately.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.layer import Operation
from service.serving.cost import Cost
from service.serving.layers.registry import HeldLayer
from service.serving.occupancy import INTERNAL, Flow

SPREAD = 8.0  # largest score, as estimated, of a call that may share a batch; about 1 for xavier weights and inputs of unit variance
ADDED = 64.0  # largest |bias| of such a call: adding a larger one rounds the scores by more than results may differ
WIDTH = 256  # numbers in the rows in which `Entry.rows` counts; a layer with a larger d_model counts proportionally more rows
STACKED_MASKS = ("positions", "attend_mask", "attend_keys", "lengths", "bias")


class BatchKey(NamedTuple):
    """Calls with equal batch keys may share a batch."""

    stacked: Any  # equal for calls that can be stacked into one; None if this call cannot be stacked
    packed: Any  # equal for calls whose rows can share a matrix product; None if it cannot share one


ALONE = BatchKey(None, None)


@dataclass(slots=True, eq=False)
class Entry:
    """A bound call in the queue.

    `gone()`: its caller has disconnected. `done()`: it is already settled, for example at its deadline. `arrived` and `deadline` are
    times of the scheduler's clock.
    """

    layer: HeldLayer
    call: Call
    cost: Cost
    arrived: float
    deadline: float | None = None
    gone: Callable[[], bool] = lambda: False
    done: Callable[[], bool] = lambda: False
    settle: Callable[[Any], None] = lambda _: None
    flow: Flow = INTERNAL
    operation: Operation | None = None  # runs in place of the layer's forward pass
    _batch_key: BatchKey | None = field(init=False, default=None)

    @property
    def batch_key(self) -> BatchKey:
        """Computed on first use: most calls are alone in the queue and never need it."""
        if self._batch_key is None:
            self._batch_key = ALONE if self.operation is not None else batch_key_of(self.layer, self.call)
        return self._batch_key

    @property
    def may_share(self) -> bool:
        """Whether the call may share a batch with any other."""
        return self.batch_key != ALONE

    @property
    def rows(self) -> int:
        """Batch items times the larger of queries and keys; for d_model > WIDTH, in rows of WIDTH numbers."""
        rows = self.call.query.shape[0] * max(self.call.query.shape[1], self.call.key.shape[1])
        return rows * max(WIDTH, self.layer.spec.d_model) // WIDTH

    def can_share_batch(self, other: "Entry", rows: int) -> bool:
        """Whether both may be in one batch: they stack, or their packed keys are equal and neither has more than `rows` rows."""
        one, two = self.batch_key, other.batch_key
        if one.stacked is not None and one.stacked == two.stacked:
            return True
        return one.packed is not None and one.packed == two.packed and max(self.rows, other.rows) <= rows


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest cost of one batch. A call that exceeds it runs alone."""

    calls: int = 64
    operations: int = 4_000_000_000
    memory_bytes: int = 1 << 29
    rows: int = 1024  # of a call that shares a batch without being stacked


def limits_on(device: torch.device, calls: int) -> BatchLimits:
    """The limits for a device and at most `calls` calls.

    On a CPU a batch saves overhead per call, not arithmetic. Calls of a millisecond and more would only overflow its caches and wait for
    each other. From 128 rows of 256 numbers on, the time of a product is that of its rows, not that of reading its weights.
    """
    return BatchLimits(calls, 1 << 28, rows=128) if device.type == "cpu" else BatchLimits(calls)


def take(waiting: deque[Entry], limits: BatchLimits, now: float) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """(batch, expired, abandoned), all removed from `waiting`.

    The batch is the first live call and every later one that may join it within the limits. Other calls stay in `waiting`, in order.
    """
    batch: list[Entry] = []
    expired, abandoned, left = [], [], []
    operations = memory = 0
    for entry in waiting:
        if entry.done():
            continue
        if entry.gone():
            abandoned.append(entry)
        elif entry.deadline is not None and entry.deadline <= now:
            expired.append(entry)
        elif not batch or (
            len(batch) < limits.calls
            and operations + entry.cost.operations <= limits.operations
            and memory + entry.cost.memory_bytes <= limits.memory_bytes
            and entry.can_share_batch(batch[0], limits.rows)
        ):
            batch.append(entry)
            operations += entry.cost.operations
            memory += entry.cost.memory_bytes
        else:
            left.append(entry)
    waiting.clear()
    waiting.extend(left)
    return batch, expired, abandoned


def batch_key_of(layer: HeldLayer, call: Call) -> BatchKey:
    """The batch key of a call.

    A call with dropout is not stacked, since its random stream has the shape of the single call. A call runs alone if its scores are so
    large that softmax amplifies their rounding, which depends on the number of rows in a product, beyond 1e-6 of the largest value (law 7).
    """
    alone = call.reproducible or call.output_gradient is not None
    if alone or not layer.attention.projections.are_batch_invariant or _magnifies(layer, call):
        return ALONE
    inputs = (id(layer), call.key is call.query, call.value is call.key)
    return BatchKey(None if call.dropout is not None else (*inputs, *_form(call)), inputs)


def _form(call: Call) -> tuple[Any, ...]:
    """All properties that must be equal in calls that are stacked, besides layer and sharing of inputs."""
    masks = call.masks
    return (
        call.query.shape[1:],
        call.key.shape[1:],
        call.scale,
        call.outputs,
        call.softcap,
        call.fully_masked,
        call.head_scale is None,
        call.heads,
        call.queries,
        call.average,
        call.top_k,
        tuple(None if (tensor := getattr(masks, name)) is None else tensor.shape[1:] for name in STACKED_MASKS),
        masks.left,
        masks.right,
        masks.aligned,
    )


def _magnifies(layer: HeldLayer, call: Call) -> bool:
    """Whether the scores may be so large that softmax amplifies their rounding beyond the tolerance of law 7."""
    if layer.spec.dtype == "float64":
        return False
    spread = layer.gain * abs(call.scale)
    if spread <= SPREAD and layer.spec.qk_norm is None:
        query = _size(call.query)
        spread *= query * (query if call.key is call.query else _size(call.key))
    bias = call.masks.bias
    return spread > SPREAD or (bias is not None and bool((bias.isfinite() & (bias.abs() > ADDED)).any()))


def _size(rows: Tensor) -> float:
    """The largest root mean square of a row; at least 1, since biases of the projections do not shrink with small inputs."""
    if not rows.numel():
        return 1.0
    return max(1.0, float(torch.linalg.vector_norm(rows, dim=-1).max()) / math.sqrt(rows.shape[-1]))


def stacks(batch: Sequence[Entry]) -> Iterable[Sequence[Entry]]:
    """The calls of a batch grouped into stacks, in order of arrival."""
    if len(batch) == 1:
        return [batch]
    found: dict[Any, list[Entry]] = {}
    for entry in batch:
        found.setdefault(entry.batch_key.stacked or id(entry), []).append(entry)
    return found.values()


def stack(calls: Sequence[Call]) -> Call:
    """Concatenate calls with equal `stacked` keys along the batch axis. A single call is returned as it is."""
    if len(calls) == 1:
        return calls[0]
    first, sizes = calls[0], [call.query.shape[0] for call in calls]
    query = torch.cat([call.query for call in calls])
    key = query if first.key is first.query else torch.cat([call.key for call in calls])
    value = key if first.value is first.key else torch.cat([call.value for call in calls])
    masks: dict[str, Any] = {name: _stacked([getattr(call.masks, name) for call in calls], sizes) for name in STACKED_MASKS}
    return replace(
        first,
        query=query,
        key=key,
        value=value,
        masks=replace(first.masks, **masks, bias_blocks=any(call.masks.bias_blocks for call in calls)),
        head_scale=_stacked([call.head_scale for call in calls], sizes),
    )


def _stacked(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Concatenate tensors [b|1, …] of calls with `sizes` batch items; a tensor that is equal in all calls is returned once, [1, …]."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return None
    if all(t.shape[0] == 1 for t in there) and all(t is there[0] or torch.equal(t, there[0]) for t in there):
        return there[0]
    return torch.cat([t if t.shape[0] == n else t.expand(n, *t.shape[1:]) for t, n in zip(there, sizes, strict=True)])


def split(result: Result, sizes: Sequence[int]) -> list[Result]:
    """Split the result of a stacked call into calls of `sizes` batch items. Tensors are views."""
    if len(sizes) == 1:
        return [result]
    results, start = [], 0
    for size in sizes:
        here = slice(start, start + size)
        fully_masked = None if result.fully_masked is None else result.fully_masked[here]
        results.append(Result({name: tensor[here] for name, tensor in result.tensors.items()}, fully_masked))
        start += size
    return results


def halves(batch: Sequence[Entry]) -> Iterable[Sequence[Entry]]:
    """Both halves of a batch, in order."""
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]
