"""One call cut along its keys into parts that others compute, and their results joined as if one had computed it all.

Softmax over all keys follows from the softmax over each part and the logarithm of its sum (Dao et al. 2022, section 3.1). A part sees its
keys from 0 on and the queries' places moved accordingly, so causality, windows, lengths, rotations and biases by distance come out as they
were. A sink belongs to the whole: parts compute without it. Knows neither where parts are computed nor how they get there.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks
from service.attention.selection import selection
from service.errors import DeadlinePassed, LayerConflict
from service.serving.codec_pool import CodecPool
from service.serving.cost import Cost, share
from service.serving.executor import Execution, Outcome
from service.serving.layers.registry import HeldLayer, LayerRegistry
from service.serving.requests import TOO_LATE, BoundCall
from service.spec import PROJECTIONS

MERGED = {"output", "concatenated", "head_outputs"}
PROJECTED = {f"{name}_projection" for name in PROJECTIONS[:3]}


class Shards(Protocol):
    """Others that hold the same layers and each compute parts of a call."""

    count: int

    async def compute(self, layer: HeldLayer, parts: Sequence[Call], cost: Cost) -> list[Result]:
        """The result of each part; `cost` is predicted for one. Raises from the tree in `service.errors`."""
        ...


async def compute_in_shards(
    shards: Shards, bound: BoundCall, deadline: float | None, clock: Callable[[], float], codecs: CodecPool
) -> Outcome:
    """The result of a call, computed in parts by all shards. Raises DeadlinePassed, and what the shards raise."""
    started, parts = clock(), cut(bound.call, shards.count)
    try:
        async with asyncio.timeout(None if deadline is None else deadline - started):
            results = await shards.compute(bound.layer, parts, share(bound.cost, len(parts)))
    except TimeoutError:
        raise DeadlinePassed(TOO_LATE) from None
    result = await codecs.run(lambda: join(bound.layer.attention, bound.call, results), 0, "")
    return Outcome(result, 0.0, clock() - started, 1, Execution(bound.call.query.shape[0]))


def cut(call: Call, shards: int) -> list[Call]:
    """The call in at most so many parts of consecutive keys, none without keys."""
    bounds = _bounds(call, max(1, min(shards, call.key.shape[1])))
    wanted = (call.outputs & {"scores", "attention_weights"}) | {"log_sum_exp"}
    if call.outputs & MERGED:
        wanted |= {"head_outputs"}
    parts = []
    for first, end in pairwise(bounds):
        key = call.key[:, first:end].clone()  # memory of its own: what is sent of a view is all that it views
        value = key if call.value is call.key else call.value[:, first:end].clone()
        masks = _of_keys(call.masks, first, end)
        part = replace(
            call, key=key, value=value, masks=masks, outputs=frozenset(wanted), head_scale=None, average=False, top_k=None, part=True
        )
        parts.append(part)
    return parts


def without_sinks(attention: MultiHeadAttention) -> MultiHeadAttention:
    """The layer as a part has to compute it; itself where it has no sinks."""
    if not attention.spec.sinks:
        return attention
    weights = {name: tensor for name, tensor in attention.weights.items() if name != "sinks"}
    return MultiHeadAttention(attention.spec.model_copy(update={"sinks": False}), weights, attention.device)


class ShardLayers:
    """A registry's layers as parts have to compute them. Of a layer that is replaced or removed nothing is held any longer."""

    def __init__(self, registry: LayerRegistry) -> None:
        self._registry = registry
        self._without_sinks: WeakKeyDictionary[MultiHeadAttention, HeldLayer] = WeakKeyDictionary()

    def find(self, name: str, fingerprint: str) -> HeldLayer:
        """Raises LayerNotFound; LayerConflict where the layer of that name has another fingerprint here."""
        held = self._registry.find(name)
        if held.fingerprint != fingerprint:
            raise LayerConflict(f'the layer "{name}" is another one on a shard')
        if not held.spec.sinks:
            return held
        if (layer := self._without_sinks.get(held.attention)) is None:
            attention = without_sinks(held.attention)
            layer = HeldLayer(held.name, attention.spec, fingerprint, attention, held.gain)
            self._without_sinks[held.attention] = layer
        return layer


@torch.inference_mode()
def join(attention: MultiHeadAttention, call: Call, parts: Sequence[Result]) -> Result:
    """What the whole call gives, from the results of its parts in order. On the CPU, in float64 where parts are weighed."""
    logs = torch.stack([part.tensors["log_sum_exp"] for part in parts])  # float64 [parts, b, h, q]
    whole = torch.logsumexp(logs, 0)
    empty = whole == -torch.inf
    if attention.spec.sinks:
        sinks = attention.weights["sinks"].cpu().double()[:, None]
        whole = torch.where(empty, whole, torch.logaddexp(whole, sinks))
    shares = torch.exp(logs - whole.masked_fill(empty, 0))
    if call.fully_masked == "uniform":
        sizes = torch.tensor(_bounds(call, len(parts))).double().diff()
        shares = torch.where(empty, (sizes / sizes.sum()).view(-1, 1, 1, 1), shares)
    made: dict[str, Tensor] = {"log_sum_exp": whole.to(attention.eager.dtype)}
    if "scores" in call.outputs:
        made["scores"] = torch.cat([part.tensors["scores"] for part in parts], -1)
    on = call.to(attention.device)
    if call.outputs & PROJECTED:  # of a part they would be turned by its own places, and all of them cost little beside [q, k]
        made |= {f"{name}_projection": x.cpu() for name, x in zip(PROJECTIONS, attention.projections.project([on])[0], strict=False)}
    if "attention_weights" in call.outputs:
        made |= _weights(call, parts, shares)
    if call.outputs & MERGED:
        heads = sum(part.tensors["head_outputs"] * weight[..., None] for part, weight in zip(parts, shares, strict=True))
        assert isinstance(heads, Tensor)
        made |= {name: x.cpu() for name, x in attention.merge(heads.to(on.query), on).items()}
    wanted = call.outputs | {"keys", "values"} if call.top_k else call.outputs
    return Result({name: tensor for name, tensor in made.items() if name in wanted}, empty if empty.any() else None)


def _weights(call: Call, parts: Sequence[Result], shares: Tensor) -> dict[str, Tensor]:
    """The rows asked for, each part's weights times what it counts for, side by side."""
    if call.heads is not None:
        shares = shares[:, :, list(call.heads)]
    if call.queries is not None:
        shares = shares[..., list(call.queries)]
    pieces = [part.tensors["attention_weights"] for part in parts]
    weights = torch.cat([piece * weight[..., None].to(piece.dtype) for piece, weight in zip(pieces, shares, strict=True)], -1)
    return selection(weights, call)


def _bounds(call: Call, n: int) -> list[int]:
    """Where parts begin and end: n + 1 places among the keys."""
    return [call.key.shape[1] * i // n for i in range(n + 1)]


def _of_keys(masks: Masks, first: int, end: int) -> Masks:
    """The masks as the keys from `first` on see them, which count from 0."""

    def keep(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[-1] == 1 else tensor[..., first:end].clone()

    return replace(
        masks,
        positions=masks.positions - first,
        num_keys=end - first,
        attend_mask=keep(masks.attend_mask),
        attend_keys=keep(masks.attend_keys),
        lengths=None if masks.lengths is None else (masks.lengths - first).clamp(0, end - first),
        bias=keep(masks.bias),
        aligned=False,
    )
