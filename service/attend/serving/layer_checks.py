"""Checks a request against its layer: widths, heads, positions, and what the operators of the layer ask for. Only shapes are read."""

from collections.abc import Iterator

from attend.attention.operators.declarations import Extent
from attend.axes import GRADIENTS, MASKS, TENSOR_FIELDS
from attend.errors import InvalidRequest, did_you_mean
from attend.spec import LayerSpec
from attend.wire.problems import describe_value, one_of
from attend.wire.schemas.attend import AttendRequest
from attend.wire.shapes import unaligned

LAYER_AXES = ("h", "output_dim", "value_head_dim")


def refuse_packed(request: AttendRequest) -> None:
    """Raises InvalidRequest for several sequences in one query."""
    if request.query_lengths is not None:
        raise InvalidRequest.where("/query_lengths", "segments, which keep sequences in one query apart here", "query_lengths")


def check_against_layer(request: AttendRequest, spec: LayerSpec) -> None:
    """Raises InvalidRequest if the request's shapes do not fit the layer."""
    layer = f'for layer "{request.layer}"'
    parts = [("query", request.query, spec.query_dim)]
    if request.has_keys:
        parts += [("key", request.key_rows, spec.key_dim), ("value", request.value_rows, spec.value_dim)]
    for name, array, width in parts:
        if array.shape[-1] != width:
            source = "" if getattr(request, name) is not None else f" (taken from the {'query' if array is request.query else 'key'})"
            raise InvalidRequest.where(f"/{name}", f"{width} values per {name} {layer}", f"{array.shape[-1]}{source}")
    q, k, h = request.query.shape[-2], request.num_keys, spec.num_heads
    if spec.positional and request.query_offset is None and unaligned(request, q, k):
        expected = f'an offset (0, "end", …), since {spec.positional} is on {layer} and {q} queries and {k} keys are given'
        raise InvalidRequest.where("/query_offset", expected, "nothing")
    if request.query_lengths is not None:  # each sequence has positions of its own
        q, k = map(max, zip(*request.sequence_lengths, strict=True))
    for extent in spec.extents:
        _check_extent(request, extent, q, k, layer)
    _check_coordinates(request, spec, layer)
    for name, axis, n in _lengths_by_layer(request):
        wanted = h if axis == "h" else getattr(spec, axis)
        if n != wanted and not (n == 1 and axis in TENSOR_FIELDS[name].broadcast):
            or_one = " (or 1)" if axis in TENSOR_FIELDS[name].broadcast else ""
            noun = "heads" if axis == "h" else "values per query"
            raise InvalidRequest.where(f"/{name}", f"{wanted} {noun}{or_one} {layer}", str(n))
    _check_outputs(request, spec, layer)
    for operator in spec.operators:
        if operator.same_keys_for_all_heads:
            require_masks_of_all_heads(request, f"since the {operator.name} of layer {request.layer} selects the same keys for all")
    for name, reason in spec.undefined_options.items():
        if getattr(request, name) is not None:
            raise InvalidRequest.where(f"/{name}", f"none {layer}, since {reason}", name)
    if request.select and request.select.heads:
        for i, head in enumerate(request.select.heads):
            if head >= h:
                raise InvalidRequest.where(f"/select/heads/{i}", f"a head below {h} {layer}", str(head))


def _check_outputs(request: AttendRequest, spec: LayerSpec, layer: str) -> None:
    """Raises InvalidRequest for an output that no step of the layer writes in such a call."""
    present = {"bias": request.bias is not None, "values": request.value is not None or request.in_session}
    names = (*spec.outputs([feature for feature, is_present in present.items() if is_present]), *GRADIENTS)
    for i, name in enumerate(request.outputs):
        if name not in names:
            got = describe_value(name) + did_you_mean(name, names)
            raise InvalidRequest.where(f"/outputs/{i}", f"{one_of(names)}, which this call {layer} computes", got)


def _lengths_by_layer(request: AttendRequest) -> Iterator[tuple[str, str, int]]:
    """(field, axis, length) of each axis whose length the layer has."""
    for name, field in TENSOR_FIELDS.items():
        if (array := getattr(request, name, None)) is not None:
            named = zip(field.of(array.ndim, request.batched), array.shape, strict=True)
            yield from ((name, axis, n) for axis, n in named if axis in LAYER_AXES)


def _check_extent(request: AttendRequest, extent: Extent, q: int, k: int, layer: str) -> None:
    """Raises InvalidRequest unless q queries and k keys are at positions that the layer has."""
    expected = _positions_within(extent, layer)
    if k > extent.stop:
        raise InvalidRequest.where("/query" if request.key is None else "/key", expected, f"up to {k - 1}")
    for offset in request.query_offset if isinstance(request.query_offset, list) else [request.query_offset or 0]:
        if offset == "end":  # after no key, but before the first one if the queries outnumber the keys
            if not extent.negative:
                raise InvalidRequest.where("/query_offset", expected, describe_value(offset))
        elif offset + q > extent.stop or (offset < 0 and not extent.negative):
            at = "/query_offset" if q <= extent.stop else "/query"
            raise InvalidRequest.where(at, expected, f"{offset} to {offset + q - 1}")


def _check_coordinates(request: AttendRequest, spec: LayerSpec, layer: str) -> None:
    """Raises InvalidRequest if the field `positions` does not fit the layer, or is missing."""
    coordinates = spec.coordinates
    if request.positions is None:
        if coordinates is not None and coordinates.required:
            raise InvalidRequest.where("/positions", f"the positions of the queries {layer}, by which it rotates them", "nothing")
        return
    if coordinates is None:
        raise InvalidRequest.where("/positions", f"none {layer}, which does not rotate by them", "positions")
    axes = (coordinates.axes,) if coordinates.axes > 1 else ()
    for name in ("positions", "key_positions"):
        if (array := getattr(request, name)) is None:
            continue
        if array.shape != (wanted := (*array.shape[: 1 + request.batched], *axes)):
            of_row = f"{coordinates.axes} coordinates" if axes else "one number"
            raise InvalidRequest.where(f"/{name}", f"shape {list(wanted)}, {of_row} for each row, {layer}", f"shape {list(array.shape)}")
        if (extent := coordinates.extent) is not None and (last := array.max(initial=0)) >= extent.stop:
            raise InvalidRequest.where(f"/{name}", _positions_within(extent, layer), str(last))


def _positions_within(extent: Extent, layer: str) -> str:
    return f"positions {'' if extent.negative else 'from 0 '}below {extent.stop}, {extent.reason}, {layer}"


def require_masks_of_all_heads(request: AttendRequest, reason: str) -> None:
    """Raises InvalidRequest if a mask or bias has an axis of several heads."""
    for name, axis, n in _lengths_by_layer(request):
        if axis == "h" and n > 1 and name in MASKS:
            raise InvalidRequest.where(f"/{name}", f"the same for all heads, {reason}", f"{n} heads")
