"""Attention of new rows to all rows of a KV cache: projects the new ones, appends their keys and values, and attends.

One query that requests neither weights nor scores attends to the pages without joining them, if `PagesKernel` computes it. Other steps join
the pages, and are then computed as calls without a cache are.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from attend.attention.cache import KeyValueCache
from attend.attention.call import FROM_HEADS, Call, Result
from attend.attention.kernels.choose import compute
from attend.attention.layer import MultiHeadAttention, result_of
from attend.attention.masks import Masks
from attend.attention.operations import Operation
from attend.attention.operators.stages import Projected
from attend.attention.projections import Projections


@dataclass(frozen=True, slots=True)
class CachedStep(Operation):
    """The operation that appends the keys and values of a call to a cache, and then attends to all its rows.

    `key_coordinates` of its call: None for start, start + 1, ….
    """

    is_one_pass = changes_state = True
    largest_batch = 64  # on any device: steps are not stacked, they share the products with the layer's weights

    cache: KeyValueCache
    start: int  # number of rows before the step

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        return forward_steps(layer, [(self, call)])[0]

    def batch_key(self, call: Call) -> tuple[Any, ...] | None:
        """Steps with equal numbers of rows, whose rows are projected together."""
        if call.options.reproducible:
            return None
        coordinates = [None if tensor is None else tensor.shape for tensor in (call.query_coordinates, call.key_coordinates)]
        options = call.options
        return options.num_queries, call.key.shape[1], options.self_attention, options.keys_as_values, *coordinates

    def largest_cached_row(self) -> float:
        return self.cache.largest_row

    def run_batch(self, layer: MultiHeadAttention, batch: Sequence[tuple[Self, Call]]) -> list[Result]:
        moved = [(step, call.to(layer.device)) for step, call in batch]
        return [result.cpu() for result in forward_steps(layer, moved)]


@dataclass(frozen=True, slots=True)
class CachedOperation(Operation):
    """An operation with the rows of a cache in place of the call's keys and values."""

    cache: KeyValueCache
    operation: Operation

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        cached, rows = copy(layer), self.cache.joined()
        cached.projections, cached.call_kernels = CachedProjections(layer, rows), ()
        return self.operation.run(cached, replace(call, cached=rows))

    def to(self, device: torch.device) -> Self:
        return replace(self, operation=self.operation.to(device))


class CachedProjections(Projections):
    """The projections of a layer, except that keys and values are those of a cache."""

    def __init__(self, layer: MultiHeadAttention, rows: Mapping[str, Tensor]) -> None:
        super().__init__(layer.spec, layer.weights, layer.operators)
        self._layer, self._rows = layer, rows

    def project(self, call: Call) -> Projected:
        query, *_ = self._layer.projections.project(call)
        return query, *self._layer.projections.keys_and_values(self._rows)

    def product(self, x: Tensor, name: str) -> Tensor:
        return self._layer.projections.product(x, name)


@torch.inference_mode()
def forward_steps(layer: MultiHeadAttention, steps: Sequence[tuple[CachedStep, Call]]) -> list[Result]:
    """The results of steps of several caches, with equal numbers of rows. Their rows are projected together."""
    rows = _stack_new_rows(steps)
    projected = layer.project(rows)
    tensors = layer.projections.rows_to_cache(rows, projected)
    results = []
    for i, (step, call) in enumerate(steps):
        step.cache.largest_row = max(step.cache.largest_row, largest_row(call.key))
        new = {name: tensors[name][i] for name in step.cache.cached}
        step.cache.finite = all(map(_is_finite, new.values()))
        step.cache.write(step.start, new)
        results.append(_attend(layer, call, projected[0][i : i + 1], step.cache))
    concatenated = [
        tensors["concatenated"] for (_, call), (tensors, _) in zip(steps, results, strict=True) if "output" in call.options.outputs
    ]
    outputs = iter(layer.project_back(_stacked(concatenated)).chunk(len(concatenated)) if concatenated else ())
    for (_, call), (tensors, _) in zip(steps, results, strict=True):
        if "output" in call.options.outputs:
            tensors["output"] = next(outputs)
    return [result_of(call, *result) for (_, call), result in zip(steps, results, strict=True)]


def _is_finite(rows: Tensor) -> bool:
    """Whether all numbers are finite. Their sum, which is faster, may overflow although they are."""
    return math.isfinite(rows.sum()) or bool(rows.isfinite().all())


def largest_row(rows: Tensor) -> float:
    """The largest root mean square of a row; at least 1, since biases of the projections do not shrink with small inputs."""
    if not rows.numel():
        return 1.0
    return max(1.0, float(torch.linalg.vector_norm(rows, dim=-1).max()) / math.sqrt(rows.shape[-1]))


def _stack_new_rows(steps: Sequence[tuple[CachedStep, Call]]) -> Call:
    """One call with the new rows of all steps as its batch items, which has all that projections read."""
    calls = [call for _, call in steps]
    first, count = calls[0], calls[0].key.shape[1]
    inputs = first.options.inputs(lambda name: _stacked([getattr(call, name) for call in calls]))
    indices = torch.arange(count, dtype=torch.float64, device=first.key.device)[None]
    given = [call.query_coordinates for call in calls if call.query_coordinates is not None]
    return Call(
        replace(first.options, items=len(steps), num_keys=count),
        **inputs,
        masks=Masks(_stacked([call.masks.positions for call in calls]), count),
        query_coordinates=_stacked(given) if given else None,
        key_coordinates=_stacked([step.start + indices if call.key_coordinates is None else call.key_coordinates for step, call in steps]),
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """The tensors as items of one batch; a single one is not copied."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _attend(layer: MultiHeadAttention, call: Call, query: Tensor, cache: KeyValueCache) -> tuple[dict[str, Tensor], Tensor | None]:
    """All outputs but `output`, and the fully masked rows, of query [1, h, q, d] and all rows of the cache."""
    kernels = layer.cache_kernels if call.options.outputs <= FROM_HEADS else ()
    if (tensors := compute(kernels, call, (query, cache), frozenset({"head_outputs"}))) is not None:
        return layer.merge_heads(call, tensors["head_outputs"]), None
    rows = cache.joined()
    return layer.attend(layer.select_keys(replace(call, cached=rows)), query, *layer.projections.keys_and_values(rows))
