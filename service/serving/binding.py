"""Binds a decoded request to its layer: checks shapes and cost, then casts the arrays. Invalid requests are refused here at the latest.

`check_against_layer` reads shapes only, so that the cost is known before any array is allocated. `make_call` then casts every array once to
the layer's dtype and checks that all numbers are finite in it.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from service.attention.call import Call
from service.attention.masks import PADDING, Masks, last_keys
from service.attention.operations import PackedAttention, ShortCall
from service.errors import InvalidRequest
from service.serving.admission import Admission
from service.serving.casting import cast, finite_array, tensor_of
from service.serving.cost import predict
from service.serving.layers.registry import LoadedLayer
from service.serving.requests import BoundCall
from service.serving.validation_cache import cache_key
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.codec import Decoded
from service.wire.problems import describe_value, validate
from service.wire.schemas.attend import AttendRequest
from service.wire.shapes import unaligned

MAX_POSITION = 2**31  # of those by which RoPE rotates
BEYOND = "positions below {}, beyond which this model rotates by other frequencies, {}"


def bind_attend(decoded: Decoded, layer: LoadedLayer, admission: Admission) -> BoundCall:
    """The bound call of a request to POST /attend. The validation result of an earlier request with the same cache key is reused.

    Raises InvalidRequest, or TooLarge for a cost beyond the limits.
    """
    members = decoded.members
    key = cache_key(members)
    if key is not None and (cached := layer.validated.get(key)) is not None:
        arrays = finite_arrays(members["query"], members.get("key"), members.get("value"), layer.spec)
        if cached.is_short:
            return BoundCall(cached.request, layer, cached.call, cached.cost, cached.log_fields, operation=ShortCall(*arrays))
        query, keys, values = tensors_of(*arrays)
        call = replace(cached.call, query=query, key=keys, value=values)
        return BoundCall(cached.request, layer, call, cached.cost, cached.log_fields, cached.in_parts)
    request = validate(AttendRequest, members)
    check_against_layer(request, layer.spec)
    cost = predict(request, layer.spec)
    in_parts = admission.require(request, layer.spec, cost)
    call = make_call(request, layer.spec)
    log_fields = {**shape_fields(request, call), "outputs": request.outputs, "operations": cost.operations}
    if request.query_lengths is not None:
        return BoundCall(request, layer, call, cost, log_fields, operation=_packed(request, layer.spec))
    if key is not None:
        is_short = not in_parts and layer.attention.short is not None and layer.attention.short.suits(call)
        layer.validated.keep(key, request, call, cost, in_parts, log_fields, is_short)
    return BoundCall(request, layer, call, cost, log_fields, in_parts)


def shape_fields(request: AttendRequest, call: Call) -> dict[str, Any]:
    """The fields of the log line that every call has: its layer, and the lengths of its sequences."""
    return {"layer": request.layer, "query": request.query.shape, "keys": call.masks.num_keys}


def _packed(request: AttendRequest, spec: LayerSpec) -> PackedAttention:
    """The operation that computes each of several sequences in one query by itself."""
    assert request.query_lengths is not None
    queries = tuple(request.query_lengths.tolist())
    keys = queries if request.key_lengths is None else tuple(request.key_lengths.tolist())
    return PackedAttention(queries, keys, {(q, k): _masks(request, spec, 1, q, k) for q, k in set(zip(queries, keys, strict=True))})


def refuse_packed(request: AttendRequest) -> None:
    """Raises InvalidRequest for several sequences in one query."""
    if request.query_lengths is not None:
        raise InvalidRequest.where("/query_lengths", "segments, which keep sequences in one query apart here", "query_lengths")


def check_against_layer(request: AttendRequest, spec: LayerSpec) -> None:
    """Raises InvalidRequest if the request's shapes do not fit the layer."""
    layer = f'for layer "{request.layer}"'
    key = request.query if request.key is None else request.key
    value = key if request.value is None else request.value
    parts = (("query", request.query, spec.query_dim), ("key", key, spec.key_dim), ("value", value, spec.value_dim))
    for name, array, width in parts:
        if array.shape[-1] != width:
            source = "" if getattr(request, name) is not None else f" (taken from the {'query' if array is request.query else 'key'})"
            raise InvalidRequest.where(f"/{name}", f"{width} values per {name} {layer}", f"{array.shape[-1]}{source}")
    q, k, h = request.query.shape[-2], key.shape[-2], spec.num_heads
    if spec.positional and request.query_offset is None and unaligned(request, q, k):
        expected = f'an offset (0, "end", …), since {spec.positional} is on {layer} and {q} queries and {k} keys are given'
        raise InvalidRequest.where("/query_offset", expected, "nothing")
    if request.query_lengths is not None:  # each sequence has positions of its own
        keys = request.query_lengths if request.key_lengths is None else request.key_lengths
        q, k = int(request.query_lengths.max()), int(keys.max())
    if spec.rope is not None and spec.rope.max_length is not None:
        offset = request.query_offset if isinstance(request.query_offset, int | list) else 0
        length = max(k, q + max(offset if isinstance(offset, list) else [offset], default=0))
        if length > spec.rope.max_length:
            raise InvalidRequest.where("/query", BEYOND.format(spec.rope.max_length, layer), f"up to {length - 1}")
    _check_positions(request, spec, layer)
    _check_grid(request, spec, q, k, layer)
    if request.output_gradient is not None:
        wanted = (*request.query.shape[:-1], spec.output_dim if spec.projections else spec.concatenated_dim)
        if request.output_gradient.shape != wanted:
            raise InvalidRequest.where("/output_gradient", f"shape {list(wanted)} {layer}", f"shape {list(request.output_gradient.shape)}")
    for name in ("attend_mask", "block_mask", "bias"):
        array = getattr(request, name)
        if array is not None and array.ndim == (4 if request.batched else 3) and array.shape[-3] not in (1, h):
            raise InvalidRequest.where(f"/{name}", f"{h} heads (or 1) {layer}", str(array.shape[-3]))
    if request.head_scale is not None and request.head_scale.shape[-1] != h:
        raise InvalidRequest.where("/head_scale", f"{h} factors {layer}", str(request.head_scale.shape[-1]))
    for i, name in enumerate(request.outputs):
        if (reason := spec.undefined_outputs.get(name)) is not None:
            raise InvalidRequest.where(f"/outputs/{i}", f"an output other than {name} {layer}, {reason}", name)
    if spec.indexer:
        require_masks_of_all_heads(request, f"since the indexer of layer {request.layer} selects the same keys for all")
    if spec.differential and request.dropout is not None:
        raise InvalidRequest.where("/dropout", f"none {layer}, since dropout of a difference of two softmaxes is not defined", "dropout")
    if request.select and request.select.heads:
        for i, head in enumerate(request.select.heads):
            if head >= h:
                raise InvalidRequest.where(f"/select/heads/{i}", f"a head below {h} {layer}", str(head))


