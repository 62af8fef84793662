"""Makes the call of a validated request. Each array is cast once to the layer's dtype, and its numbers must be finite in it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from attend.attention.call import Call, CallOptions
from attend.attention.masks import PADDING, Masks, end_of_real_keys
from attend.attention.operations import PackedAttention
from attend.attention.operators.operator import Interval
from attend.axes import AXES
from attend.errors import InvalidRequest
from attend.serving.casting import aligned, cast, finite_array, tensor_of
from attend.spec import LayerSpec
from attend.spec_parts import Window
from attend.tensors import Array
from attend.wire.schemas.attend import AttendRequest

MAX_POSITION = 2**31  # of those by which RoPE rotates
FIRST_POSITIONS = torch.arange(4096)[None]
WIDER_THAN_ANY = 2**40  # keys on one side of a window: no sequence is longer


def call_options(request: AttendRequest, spec: LayerSpec) -> CallOptions:
    """The options of a request whose shapes fit the layer. Only the shapes of its tensors are read."""
    select = request.select
    softcap = spec.softcap if request.softcap is None else request.softcap
    return CallOptions(
        items=request.query.shape[0] if request.batched else 1,
        num_queries=request.query.shape[-2],
        num_keys=request.key_rows.shape[-2],
        outputs=frozenset(request.outputs),
        scale=spec.scale if request.scale is None else request.scale,
        softcap=softcap or None,
        self_attention=request.key is None,
        keys_as_values=request.value is None,
        fully_masked=request.fully_masked,
        dropout=None if request.dropout is None else (request.dropout.p, request.dropout.seed),
        heads=tuple(select.heads) if select and select.heads else None,
        queries=tuple(select.queries) if select and select.queries else None,
        average=bool(select and select.average),
        top_k=select.top_k if select else None,
        reproducible=request.reproducible,
    )


def make_call(request: AttendRequest, spec: LayerSpec, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None) -> Call:
    """The call, with tensors on the CPU. `inputs`: its query, key and value, if they are known; by default those of the request.

    Raises InvalidRequest if a number is not finite in the layer's dtype.
    """
    query, key, value = inputs or input_tensors(request.query, request.key, request.value, spec, request.reproducible)
    options = call_options(request, spec)
    query_coordinates = coordinates("positions", request)
    return Call(
        options=options,
        query=query,
        key=key,
        value=value,
        masks=_masks(request, spec, options.items, options.num_queries, options.num_keys),
        query_coordinates=query_coordinates,
        key_coordinates=query_coordinates if request.key_positions is None else coordinates("key_positions", request),
        head_scale=_numbers(request, "head_scale", spec.dtype),
        pattern=_numbers(request, "pattern", "float64" if spec.dtype == "float64" else "float32"),
        pattern_rows=_copied(request, "pattern_rows", request.pattern_rows, "bhqk"),
        head_outputs=_numbers(request, "head_outputs", spec.dtype, ("b", "h", "q", "value_head_dim")),
        head_output_rows=_copied(request, "head_output_rows", request.head_output_rows, "bhqk"),
        output_gradient=_output_gradient(request, spec),
    )


def _output_gradient(request: AttendRequest, spec: LayerSpec) -> torch.Tensor | None:
    """The gradient of the output [b, q, output_dim]."""
    if request.output_gradient is None:
        return None
    gradient = cast("output_gradient", request.output_gradient, spec.dtype)
    gradient = gradient if request.batched else gradient[None]
    return aligned(gradient) if request.reproducible else gradient


def packed_attention(request: AttendRequest, spec: LayerSpec) -> PackedAttention:
    """The operation that computes each of several sequences in one query by itself."""
    queries, keys = zip(*request.sequence_lengths, strict=True)
    return PackedAttention(queries, keys, {(q, k): _masks(request, spec, 1, q, k) for q, k in set(request.sequence_lengths)})


def input_tensors(
    query: Array, key: Array | None, value: Array | None, spec: LayerSpec, reproducible: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [b, n, width] in the layer's dtype; a missing key is the query itself, a missing value the key.

    They share the arrays' memory where they can; those of a reproducible call are `aligned`. Raises InvalidRequest for a number that is not
    finite.
    """
    lead = () if query.ndim == 3 else (None,)
    convert = tensor_of if spec.dtype == "bfloat16" else torch.from_numpy  # which needs no Python call
    with np.errstate(over="ignore", invalid="ignore"):
        queries = convert(finite_array("query", query, spec.dtype)[lead])
        keys = queries if key is None else convert(finite_array("key", key, spec.dtype)[lead])
        values = keys if value is None else convert(finite_array("value", value, spec.dtype)[lead])
    if not reproducible:
        return queries, keys, values
    first = aligned(queries)
    second = first if key is None else aligned(keys)
    return first, second, second if value is None else aligned(values)


