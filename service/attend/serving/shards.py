"""Cuts a call along its keys into parts for other processes, and joins their results into the result of the whole call.

The softmax over all keys follows from each part's softmax and log-sum-exp (Dao et al. 2022, section 3.1). A part counts its keys from 0 and
shifts its query positions by the same amount, so causality, windows, lengths, rotations and distance biases do not change. A sink is
added once, in `merge_results`; parts are computed without it. `Shards` is the interface to the transport.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from attend.attention.call import FROM_HEADS, SCORED, Call, Result, reduce_weights
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.numerics import matmul_precision
from attend.axes import CALL_TENSORS
from attend.errors import LayerConflict
from attend.serving.cost import Cost
from attend.serving.layers.registry import LayerRegistry, LoadedLayer

AFTER_PARTS = frozenset(name for name, field in CALL_TENSORS.items() if field.after_heads)  # tensors that parts do not have


class Shards(Protocol):
    """Processes with the same layers, each of which computes parts of a call."""

    count: int

    async def compute(self, layer: LoadedLayer, parts: Sequence[Call], cost: Cost) -> list[Result]:
        """Compute the parts; `cost` is the predicted cost of one. Raises AttendError."""
        ...


def split_call(call: Call, shards: int) -> list[Call]:
    """The parts of a call, at most `shards`, each with at least one key. Their keys are consecutive slices [b, part, …]."""
    bounds = _bounds(call, max(1, min(shards, call.options.num_keys)))
    options, parts = call.options, []
    wanted = (options.outputs & {"scores", "attention_weights"}) | {"log_sum_exp"}
    if options.outputs & FROM_HEADS:
        wanted |= {"head_outputs"}
    options_of_parts = replace(options, outputs=wanted, self_attention=False, average=False, top_k=None, is_part=True)
    for first, end in pairwise(bounds):
        key = call.key[:, first:end].clone()  # a copy: sending a view would send all of the memory under it
        value = key if options.keys_as_values else call.value[:, first:end].clone()
        masks = _key_range(call.masks, first, end)
        optional_inputs = {name: tensor for name, tensor in call.optional_inputs.items() if name not in AFTER_PARTS}
        if "key_coordinates" in optional_inputs:
            optional_inputs["key_coordinates"] = optional_inputs["key_coordinates"][:, first:end].clone()
        part = replace(options_of_parts, num_keys=end - first)
        parts.append(replace(call, options=part, key=key, value=value, optional_inputs=optional_inputs, masks=masks))
    return parts


def find_layer(registry: LayerRegistry, name: str, fingerprint: str) -> LoadedLayer:
    """The layer of a part. Raises LayerNotFound, or LayerConflict if its fingerprint differs here."""
    layer = registry.find(name)
    if layer.fingerprint != fingerprint:
        raise LayerConflict(f'the layer "{name}" is another one on a shard')
    return layer


@torch.inference_mode()
def merge_results(attention: MultiHeadAttention, call: Call, parts: Sequence[Result]) -> Result:
    """The result of the whole call from those of its parts, in order. Tensors are on the CPU; parts are weighted in float64."""
    log_sums = torch.stack([part.tensors["log_sum_exp"] for part in parts]).double()  # [parts, b, h, q]
    log_sum = torch.logsumexp(log_sums, 0)
    fully_masked = log_sum == -torch.inf
    log_sum = attention.with_sinks(log_sum)
    shares = torch.exp(log_sums - log_sum.masked_fill(fully_masked, 0))
    if call.options.fully_masked == "uniform":
        sizes = torch.tensor(_bounds(call, len(parts))).double().diff()
        shares = torch.where(fully_masked, (sizes / sizes.sum()).view(-1, 1, 1, 1), shares)
    with matmul_precision(attention.spec.matmul_precision, attention.device):
        tensors = _merged_tensors(attention, call, parts, shares)
    tensors["log_sum_exp"] = log_sum.to(attention.arithmetic.wide_dtype)
    wanted = call.options.outputs | {"keys", "values"} if call.options.top_k else call.options.outputs
    return Result({name: tensor for name, tensor in tensors.items() if name in wanted}, fully_masked if fully_masked.any() else None)


def _merged_tensors(attention: MultiHeadAttention, call: Call, parts: Sequence[Result], shares: Tensor) -> dict[str, Tensor]:
    """The outputs of the whole call except for `log_sum_exp`; `shares` [parts, b, h, q] are the parts' weights."""
    tensors: dict[str, Tensor] = {}
    if "scores" in call.options.outputs:
        tensors["scores"] = torch.cat([part.tensors["scores"] for part in parts], -1)
    device_call = call.to(attention.device)
    if call.options.outputs - SCORED - FROM_HEADS:  # here: parts would rotate them by their own positions, and they cost little
        projected = device_call.with_options(outputs=call.options.outputs - SCORED - FROM_HEADS)
        tensors |= attention.attend(projected).cpu().tensors
    if "attention_weights" in call.options.outputs:
        tensors |= _weights(call, parts, shares)
    if call.options.outputs & FROM_HEADS:
        heads = sum(part.tensors["head_outputs"] * weight[..., None] for part, weight in zip(parts, shares, strict=True))
        assert isinstance(heads, Tensor)
        finished = attention.finish(device_call, heads.to(device_call.query))
        tensors |= {name: x.cpu() for name, x in finished.items()}
    return tensors


def _weights(call: Call, parts: Sequence[Result], shares: Tensor) -> dict[str, Tensor]:
    """The selected weights of the whole call: each part's weights times its share [b, h, q], concatenated along the keys."""
    if call.options.heads is not None:
        shares = shares[:, :, list(call.options.heads)]
    if call.options.queries is not None:
        shares = shares[..., list(call.options.queries)]
    pieces = [part.tensors["attention_weights"] for part in parts]
    weights = torch.cat([piece * weight[..., None].to(piece.dtype) for piece, weight in zip(pieces, shares, strict=True)], -1)
    return reduce_weights(weights, call)


def _bounds(call: Call, n: int) -> list[int]:
    """The n + 1 boundaries of n parts, as key indices."""
    return [call.options.num_keys * i // n for i in range(n + 1)]


def _key_range(masks: Masks, first: int, end: int) -> Masks:
    """The masks for the keys first:end, which are renumbered from 0."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[-1] == 1 else tensor[..., first:end].clone()

    return masks._replace(
        positions=masks.positions - first,
        num_keys=end - first,
        attend_mask=cut(masks.attend_mask),
        attend_keys=cut(masks.attend_keys),
        key_segments=cut(masks.key_segments),
        lengths=None if masks.lengths is None else (masks.lengths - first).clamp(0, end - first),
        bias=cut(masks.bias),
        aligned=False,
    )