def _check_positions(request: AttendRequest, spec: LayerSpec, layer: str) -> None:
    """Raises InvalidRequest if RoPE's positions do not fit the layer, or are missing."""
    if request.positions is None:
        if spec.rope is not None and spec.rope.requires_positions:
            raise InvalidRequest.where("/positions", f"the positions of the queries {layer}, by which its rope rotates them", "nothing")
        return
    if spec.rope is None:
        raise InvalidRequest.where("/positions", f"none {layer}, which has no rope", "positions")
    axes = (spec.rope.num_axes,) if spec.rope.num_axes > 1 else ()
    for name in ("positions", "key_positions"):
        if (array := getattr(request, name)) is None:
            continue
        if array.shape != (wanted := (*array.shape[: 1 + request.batched], *axes)):
            of_row = f"{spec.rope.num_axes} coordinates" if axes else "one number"
            raise InvalidRequest.where(f"/{name}", f"shape {list(wanted)}, {of_row} for each row, {layer}", f"shape {list(array.shape)}")
        if spec.rope.max_length is not None and (last := array.max(initial=0)) >= spec.rope.max_length:
            raise InvalidRequest.where(f"/{name}", BEYOND.format(spec.rope.max_length, layer), str(last))


def _check_grid(request: AttendRequest, spec: LayerSpec, q: int, k: int, layer: str) -> None:
    """Raises InvalidRequest unless all queries and keys are tokens of the layer's grid."""
    if (grid := spec.grid_bias) is None:
        return
    size = f"{grid.num_tokens} tokens of the grid of {grid.height} x {grid.width} {layer}"
    if k > grid.num_tokens:
        raise InvalidRequest.where("/query" if request.key is None else "/key", f"at most the {size}", str(k))
    offsets = request.query_offset if isinstance(request.query_offset, list) else [request.query_offset or 0]
    for offset in offsets:
        if offset == "end" or offset < 0 or offset + q > grid.num_tokens:
            raise InvalidRequest.where("/query_offset", f"the index of the first query among the {size}", describe_value(offset))


