"""Forms batches of waiting calls, stacks calls into one, and splits its result. Pure: no clock, no event loop, no thread.

Calls are stacked along the batch axis when everything else about them is equal: layer, shapes, options, kinds of masks. A stacked call is
an ordinary call. Short calls to one layer that differ in any of these share a batch, too: each stack is a call of its own, and their rows
share the products of the projections.
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

SPREAD = 8.0  # of the largest scores of calls that may be stacked; xavier weights and inputs of unit variance have about 1
ADDED = 64.0  # at most in the bias of such calls: beyond it, scores lose more digits than answers may
WIDTH = 256  # of the rows that a call is measured by before it is put beside others
STACKED_MASKS = ("positions", "attend_mask", "attend_keys", "lengths", "bias")


class BatchKey(NamedTuple):
    """Calls with equal batch keys may share a batch."""

    stacked: Any  # equal for calls that can be stacked into one; None for one that cannot
    packed: Any  # equal for calls whose rows can share a product; None for one whose cannot


ALONE = BatchKey(None, None)


@dataclass(slots=True, eq=False)
class Entry:
    """A bound call in the queue.

    `gone` tells whether its caller has disconnected, `done` whether it is settled already, as at its deadline. `arrived` and `deadline` are
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
    operation: Operation | None = None  # what runs in place of the layer's forward pass
    _batch_key: BatchKey | None = field(init=False, default=None)

    @property
    def batch_key(self) -> BatchKey:
        """Computed when there is another call to compare it with: most calls are alone in the queue."""
        if self._batch_key is None:
            self._batch_key = ALONE if self.operation is not None else batch_key_of(self.layer, self.call)
        return self._batch_key

    @property
    def may_share(self) -> bool:
        """Whether the call may share a batch with any other."""
        return self.batch_key != ALONE

    @property
    def rows(self) -> int:
        """Of queries or of keys, whichever are more, of all items; those of wide layers in rows of 256 numbers."""
        rows = self.call.query.shape[0] * max(self.call.query.shape[1], self.call.key.shape[1])
        return rows * max(WIDTH, self.layer.spec.d_model) // WIDTH

    def can_share_batch(self, other: "Entry", rows: int) -> bool:
        """Whether both can be computed together; where they cannot be stacked, only if neither has more than so many rows."""
        one, two = self.batch_key, other.batch_key
        if one.stacked is not None and one.stacked == two.stacked:
            return True
        return one.packed is not None and one.packed == two.packed and max(self.rows, other.rows) <= rows


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may cost. A call beyond these by itself runs alone."""

    calls: int = 64
    operations: int = 4_000_000_000
    memory_bytes: int = 1 << 29
    rows: int = 1024  # of a call that is put beside others of other shapes


def limits_on(device: torch.device, calls: int) -> BatchLimits:
    """Those of a device, for at most so many calls.

    On a CPU stacking saves the steps around the arithmetic, no arithmetic: calls of a millisecond and more would only leave its caches by
    it, and wait for each other. And of 128 rows of 256 and more, a product costs what its rows do, not what its weights do.
    """
    return BatchLimits(calls, 1 << 28, rows=128) if device.type == "cpu" else BatchLimits(calls)


def take(waiting: deque[Entry], limits: BatchLimits, now: float) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """(batch, expired, abandoned), all removed from `waiting`.

    The batch is the oldest live call and every later one that can be computed with it within the limits; others keep their turn.
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

    A seeded dropout's stream has the call's own shape, so such a call is not stacked. Products of many rows are summed in another order
    than those of few: a call runs alone where its scores are so large that softmax would amplify that rounding beyond law 7.
    """
    alone = call.reproducible or call.output_gradient is not None
    if alone or not layer.attention.projections.are_batch_invariant or _magnifies(layer, call):
        return ALONE
    inputs = (id(layer), call.key is call.query, call.value is call.key)
    return BatchKey(None if call.dropout is not None else (*inputs, *_form(call)), inputs)


def _form(call: Call) -> tuple[Any, ...]:
    """Everything that stacked calls must have in common."""
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
    """Whether the scores may be so large that softmax amplifies their rounding beyond law 7."""
    if layer.spec.dtype == "float64":
        return False
    spread = layer.gain * abs(call.scale)
    if spread <= SPREAD and layer.spec.qk_norm is None:
        query = _size(call.query)
        spread *= query * (query if call.key is call.query else _size(call.key))
    bias = call.masks.bias
    return spread > SPREAD or (bias is not None and bool((bias.isfinite() & (bias.abs() > ADDED)).any()))


def _size(rows: Tensor) -> float:
    """Of the largest row, as the root of the mean square of its numbers; 1 where it is less, since biases do not shrink with it."""
    if not rows.numel():
        return 1.0
    return max(1.0, float(torch.linalg.vector_norm(rows, dim=-1).max()) / math.sqrt(rows.shape[-1]))


def stacks(batch: Sequence[Entry]) -> Iterable[Sequence[Entry]]:
    """The calls of a batch by what can be stacked, in the order in which they came."""
    if len(batch) == 1:
        return [batch]
    found: dict[Any, list[Entry]] = {}
    for entry in batch:
        found.setdefault(entry.batch_key.stacked or id(entry), []).append(entry)
    return found.values()


def stack(calls: Sequence[Call]) -> Call:
    """One call for all, item after item; itself where there is only one. The calls must have equal batch keys."""
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
    """Tensors whose first axis is the batch, or 1 for all of it. One that all share stays as it is."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return None
    if all(t.shape[0] == 1 for t in there) and all(t is there[0] or torch.equal(t, there[0]) for t in there):
        return there[0]
    return torch.cat([t if t.shape[0] == n else t.expand(n, *t.shape[1:]) for t, n in zip(there, sizes, strict=True)])


def split(result: Result, sizes: Sequence[int]) -> list[Result]:
    """The result of a stacked call, item for item: views, nothing is copied."""
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
    """A batch that did not fit, as two that may."""
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]
