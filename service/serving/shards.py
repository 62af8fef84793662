"""Cuts a call along its keys into parts for other processes, and joins their results into the result of the whole call.

The softmax over all keys follows from each part's softmax and log-sum-exp (Dao et al. 2022, section 3.1). A part counts its keys from 0 and
shifts its query positions by the same amount, so causality, windows, lengths, rotations and distance biases do not change. A sink is
added once, in `merge_results`; parts are computed without it. `Shards` is the interface to the transport.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from service.attention.call import PROJECTED, Call, Result, reduce_weights
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks
from service.errors import DeadlinePassed, LayerConflict
from service.serving.admission import cost_of_part
from service.serving.codec_pool import CodecPool
from service.serving.cost import Cost
from service.serving.executor import Execution, Outcome
from service.serving.layers.registry import LayerRegistry, LoadedLayer
from service.serving.requests import TOO_LATE, BoundCall

MERGED_OUTPUTS = {"output", "concatenated", "head_outputs"}


class Shards(Protocol):
    """Processes with the same layers, each of which computes parts of a call."""

    count: int

    async def compute(self, layer: LoadedLayer, parts: Sequence[Call], cost: Cost) -> list[Result]:
        """Compute the parts; `cost` is the predicted cost of one. Raises AttendError."""
        ...


async def compute_in_shards(
    shards: Shards, bound: BoundCall, deadline: float | None, clock: Callable[[], float], codecs: CodecPool
) -> Outcome:
    """Compute a call in parts on all shards. Raises DeadlinePassed, and what `Shards.compute` raises."""
    started, parts = clock(), split_call(bound.call, shards.count)
    try:
        async with asyncio.timeout(None if deadline is None else deadline - started):
            results = await shards.compute(bound.layer, parts, cost_of_part(bound.cost, len(parts)))
    except TimeoutError:
        raise DeadlinePassed(TOO_LATE) from None
    result = await codecs.run(lambda: merge_results(bound.layer.attention, bound.call, results), 0, "")
    return Outcome(result, 0.0, clock() - started, 1, Execution(bound.call.query.shape[0]))


def split_call(call: Call, shards: int) -> list[Call]:
    """The parts of a call, at most `shards`, each with at least one key. Their keys are consecutive slices [b, part, …]."""
    bounds = _bounds(call, max(1, min(shards, call.key.shape[1])))
    wanted = (call.outputs & {"scores", "attention_weights"}) | {"log_sum_exp"}
    if call.outputs & MERGED_OUTPUTS:
        wanted |= {"head_outputs"}
    parts = []
    for first, end in pairwise(bounds):
        key = call.key[:, first:end].clone()  # a copy: sending a view would send all of the memory under it
        value = key if call.value is call.key else call.value[:, first:end].clone()
        masks = _key_range(call.masks, first, end)
        positions = None if call.key_positions is None else call.key_positions[:, first:end].clone()
        part = replace(call, key=key, value=value, key_positions=positions, masks=masks, outputs=frozenset(wanted), is_part=True)
        part = replace(part, head_scale=None, average=False, top_k=None)
        parts.append(part)
    return parts


def without_sinks(attention: MultiHeadAttention) -> MultiHeadAttention:
    """The layer without attention sinks, for computing parts; the same object if it has none."""
    if not attention.spec.sinks:
        return attention
    weights = {name: tensor for name, tensor in attention.weights.items() if name != "sinks"}
    return MultiHeadAttention(attention.spec.model_copy(update={"sinks": False}), weights, attention.device)


class ShardLayers:
    """The layers of a registry without their sinks, for computing parts. Weak references: replaced and removed layers are freed."""

    def __init__(self, registry: LayerRegistry) -> None:
        self._registry = registry
        self._without_sinks: WeakKeyDictionary[MultiHeadAttention, LoadedLayer] = WeakKeyDictionary()

    def find(self, name: str, fingerprint: str) -> LoadedLayer:
        """The layer without sinks. Raises LayerNotFound, or LayerConflict if its fingerprint differs here."""
        layer = self._registry.find(name)
        if layer.fingerprint != fingerprint:
            raise LayerConflict(f'the layer "{name}" is another one on a shard')
        if not layer.spec.sinks:
            return layer
        if (without := self._without_sinks.get(layer.attention)) is None:
            attention = without_sinks(layer.attention)
            without = LoadedLayer(layer.name, attention.spec, fingerprint, attention, layer.score_deviation)
            self._without_sinks[layer.attention] = without
        return without


@torch.inference_mode()
def merge_results(attention: MultiHeadAttention, call: Call, parts: Sequence[Result]) -> Result:
    """The result of the whole call from those of its parts, in order. Tensors are on the CPU; parts are weighted in float64."""
    log_sums = torch.stack([part.tensors["log_sum_exp"] for part in parts])  # float64 [parts, b, h, q]
    log_sum = torch.logsumexp(log_sums, 0)
    fully_masked = log_sum == -torch.inf
    if attention.spec.sinks:
        sinks = attention.weights["sinks"].cpu().double()[:, None]
        log_sum = torch.where(fully_masked, log_sum, torch.logaddexp(log_sum, sinks))
    shares = torch.exp(log_sums - log_sum.masked_fill(fully_masked, 0))
    if call.fully_masked == "uniform":
        sizes = torch.tensor(_bounds(call, len(parts))).double().diff()
        shares = torch.where(fully_masked, (sizes / sizes.sum()).view(-1, 1, 1, 1), shares)
    tensors: dict[str, Tensor] = {"log_sum_exp": log_sum.to(attention.eager.dtype)}
    if "scores" in call.outputs:
        tensors["scores"] = torch.cat([part.tensors["scores"] for part in parts], -1)
    device_call = call.to(attention.device)
    if call.outputs & PROJECTED:  # computed here: parts would rotate them by their own positions, and they cost little compared with [q, k]
        projected = attention.projections.outputs(device_call, attention.projections.project(device_call))
        tensors |= {name: x.cpu() for name, x in projected.items()}
    if "attention_weights" in call.outputs:
        tensors |= _weights(call, parts, shares)
    if call.outputs & MERGED_OUTPUTS:
        heads = sum(part.tensors["head_outputs"] * weight[..., None] for part, weight in zip(parts, shares, strict=True))
        assert isinstance(heads, Tensor)
        merged = attention.merge_heads(device_call, heads.to(device_call.query))
        if "output" in call.outputs:
            merged["output"] = attention.project_back(merged["concatenated"])
        tensors |= {name: x.cpu() for name, x in merged.items()}
    wanted = call.outputs | {"keys", "values"} if call.top_k else call.outputs
    return Result({name: tensor for name, tensor in tensors.items() if name in wanted}, fully_masked if fully_masked.any() else None)


def _weights(call: Call, parts: Sequence[Result], shares: Tensor) -> dict[str, Tensor]:
    """The selected weights of the whole call: each part's weights times its share [b, h, q], concatenated along the keys."""
    if call.heads is not None:
        shares = shares[:, :, list(call.heads)]
    if call.queries is not None:
        shares = shares[..., list(call.queries)]
    pieces = [part.tensors["attention_weights"] for part in parts]
    weights = torch.cat([piece * weight[..., None].to(piece.dtype) for piece, weight in zip(pieces, shares, strict=True)], -1)
    return reduce_weights(weights, call)


def _bounds(call: Call, n: int) -> list[int]:
    """The n + 1 boundaries of n parts, as key indices."""
    return [call.key.shape[1] * i // n for i in range(n + 1)]


def _key_range(masks: Masks, first: int, end: int) -> Masks:
    """The masks for the keys first:end, which are renumbered from 0."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[-1] == 1 else tensor[..., first:end].clone()

    return replace(
        masks,
        positions=masks.positions - first,
        num_keys=end - first,
        attend_mask=cut(masks.attend_mask),
        attend_keys=cut(masks.attend_keys),
        key_segments=cut(masks.key_segments),
        lengths=None if masks.lengths is None else (masks.lengths - first).clamp(0, end - first),
        bias=cut(masks.bias),
        aligned=False,
    )