def require_masks_of_all_heads(request: AttendRequest, reason: str) -> None:
    """Raises InvalidRequest if a mask or bias has an axis of several heads."""
    for name in ("attend_mask", "block_mask", "bias"):
        array = getattr(request, name)
        if array is not None and array.ndim == (4 if request.batched else 3) and array.shape[-3] > 1:
            raise InvalidRequest.where(f"/{name}", f"the same for all heads, {reason}", f"{array.shape[-3]} heads")


def make_call(request: AttendRequest, spec: LayerSpec, sequences: tuple[torch.Tensor, ...] | None = None) -> Call:
    """The call, with tensors on the CPU. `sequences`: its query, key and value, if they are known; by default those of the request.

    Raises InvalidRequest if a number is not finite in the layer's dtype.
    """
    query, key, value = sequences or tensors_of(*finite_arrays(request.query, request.key, request.value, spec))
    select = request.select
    head_scale = None
    if request.head_scale is not None:
        head_scale = cast("head_scale", request.head_scale, spec.dtype)
        head_scale = head_scale.view(*((1,) if head_scale.ndim == 1 else ()), *head_scale.shape, 1, 1)
    gradient, positions = request.output_gradient, rotary_positions("positions", request)
    softcap = spec.softcap if request.softcap is None else request.softcap
    return Call(
        query=query,
        key=key,
        value=value,
        masks=_masks(request, spec, query.shape[0], query.shape[1], key.shape[1]),
        scale=spec.scale if request.scale is None else request.scale,
        outputs=frozenset(request.outputs),
        softcap=softcap or None,
        positions=positions,
        key_positions=positions if request.key_positions is None else rotary_positions("key_positions", request),
        fully_masked=request.fully_masked,
        head_scale=head_scale,
        dropout=None if request.dropout is None else (request.dropout.p, request.dropout.seed),
        heads=tuple(select.heads) if select and select.heads else None,
        queries=tuple(select.queries) if select and select.queries else None,
        average=bool(select and select.average),
        top_k=select.top_k if select else None,
        reproducible=request.reproducible,
        output_gradient=None if gradient is None else cast("output_gradient", gradient, spec.dtype).view(len(query), *gradient.shape[-2:]),
    )


def rotary_positions(name: str, request: AttendRequest) -> torch.Tensor | None:
    """RoPE's positions, float64 [b|1, n] or [b|1, n, axes]. Raises InvalidRequest beyond MAX_POSITION."""
    if (array := getattr(request, name)) is None:
        return None
    tensor = cast(name, array if request.batched else array[None], "float64")
    if tensor.numel() and (largest := float(tensor.abs().max())) > MAX_POSITION:  # angles are float64
        raise InvalidRequest.where(f"/{name}", f"positions from -{MAX_POSITION} to {MAX_POSITION}", f"one of {largest:g}")
    return tensor


