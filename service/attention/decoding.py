"""Attention of new rows to all rows of a KV cache: projects the new ones, appends their keys and values, and attends.

One query that requests neither weights nor scores attends to the pages without joining them: with torch's fused kernel page by page or, in
float32 without biases, with the extension in C (`native/pages.h`). Results are merged by their log-sum-exps (Dao et al. 2022, section 3.1):

    L = ln Σ_p exp L_p        O = Σ_p exp(L_p - L) O_p        a sink is one more term of L without an output

Other steps join the pages, and are then computed as calls without a cache are.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from service.attention.cache import KeyValueCache, caches_latent
from service.attention.call import FROM_HEADS, Call, Result
from service.attention.eager import Eager
from service.attention.layer import MultiHeadAttention, result_of
from service.attention.masks import Masks
from service.attention.native.extension import extension
from service.attention.operations import Operation
from service.attention.projections import Projected, Projections

# Returns log-sum-exps, unlike the public function; None if torch lacks this internal operation.
_fused: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
MAX_HEAD_DIM = 256  # largest head_dim that the extension computes
HEAD_DIM_MULTIPLE = 16  # which must divide head_dim


@dataclass(frozen=True, slots=True)
class CachedStep:
    """The operation that appends new rows to a cache and then attends to all its rows.

    `key` of its call has the shape of all these rows, and no numbers.
    """

    cache: KeyValueCache
    start: int  # number of rows before the step
    key: Tensor  # [1, n, key_dim], new rows before projection; n may be 0
    value: Tensor  # [1, n, value_dim]
    key_positions: Tensor | None = None  # float64 [1, n] or [1, n, axes]; None: start, start + 1, …

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        return forward_steps(layer, [(self, call)])[0]

    def to(self, device: torch.device) -> Self:
        key = self.key.to(device)
        positions = None if self.key_positions is None else self.key_positions.to(device)
        return replace(self, key=key, value=key if self.value is self.key else self.value.to(device), key_positions=positions)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Steps with equal `shapes`, and queries of equal shape, may be projected together."""
        return self.key.shape, self.value is self.key, None if self.key_positions is None else self.key_positions.shape


@dataclass(frozen=True, slots=True)
class CachedOperation:
    """An operation, or the layer's forward pass, with the rows of a cache in place of the call's keys and values."""

    cache: KeyValueCache
    operation: Operation | None

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        cached, rows = copy(layer), self.cache.joined()
        cached.projections, cached.short = CachedProjections(layer, rows), None
        if layer.indexer is not None:
            cached.indexer = layer.indexer.with_keys(rows["index_key"][None])
        return cached.forward(call) if self.operation is None else self.operation(cached, call)

    def to(self, device: torch.device) -> Self:
        return replace(self, operation=self.operation and self.operation.to(device))


class CachedProjections(Projections):
    """The projections of a layer, except that keys and values are those of a cache."""

    def __init__(self, layer: MultiHeadAttention, rows: Mapping[str, Tensor]) -> None:
        super().__init__(layer.spec, layer.weights)
        self._layer, self._rows = layer, rows

    def project(self, call: Call) -> Projected:
        positions = None if call.key_positions is None else call.key_positions[:, :0]
        queries_alone = replace(call, key=call.key[:, :0], value=call.value[:, :0], key_positions=positions)
        query, *_ = self._layer.projections.project(queries_alone)
        return query, *keys_and_values(self._layer, self._rows)

    def product(self, x: Tensor, name: str) -> Tensor:
        return self._layer.projections.product(x, name)


