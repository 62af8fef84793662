"""Makes the call of a validated request. Each array is cast once to the layer's dtype, and its numbers must be finite in it."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from service.attention.call import Call
from service.attention.masks import PADDING, Masks, end_of_real_keys
from service.attention.operations import PackedAttention
from service.errors import InvalidRequest
from service.serving.casting import cast, finite_array, tensor_of
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.schemas.attend import AttendRequest

MAX_POSITION = 2**31  # of those by which RoPE rotates
WIDER_THAN_ANY = 2**40  # keys on one side of a window: no sequence is longer


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


def packed_attention(request: AttendRequest, spec: LayerSpec) -> PackedAttention:
    """The operation that computes each of several sequences in one query by itself."""
    assert request.query_lengths is not None
    queries = tuple(request.query_lengths.tolist())
    keys = queries if request.key_lengths is None else tuple(request.key_lengths.tolist())
    return PackedAttention(queries, keys, {(q, k): _masks(request, spec, 1, q, k) for q, k in set(zip(queries, keys, strict=True))})


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


def rotary_positions(name: str, request: AttendRequest) -> torch.Tensor | None:
    """RoPE's positions, float64 [b|1, n] or [b|1, n, axes]. Raises InvalidRequest beyond MAX_POSITION."""
    if (array := getattr(request, name)) is None:
        return None
    tensor = cast(name, array if request.batched else array[None], "float64")
    if tensor.numel() and (largest := float(tensor.abs().max())) > MAX_POSITION:  # angles are float64
        raise InvalidRequest.where(f"/{name}", f"positions from -{MAX_POSITION} to {MAX_POSITION}", f"one of {largest:g}")
    return tensor


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
        shift = end_of_real_keys(masks, b)[:, None] - q
    else:
        shift = torch.tensor(offset if isinstance(offset, list) else [offset]).view(-1, 1)
    return replace(masks, positions=masks.positions + shift)


@lru_cache(256)
def _positions(q: int) -> torch.Tensor:
    return torch.arange(q)[None]


def _bound(keys: int | None) -> int | None:
    """One side of a window; None if it is wider than any sequence."""
    return None if keys is None or keys >= WIDER_THAN_ANY else keys


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