def coordinates(name: str, request: AttendRequest) -> torch.Tensor | None:
    """The coordinates in this field, float64 [b|1, n] or [b|1, n, axes]. Raises InvalidRequest beyond MAX_POSITION."""
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
    query_segments = request.query_segments if segments is None else segments
    key_segments = _copied(request, "key_segments", request.key_segments if segments is None else segments, "bk")
    bias = None
    if request.bias is not None:
        bias = _expanded(request, "bias", cast("bias", request.bias, spec.dtype, infinite=True))
    intervals: list[Interval | Window] = [*spec.intervals, *([] if request.window is None else [request.window])]
    left = min((n for interval in intervals if (n := _bound(interval.left)) is not None), default=None)
    right = min((n for interval in intervals if (n := _bound(interval.right)) is not None), default=None)
    masks = Masks(
        positions=_positions(q),
        num_keys=k,
        attend_mask=None if allowed is None else _expanded(request, "attend_mask", torch.from_numpy(allowed)),
        attend_keys=_copied(request, "attend_keys", keys, "bk"),
        query_segments=_copied(request, "query_segments", query_segments, "bq"),
        key_segments=None if key_segments is None else key_segments.where(key_segments >= 0, PADDING),
        lengths=_copied(request, "valid_lens", request.valid_lens, "bq"),
        bias=bias,
        bias_blocks=bias is not None and bool((bias == -torch.inf).any()),
        left=left,
        right=right if not request.causal else min(0, 0 if right is None else right),
        chunk=next((interval.chunk for interval in spec.intervals if interval.chunk is not None), None),
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


def _positions(q: int) -> torch.Tensor:
    """0, 1, … as [1, q]: a view of the same memory for few queries."""
    return FIRST_POSITIONS[:, :q] if q <= FIRST_POSITIONS.shape[1] else torch.arange(q)[None]


def _bound(keys: int | None) -> int | None:
    """One side of a window; None if it is wider than any sequence."""
    return None if keys is None or keys >= WIDER_THAN_ANY else keys


def _allowed(attend: Array | None, block: Array | None) -> Array | None:
    """The mask with true = may attend: a copy of `attend`, or `block` inverted; None if neither is given."""
    array = attend if block is None else ~block
    return None if array is None else np.array(array)


def _numbers(request: AttendRequest, name: str, dtype: str, onto: Sequence[str] = "bhqk") -> torch.Tensor | None:
    """The numbers of a field as a tensor of `dtype` with the axes `onto`; None if it has none. Raises InvalidRequest as `cast` does."""
    array = getattr(request, name)
    return None if array is None else _expanded(request, name, cast(name, array, dtype), onto)


def _expanded(request: AttendRequest, name: str, tensor: torch.Tensor, onto: Sequence[str] = "bhqk") -> torch.Tensor:
    """The tensor of a field with the axes `onto`, of which those that it does not have have length 1."""
    return AXES[name].expanded(tensor, request.batched, onto)


def _copied(request: AttendRequest, name: str, array: Array | None, onto: str) -> torch.Tensor | None:
    """A copy of the array of a field as a tensor with the axes `onto`."""
    return None if array is None else _expanded(request, name, torch.from_numpy(np.array(array)), onto)