@torch.inference_mode()
def forward_steps(layer: MultiHeadAttention, steps: Sequence[tuple[CachedStep, Call]]) -> list[Result]:
    """The results of steps of several caches, with equal numbers of rows. Their rows are projected together."""
    rows = _stack_new_rows(steps)
    projected = layer.project(rows)
    appended = _cached(layer, rows, projected)
    results = []
    for i, (step, call) in enumerate(steps):
        step.cache.largest_row = max(step.cache.largest_row, largest_row(step.key))
        step.cache.write(step.start, {name: tensor[i] for name, tensor in appended.items()})
        results.append(_attend(layer, call, projected[0][i : i + 1], step.cache))
    concatenated = [tensors["concatenated"] for (_, call), (tensors, _) in zip(steps, results, strict=True) if "output" in call.outputs]
    outputs = iter(layer.project_back(_stacked(concatenated)).chunk(len(concatenated)) if concatenated else ())
    for (_, call), (tensors, _) in zip(steps, results, strict=True):
        if "output" in call.outputs:
            tensors["output"] = next(outputs)
    return [result_of(call, *result) for (_, call), result in zip(steps, results, strict=True)]


def largest_row(rows: Tensor) -> float:
    """The largest root mean square of a row; at least 1, since biases of the projections do not shrink with small inputs."""
    if not rows.numel():
        return 1.0
    return max(1.0, float(torch.linalg.vector_norm(rows, dim=-1).max()) / math.sqrt(rows.shape[-1]))


