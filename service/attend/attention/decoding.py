"""Attention of new rows to all rows of a KV cache: projects the new ones, appends their keys and values, and attends.

The program of the layer is run in three sections: the steps of new rows alone, for all caches together; those that read cached rows, for
each cache; and the output projection, together again. One query that requests neither weights nor scores attends to the pages without
joining them, if `PagesKernel` computes the second section.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from attend.attention.cache import KeyValueCache, as_rows, as_values
from attend.attention.call import FROM_HEADS, Call, Result
from attend.attention.dataflow import needed, row_steps
from attend.attention.executor import Values, run_steps
from attend.attention.kernels.fusion import Inexact
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.operations import Operation
from attend.attention.program import program_of
from attend.attention.torch_arithmetic import all_finite


@dataclass(frozen=True, slots=True)
class CachedForwardPass(Operation):
    """The operation that appends the keys and values of a call to a cache, and then attends to all its rows.

    `key_coordinates` of its call: None for start, start + 1, ….
    """

    is_one_pass = changes_state = True
    largest_batch = 64  # on any device: calls are not stacked, they share the products with the layer's weights

    cache: KeyValueCache
    start: int  # number of rows before the call

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        return forward_cached(layer, [(self, call)])[0]

    def batch_key(self, call: Call) -> tuple[Any, ...] | None:
        """Calls with equal numbers of rows, whose rows are projected together."""
        if call.options.reproducible:
            return None
        inputs = call.optional_inputs
        coordinates = [inputs[name].shape if name in inputs else None for name in ("query_coordinates", "key_coordinates")]
        options = call.options
        return options.num_queries, call.key.shape[1], options.self_attention, options.keys_as_values, *coordinates

    def largest_cached_row(self) -> float:
        return self.cache.largest_row

    def run_batch(self, layer: MultiHeadAttention, batch: Sequence[tuple[Self, Call]]) -> list[Result]:
        moved = [(one, call.to(layer.device)) for one, call in batch]
        return [result.cpu() for result in forward_cached(layer, moved)]


@dataclass(frozen=True, slots=True)
class CachedOperation(Operation):
    """An operation with the rows of a cache in place of the call's keys and values."""

    cache: KeyValueCache
    operation: Operation

    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        return self.operation.run(layer, replace(call, cached=as_values(self.cache.cached, self.cache.joined())))

    def to(self, device: torch.device) -> Self:
        return replace(self, operation=self.operation.to(device))


@torch.inference_mode()
def forward_cached(layer: MultiHeadAttention, passes: Sequence[tuple[CachedForwardPass, Call]]) -> list[Result]:
    """The results of passes with a cache each and equal numbers of rows. Their rows are projected together."""
    values, of_keys = _compute_rows(layer, passes)
    results = []
    for i, (one, call) in enumerate(passes):
        cache = one.cache
        cache.largest_row = max(cache.largest_row, largest_row(call.key))
        rows = as_rows(cache.cached, values, i)
        cache.finite = all(map(all_finite, rows.values()))
        cache.write(one.start, rows)
        of_queries = {name: tensor[i : i + 1] for name, tensor in values.items() if name not in of_keys}
        results.append(_attend(layer, call, of_queries, cache))
    outputs = [call.options.outputs for _, call in passes]
    _project_back(layer, [result for result, names in zip(results, outputs, strict=True) if "output" in names])
    for result, names in zip(results, outputs, strict=True):
        if "concatenated" not in names:
            result.tensors.pop("concatenated", None)
    return results


def _project_back(layer: MultiHeadAttention, results: Sequence[Result]) -> None:
    """Add `output`, of the `concatenated` heads of these results, by one product."""
    if results:
        concatenated = _stacked([result.tensors["concatenated"] for result in results])
        for result, output in zip(results, layer.project_back(concatenated).chunk(len(results)), strict=True):
            result.tensors["output"] = output


def _compute_rows(layer: MultiHeadAttention, passes: Sequence[tuple[CachedForwardPass, Call]]) -> tuple[Values, set[str]]:
    """What depends on the new rows of each pass alone: what caches keep, and what their queries need; and the names of values of keys."""
    calls = [call for _, call in passes]
    features = layer.features_of(max(calls, key=lambda call: call.options.num_keys))
    wanted = {tensor.value for tensor in passes[0][0].cache.cached.values()}.union(*(call.options.outputs for call in calls))
    program = row_steps(needed(program_of(layer.spec, features), wanted, layer.constants))
    values = layer.values_of(_stack_new_rows(passes), None, {name for step in program for name in step.reads})
    run_steps(layer.arithmetic, program, values)
    written = {name: value for step in program for name, value in step.writes.items()}
    return {name: values[name] for name in written}, {name for name, value in written.items() if "k" in value.axes.split(",")}


def largest_row(rows: Tensor) -> float:
    """The largest root mean square of a row; at least 1, since biases of the projections do not shrink with small inputs."""
    if not rows.numel():
        return 1.0
    return max(1.0, float(torch.linalg.vector_norm(rows, dim=-1).max()) / math.sqrt(rows.shape[-1]))


def _stack_new_rows(passes: Sequence[tuple[CachedForwardPass, Call]]) -> Call:
    """One call with the new rows of all passes as its batch items, which has all that steps of rows read."""
    calls = [call for _, call in passes]
    first, count = calls[0], calls[0].key.shape[1]
    inputs = first.options.inputs(lambda name: _stacked([getattr(call, name) for call in calls]))
    indices = torch.arange(count, dtype=torch.float64, device=first.key.device)[None]
    queries = [call.optional_inputs["query_coordinates"] for call in calls if "query_coordinates" in call.optional_inputs]
    keys = [call.optional_inputs.get("key_coordinates", one.start + indices) for one, call in passes]
    return Call(
        replace(first.options, items=len(passes), num_keys=count),
        **inputs,
        masks=Masks(_stacked([call.masks.positions for call in calls]), count),
        optional_inputs={"key_coordinates": _stacked(keys), **({"query_coordinates": _stacked(queries)} if queries else {})},
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """The tensors as items of one batch; a single one is not copied."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _attend(layer: MultiHeadAttention, call: Call, rows: Values, cache: KeyValueCache) -> Result:
    """All outputs but `output`, in place of which it has `concatenated`, of the new queries and all rows of the cache."""
    outputs = call.options.outputs
    call = call.with_options(outputs=outputs - {"output"} | {"concatenated"} if "output" in outputs else outputs)
    if outputs <= FROM_HEADS and call.query.shape[:2] == (1, 1) and (result := _attend_to_pages(layer, call, rows, cache)) is not None:
        return result
    return layer.attend(replace(call, cached=as_values(cache.cached, cache.joined()) | rows))


def _attend_to_pages(layer: MultiHeadAttention, call: Call, rows: Values, cache: KeyValueCache) -> Result | None:
    """The outputs that follow from the heads of one query; None if no kernel of pages computes them, or no key is visible."""
    if not layer.cache_kernels or call.options.reproducible:
        return None
    first, last = (int(index) for index in call.masks.interval(slice(0, 1)))
    if last < first:
        return None
    known = {*rows, "key_projection", "value_projection"}
    for kernel in layer.cache_kernels:
        if (plan := layer.plan(layer.features_of(call), call.options.outputs, known, kernel)) is not None:
            with suppress(Inexact):
                values = layer.values_of(call, None, plan.reads) | rows | {"cache": cache}
                return Result(layer.run(plan, call, values, lambda block: slice(first, last + 1)))
    return None