def finite_arrays(query: Array, key: Array | None, value: Array | None, spec: LayerSpec) -> tuple[Array, Array, Array]:
    """Query, key and value [b, n, width] in the layer's dtype. A missing key is the query itself, a missing value the key.

    Raises InvalidRequest if a number is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        queries = finite_array("query", query, spec.dtype)
        keys = queries if key is None else finite_array("key", key, spec.dtype)
        values = keys if value is None else finite_array("value", value, spec.dtype)
    if query.ndim == 3:
        return queries, keys, values
    first = queries[None]
    second = first if keys is queries else keys[None]
    return first, second, second if values is keys else values[None]


def tensors_of(query: Array, key: Array, value: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors that share the arrays' memory; equal arrays become the same tensor."""
    queries = tensor_of(query)
    keys = queries if key is query else tensor_of(key)
    return queries, keys, keys if value is key else tensor_of(value)


def _masks(request: AttendRequest, spec: LayerSpec, b: int, q: int, k: int) -> Masks:
    allowed = _allowed(request.attend_mask, request.block_mask)
    keys = _allowed(request.attend_keys, request.block_keys)
    segments = request.segments
    query_segments = _per_row(request.query_segments if segments is None else segments, request.batched)
    key_segments = _per_row(request.key_segments if segments is None else segments, request.batched)
    bias = None
    if request.bias is not None:
        bias = _pairwise(cast("bias", request.bias, spec.dtype, infinite=True), request.batched)
    windows = [w for w in (request.window, spec.window) if w is not None]
    left = min((n for w in windows if (n := _bound(w.left)) is not None), default=None)
    right = min((n for w in windows if (n := _bound(w.right)) is not None), default=None)
    masks = Masks(
        positions=_positions(q),
        num_keys=k,
        attend_mask=None if allowed is None else _pairwise(torch.from_numpy(allowed), request.batched),
        attend_keys=_per_row(keys, request.batched),
        query_segments=query_segments,
        key_segments=None if key_segments is None else key_segments.where(key_segments >= 0, PADDING),
        lengths=_lengths(request.valid_lens, request.batched),
        bias=bias,
        bias_blocks=bias is not None and bool((bias == -torch.inf).any()),
        left=left,
        right=right if not request.causal else min(0, 0 if right is None else right),
        chunk=spec.chunk_size,
        aligned=q == k and request.query_offset in (None, 0),
    )
    offset = request.query_offset or 0
    if not offset:
        return masks
    if offset == "end":
        shift = last_keys(masks, b)[:, None] - q
    else:
        shift = torch.tensor(offset if isinstance(offset, list) else [offset]).view(-1, 1)
    return replace(masks, positions=masks.positions + shift)


@lru_cache(256)
def _positions(q: int) -> torch.Tensor:
    return torch.arange(q)[None]


def _bound(keys: int | None) -> int | None:
    """One side of a window; None if it is wider than any sequence."""
    return None if keys is None or keys >= 2**40 else keys


def _allowed(attend: Array | None, block: Array | None) -> Array | None:
    """The mask with true = may attend: a copy of `attend`, or `block` inverted; None if neither is given."""
    array = attend if block is None else ~block
    return None if array is None else np.array(array)


def _per_row(array: Array | None, batched: bool) -> torch.Tensor | None:
    """[b, n], or [n] without b, as [b|1, n|1]."""
    return None if array is None else torch.from_numpy(np.array(array if batched else array[None]))


def _pairwise(array: torch.Tensor, batched: bool) -> torch.Tensor:
    """[q,k], [b,q,k], [b,h,q,k] (or without b: [q,k], [h,q,k]) as [b|1, h|1, q|1, k|1]."""
    if array.ndim == 3 and batched:
        return array[:, None]
    return array.reshape((1,) * (4 - array.ndim) + tuple(array.shape))


def _lengths(lens: Array | None, batched: bool) -> torch.Tensor | None:
    """[b] or [b,q] (or without b: a number or [q]) as [b, q|1]."""
    if lens is None:
        return None
    array: Any = lens if batched else lens[None]
    return torch.from_numpy(np.array(array[:, None] if array.ndim == 1 else array))