def _stack_new_rows(steps: Sequence[tuple[CachedStep, Call]]) -> Call:
    """One call with the new rows of all steps as its batch items, to be projected."""
    (first, call), calls = steps[0], [call for _, call in steps]
    query = _stacked([call.query for call in calls])
    key = query if first.key is call.query else _stacked([step.key for step, _ in steps])
    value = key if first.value is first.key else _stacked([step.value for step, _ in steps])
    count, device = key.shape[1], query.device
    indices = torch.arange(count, dtype=torch.float64, device=device)[None]
    return replace(
        call,
        query=query,
        key=key,
        value=value,
        masks=Masks(torch.cat([call.masks.positions for call in calls]), count),
        positions=None if call.positions is None else torch.cat([call.positions for call in calls if call.positions is not None]),
        key_positions=torch.cat([step.start + indices if step.key_positions is None else step.key_positions for step, _ in steps]),
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """The tensors as items of one batch; a single one is not copied."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _cached(layer: MultiHeadAttention, rows: Call, projected: Projected) -> dict[str, Tensor]:
    """What a cache keeps of projected rows, [b, heads, n, width] by name."""
    if caches_latent(layer.spec):
        latents = layer.projections.outputs(replace(rows, outputs=frozenset({"latent", "rope_key"})), projected)
        tensors = {name: tensor[:, None] for name, tensor in latents.items()}
    else:
        tensors = {"key": projected[1], "value": projected[2]}
    return tensors if layer.indexer is None else tensors | {"index_key": layer.indexer.keys(rows)}


def keys_and_values(layer: MultiHeadAttention, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The keys and values [1, kv heads, n, …] of all rows of a cache, joined."""
    if caches_latent(layer.spec):
        return layer.projections.expand_latent(rows["latent"], rows["rope_key"])
    return rows["key"][None], rows["value"][None]


def _attend(layer: MultiHeadAttention, call: Call, query: Tensor, cache: KeyValueCache) -> tuple[dict[str, Tensor], Tensor | None]:
    """All outputs but `output`, and the fully masked rows, of query [1, h, q, d] and all rows of the cache."""
    if (head_outputs := _attend_to_pages(layer.eager, call, query, cache)) is not None:
        return layer.merge_heads(call, head_outputs), None
    rows, outputs = cache.joined(), call.outputs - {"latent"}  # `attend` would project `latent` from the inputs
    if layer.indexer is not None:
        call = layer.indexer.with_keys(rows["index_key"][None]).select_keys(call)
    tensors, fully_masked = layer.attend(replace(call, outputs=outputs), query, *keys_and_values(layer, rows))
    return (tensors | {"latent": rows["latent"]} if "latent" in call.outputs else tensors), fully_masked


def _attend_to_pages(eager: Eager, call: Call, query: Tensor, cache: KeyValueCache) -> Tensor | None:
    """Head outputs [1, h, 1, value_head_dim] of one query, page by page; None if the fused kernel cannot compute the call."""
    masks, spec = call.masks, eager.spec
    if _fused is None or query.device.type != "cpu" or query.shape[2] != 1 or not call.outputs <= FROM_HEADS or caches_latent(spec):
        return None
    if masks.has_sets or masks.bias is not None or call.softcap or call.dropout or call.reproducible:
        return None
    if not eager.is_fusible_with_sinks or spec.value_head_dim != spec.head_dim:
        return None
    first, last = (int(index) for index in masks.interval(slice(0, 1)))
    if last < first:
        return None
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    rows = query.view(1, kv_heads, heads // kv_heads, -1)  # heads that share keys, as rows of one product
    bias = eager.bias(query, masks, slice(0, 1), slice(0, masks.num_keys))
    if bias is not None:
        bias = bias.to(query.dtype).expand(1, heads, 1, -1).reshape(1, kv_heads, heads // kv_heads, -1)
    keys = slice(first, last + 1)
    if bias is None and extension is not None and _suits_extension(query):
        result = _pages_in_c(rows[0], call.scale, cache, keys)
    else:
        result = _pages_in_torch(rows, call.scale, cache, keys, bias)
    if result is None:
        return None
    outputs, totals = result
    if (sinks := eager.sinks(None)) is not None:
        shift = eager.alibi_shift(masks, slice(0, 1), None)
        total_sinks = sinks[:, 0] if shift is None else sinks[:, 0] - shift[0, :, 0]
        outputs = (outputs * torch.sigmoid(totals - total_sinks)[:, None]).to(query.dtype)
    return outputs.view(1, heads, 1, -1)


def _pages_in_torch(rows: Tensor, scale: float, cache: KeyValueCache, keys: slice, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Outputs [heads, d] and log-sum-exps [heads] of rows [1, kv heads, group, d] and some keys of a cache; None if scores overflow."""
    outputs, totals = [], []
    for page_keys, tensors in cache.blocks(keys.start, keys.stop):
        mask = None if bias is None else bias[..., page_keys]
        output, total = _fused(rows, tensors["key"][None], tensors["value"][None], scale=scale, attn_mask=mask)
        outputs.append(output.reshape(-1, rows.shape[-1]))
        totals.append(total.reshape(-1))
    merged, total = outputs[0], totals[0]
    if len(outputs) > 1:
        total = torch.logsumexp(torch.stack(totals), 0)
        shares = torch.exp(torch.stack(totals) - total)  # [pages, h]
        merged = (torch.stack(outputs) * shares[..., None]).sum(0).to(rows.dtype)
    usable = torch.isfinite(merged).all() and merged[:, 0].all()  # else scores may have overflowed: see `sdpa`
    return (merged, total) if usable else None


def _suits_extension(query: Tensor) -> bool:
    return query.dtype == torch.float32 and query.shape[-1] % HEAD_DIM_MULTIPLE == 0 and query.shape[-1] <= MAX_HEAD_DIM


def _pages_in_c(rows: Tensor, scale: float, cache: KeyValueCache, keys: slice, variant: str = "") -> tuple[Tensor, Tensor] | None:
    """As `_pages_in_torch`, for rows [kv heads, group, d] without bias. `variant`: one of `extension.variants`, by default the fastest."""
    kv_heads, group, width = rows.shape
    pages = []
    for page in cache.pages:
        if keys.start < page.stop and page.start < keys.stop:
            first, stop = max(keys.start, page.start), min(keys.stop, page.stop)
            pages.append((page.tensors["key"].numpy(), page.tensors["value"].numpy(), first - page.start, stop - page.start))
    output, total = np.empty((kv_heads * group, width), np.float32), np.empty(kv_heads * group, np.float32)
    sizes = torch.get_num_threads(), kv_heads, group, width
    query = rows.contiguous().numpy()
    if not extension.attend_cache(variant or extension.variants[0], *sizes, scale, query, tuple(pages), output, total):
        return None
    return torch.from_numpy(output), torch.from_numpy(total)
