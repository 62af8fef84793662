"""Binds a call to a session: new rows are checked by themselves, everything else against all rows that the session then has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from service.attention.cache import caches_latent
from service.attention.call import Call
from service.attention.decoding import CachedStep
from service.errors import InvalidRequest, SessionConflict, TooLarge
from service.serving.binding import bind, check_against_layer, finite_arrays, rotary_positions, shape_fields, tensors_of
from service.serving.cost import Admission, predict
from service.serving.layers.registry import LoadedLayer
from service.serving.requests import BoundCall
from service.serving.sessions.session import Session
from service.spec import LayerSpec
from service.wire.codec import Decoded
from service.wire.problems import validate
from service.wire.schemas.attend import AttendRequest
from service.wire.schemas.sessions import StepOptions

ROW_FIELDS = ("query", "key", "value", "positions", "key_positions")  # of the new rows


def bind_step(session: Session, decoded: Decoded, layer: LoadedLayer, admission: Admission) -> BoundCall:
    """The bound call. Raises InvalidRequest, LengthMismatch, SessionConflict, or TooLarge for a cost or length beyond the limits."""
    members, spec = dict(decoded.members), layer.spec
    if "layer" in members:
        raise InvalidRequest.where("/layer", "no layer, since the session has one", "layer")
    options = validate(StepOptions, {name: members.pop(name) for name in StepOptions.model_fields if name in members})
    for name in ("query_lengths", "key_lengths"):
        if name in members:
            raise InvalidRequest.where(f"/{name}", "one sequence, as a session is one", name)
    session.require_length(options.expected_length)
    if not options.append:
        for name in ("key", "value", "key_positions"):
            if name in members:
                raise InvalidRequest.where(f"/{name}", f"no {name}, since append is false", name)
    rows = _new_rows(members, layer, options.append)
    appended = (rows.query if rows.key is None else rows.key).shape[-2]
    stop = session.length + appended
    if session.capacity is not None and stop > session.capacity:
        raise TooLarge.where("/query" if rows.key is None else "/key", f"at most {session.capacity} rows (capacity)", str(stop))
    request = _whole_request(members, rows, session, stop)
    cost = predict(request, spec, cached=session.length)
    admission.require(request, spec, cost)
    query, key, value = tensors_of(*finite_arrays(rows.query, rows.key, rows.value, spec))
    call = bind(request, spec, (query, *_placeholders(spec, stop)))
    _require_rows(session, call, layer)
    positions = call.positions if rows.key is None else rotary_positions("key_positions", rows)
    step = CachedStep(session.cache, session.length, key, value, positions)
    log_fields = {**shape_fields(request, call), "outputs": request.outputs, "operations": cost.operations}
    call = replace(call, key_positions=None)
    return BoundCall(request, layer, call, cost, log_fields, operation=step, session=session)


def _new_rows(members: Mapping[str, Any], layer: LoadedLayer, append: bool) -> AttendRequest:
    """The rows of the request, checked against the layer. If nothing is appended, key and value have no rows. Raises InvalidRequest."""
    fields = {name: members[name] for name in ROW_FIELDS if name in members}
    if not append and isinstance(query := members.get("query"), np.ndarray) and query.ndim > 1:
        widths = {name: width for name, width in _widths(layer.spec).items() if name == "key" or layer.spec.latent is None}
        fields |= {name: np.zeros((*query.shape[:-2], 0, width), query.dtype) for name, width in widths.items()}
    rows = validate(AttendRequest, {"layer": layer.name, "query_offset": 0} | fields)
    if rows.batched and rows.query.shape[0] != 1:
        raise InvalidRequest.where("/query", "one sequence, with a batch axis of 1 or none", f"{rows.query.shape[0]} batch items")
    if layer.spec.latent is not None and rows.value is not None:
        raise InvalidRequest.where("/value", "no value, since latent attention projects keys and values from the same rows", "value")
    check_against_layer(rows, layer.spec)
    return rows


def _whole_request(members: Mapping[str, Any], rows: AttendRequest, session: Session, stop: int) -> AttendRequest:
    """The request with all `stop` keys instead of the new ones. They have a shape, and no numbers."""
    spec, lead = session.layer.spec, rows.query.shape[:-2]
    whole = {**members, "layer": session.layer.name, "query": rows.query}
    whole |= {name: np.broadcast_to(np.zeros((), np.float32), (*lead, stop, width)) for name, width in _widths(spec).items()}
    if rows.positions is not None:
        whole["key_positions"] = np.broadcast_to(np.zeros((), np.int64), (*lead, stop, *rows.positions.shape[1 + len(lead) :]))
    if whole.get("query_offset") is None:
        whole["query_offset"] = session.length
    request = validate(AttendRequest, whole)
    check_against_layer(request, spec)
    for i, name in enumerate(request.outputs):
        if name.endswith("_gradient"):
            raise InvalidRequest.where(f"/outputs/{i}", "no gradients, since a session does not keep the inputs of earlier calls", name)
        if name == "latent" and not caches_latent(spec):
            raise InvalidRequest.where(f"/outputs/{i}", "no latent vectors, since sessions of this layer keep its keys and values", name)
    return request


def _require_rows(session: Session, call: Call, layer: LoadedLayer) -> None:
    """Raises SessionConflict if the call needs rows that are freed."""
    if not session.cache.first:
        return
    if call.masks.positions.numel():
        session.require_visible(int(call.masks.positions.min()), "/query_offset")
    if call.fully_masked == "uniform" and layer.attention.fully_masked(call) is not None:
        expected = "zero or error, since a query without any key would average rows that the layer's window has freed"
        raise SessionConflict.where("/fully_masked", expected, "uniform")


def _widths(spec: LayerSpec) -> dict[str, int]:
    return {"key": spec.key_dim, "value": spec.value_dim}


def _placeholders(spec: LayerSpec, rows: int) -> tuple[torch.Tensor, ...]:
    """Keys and values [1, rows, width] without numbers."""
    return tuple(torch.zeros(()).expand(1, rows, width) for width in _widths(spec).values())
