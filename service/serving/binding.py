"""Binds a decoded request to its layer: checks its shapes and cost, then makes the call. Invalid requests are refused here at the latest.

Only shapes are read before the cost is admitted, so that no array is allocated for a call that is refused.
"""

from dataclasses import replace
from typing import Any

from service.attention.call import Call
from service.attention.operations import ShortCall
from service.errors import InvalidRequest
from service.serving.admission import Admission
from service.serving.calls import finite_arrays, make_call, packed_attention, tensors_of
from service.serving.cost import predict
from service.serving.layers.registry import LoadedLayer
from service.serving.requests import BoundCall
from service.serving.validation_cache import CachedValidation, cache_key
from service.spec import LayerSpec
from service.wire.codec import Decoded
from service.wire.problems import describe_value, validate
from service.wire.schemas.attend import AttendRequest
from service.wire.shapes import unaligned

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
        return BoundCall(request, layer, call, cost, log_fields, operation=packed_attention(request, layer.spec))
    if key is not None:
        is_short = not in_parts and layer.attention.short is not None and layer.attention.short.suits(call)
        layer.validated.keep(key, CachedValidation(request, call, cost, in_parts, log_fields, is_short))
    return BoundCall(request, layer, call, cost, log_fields, in_parts)


def shape_fields(request: AttendRequest, call: Call) -> dict[str, Any]:
    """The fields of the log line that every call has: its layer, and the lengths of its sequences."""
    return {"layer": request.layer, "query": request.query.shape, "keys": call.masks.num_keys}


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
        wanted = (*request.query.shape[:-1], spec.output_dim)
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
