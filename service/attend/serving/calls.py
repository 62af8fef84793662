"""Makes the call of a validated request. Each array is cast once to the layer's dtype, and its numbers must be finite in it."""

from collections.abc import Mapping
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import torch

from attend.attention.call import Call, CallOptions
from attend.attention.masks import PADDING, Masks, end_of_real_keys
from attend.attention.operations import PackedAttention
from attend.attention.operators.declarations import Interval
from attend.axes import MASKS, OPTIONAL_INPUTS, TENSOR_FIELDS
from attend.serving.casting import all_true, at_cache_line, finite_array, tensor_of
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH, Array
from attend.wire.schemas.attend import AttendRequest

FIRST_POSITIONS = torch.arange(4096)[None]
WIDER_THAN_ANY = 2**40  # keys on one side of a window: no sequence is longer


def call_options(request: AttendRequest, spec: LayerSpec) -> CallOptions:
    """The options of a request whose shapes fit the layer. Only the shapes of its tensors are read."""
    select = request.select
    softcap = spec.softcap if request.softcap is None else request.softcap
    return CallOptions(
        items=request.query.shape[0] if request.batched else 1,
        num_queries=request.query.shape[-2],
        num_keys=request.num_keys,
        outputs=frozenset(request.outputs),
        scale=spec.scale if request.scale is None else request.scale,
        softcap=softcap or None,
        self_attention=request.key is None and request.has_keys,
        keys_as_values=request.value is None and request.has_keys,
        fully_masked=request.fully_masked,
        dropout=None if request.dropout is None else (request.dropout.p, request.dropout.seed),
        heads=tuple(select.heads) if select and select.heads else None,
        queries=tuple(select.queries) if select and select.queries else None,
        average=bool(select and select.average),
        top_k=select.top_k if select else None,
        reproducible=request.reproducible,
    )


def make_call(request: AttendRequest, spec: LayerSpec) -> Call:
    """The call, with tensors on the CPU. Of the keys of a session, only the new ones are among its inputs.

    Raises InvalidRequest if a number is not finite in the layer's dtype.
    """
    query, key, value = input_tensors(request.query, request.key, request.value, spec, request.reproducible)
    if not request.has_keys:
        key, value = no_rows(query, spec)
    options = call_options(request, spec)
    others, of_masks = call_tensors(given_arrays(request), request.batched, spec, request.reproducible)
    if request.key_positions is None and request.positions is not None:
        others["key_coordinates"] = others["query_coordinates"] if request.has_keys else others["query_coordinates"][:, :0]
    masks = _masks(request, spec, options.items, options.num_queries, options.num_keys, of_masks)
    return Call(options=options, query=query, key=key, value=value, masks=masks, optional_inputs=others)


def no_rows(query: torch.Tensor, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value without rows, of a call that appends none to its session."""
    return query.new_zeros(1, 0, spec.key_dim), query.new_zeros(1, 0, spec.value_dim)


def given_arrays(request: AttendRequest) -> dict[str, Array]:
    """The tensors of a request, by the names of their fields."""
    return {name: array for name in TENSOR_FIELDS if (array := getattr(request, name, None)) is not None}


def packed_attention(request: AttendRequest, spec: LayerSpec) -> PackedAttention:
    """The operation that computes each of several sequences in one query by itself."""
    queries, keys = zip(*request.sequence_lengths, strict=True)
    return PackedAttention(queries, keys, {(q, k): _masks(request, spec, 1, q, k, {}) for q, k in set(request.sequence_lengths)})


def input_tensors(
    query: Array, key: Array | None, value: Array | None, spec: LayerSpec, reproducible: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [b, n, width] in the layer's dtype; a missing key is the query itself, a missing value the key.

    They share the arrays' memory where they can; those of a reproducible call are `at_cache_line`. Raises InvalidRequest for a number that
    is not finite.
    """
    lead = () if query.ndim == 3 else (None,)
    convert = tensor_of if spec.dtype == "bfloat16" else torch.from_numpy  # which needs no Python call
    with np.errstate(over="ignore", invalid="ignore"):
        queries = convert(finite_array("query", query, spec.dtype)[lead])
        keys = queries if key is None else convert(finite_array("key", key, spec.dtype)[lead])
        values = keys if value is None else convert(finite_array("value", value, spec.dtype)[lead])
    if not reproducible:
        return queries, keys, values
    first = at_cache_line(queries)
    second = first if key is None else at_cache_line(keys)
    return first, second, second if value is None else at_cache_line(values)


def field_tensor(name: str, array: Array, batched: bool, spec: LayerSpec, reproducible: bool = False) -> torch.Tensor:
    """The tensor of a field in the call, as its row in `axes.py` says, of its validated array.

    Numbers are cast; other elements are copied. Raises InvalidRequest for a number that is not finite.
    """
    field = TENSOR_FIELDS[name]
    if field.kind not in ("number", "bias"):
        return torch.from_numpy(field.expanded(~array if field.inverted else array, batched))
    dtype = max(field.at_least or spec.dtype, spec.dtype, key=lambda dtype: BY_TORCH[dtype].size)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = finite_array(name, array, dtype, infinite=field.kind == "bias")
    tensor = tensor_of(field.expanded(numbers, batched))
    return at_cache_line(tensor) if reproducible else tensor


def call_tensors(arrays: Mapping[str, Array], batched: bool, spec: LayerSpec, reproducible: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of `Call` beside its inputs, and what the masks among the arrays are in `Masks`, by their names there.

    Raises as `field_tensor`.
    """
    others: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for name, array in arrays.items():
        if name in OPTIONAL_INPUTS:
            others[OPTIONAL_INPUTS[name].tensor or name] = field_tensor(name, array, batched, spec, reproducible)
        elif name in MASKS:
            masks |= dict.fromkeys((MASKS[name].tensor or name).split(), field_tensor(name, array, batched, spec, reproducible))
    if (segments := masks.get("key_segments")) is not None:
        masks["key_segments"] = segments.where(segments >= 0, PADDING)
    if (bias := arrays.get("bias")) is not None:
        masks["bias_blocks"] = not all_true(np.isfinite(bias))
    return others, masks


def _masks(request: AttendRequest, spec: LayerSpec, b: int, q: int, k: int, tensors: Mapping[str, Any]) -> Masks:
    requested = Interval() if request.window is None else Interval(request.window.left, request.window.right)
    interval = reduce(and_, spec.intervals, requested & Interval(right=0 if request.causal else None))
    masks = Masks(
        positions=_positions(q),
        num_keys=k,
        left=_bound(interval.left),
        right=_bound(interval.right),
        chunk=interval.chunk,
        aligned=q == k and request.query_offset in (None, 0),
        **tensors,
    )
    offset = request.query_offset or 0
    if not offset:
        return masks
    if offset == "end":
        shift = end_of_real_keys(masks, b)[:, None] - q
    else:
        shift = torch.tensor(offset if isinstance(offset, list) else [offset]).view(-1, 1)
    return masks._replace(positions=masks.positions + shift)


def _positions(q: int) -> torch.Tensor:
    """0, 1, … as [1, q]: a view of the same memory for few queries."""
    return FIRST_POSITIONS[:, :q] if q <= FIRST_POSITIONS.shape[1] else torch.arange(q)[None]


def _bound(keys: int | None) -> int | None:
    """One side of a window; None if it is wider than any sequence."""
    return None if keys is None or keys >= WIDER_THAN_ANY else keys
