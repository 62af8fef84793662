"""Binds a call to a session: new rows are checked by themselves, everything else against all rows that the session then has."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attend.attention.cache import cached_tensors
from attend.attention.call import Call
from attend.attention.decoding import CachedOperation, CachedStep
from attend.attention.masks import Masks
from attend.attention.operators import OWN_OUTPUTS
from attend.errors import InvalidRequest, SessionConflict, TooLarge, pointer
from attend.serving.admission import Admission
from attend.serving.binding import check_against_layer, shape_fields
from attend.serving.calls import call_options, coordinates, input_tensors, make_call
from attend.serving.cost import predict_call, reply_contents
from attend.serving.layers.registry import LoadedLayer
from attend.serving.requests import BoundCall
from attend.serving.sessions.registry import Session
from attend.serving.validation_cache import CachedValidation, cache_key
from attend.spec import LayerSpec
from attend.wire.codec import Decoded
from attend.wire.problems import unknown_field, validate
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.sessions import SessionAttendRequest, StepOptions

Bind = Callable[[Decoded, LoadedLayer, Admission], BoundCall]  # how an endpoint binds a request without a session
LENGTH_FIELDS = ("query_offset", "tokens")  # fields whose validity depends on the session's length
ROW_FIELDS = ("query", "key", "value", "positions", "key_positions")  # fields that have the new rows
NULLABLE_FIELDS = {name for name, field in AttendRequest.model_fields.items() if field.default is None}
METRICS_OF_ALL_VALUES = {"value_norms", "value_norm_weights", "subspace_disagreement"}  # of values that no query may attend to, too


def bind_step(session: Session, decoded: Decoded, layer: LoadedLayer, admission: Admission) -> BoundCall:
    """The bound call. The validation result of an earlier step is reused if only numbers and the session's length differ.

    Raises InvalidRequest, LengthMismatch, SessionConflict, or TooLarge for a cost or length beyond the limits.
    """
    members, spec = _given(decoded.members), layer.spec
    if decoded.sequence is not None:
        del members["layer"]  # the model of the sequence, which is the layer of the session
    options = _options(members, session)
    key = _cache_key(members, options, spec)
    cached = None if key is None else layer.validated.get(key)
    if cached is None:
        rows = _new_rows(members, layer, options.append)
        stop = _length_after(members, options, session)
        request = _whole_request(members, rows, session, stop)
    else:
        stop, request = _length_after(members, options, session), cached.request
    wanted = replace(call_options(request, spec) if cached is None else cached.options, num_keys=stop)
    cost = predict_call(wanted, reply_contents(request), spec, cached=session.length)
    admission._replace(shards=0).require(request, spec, cost)  # a step is computed where its cache is
    query, *appended = input_tensors(members["query"], members.get("key"), members.get("value"), spec, request.reproducible)
    if not options.append:
        appended = [query.new_zeros(1, 0, width) for width in _widths(spec).values()]
    inputs = (query, appended[0], appended[1])
    if cached is None:
        call = _with_new_rows(make_call(request, spec, inputs), members, rows, options.append)
        if key is not None:
            layer.validated.keep(key, CachedValidation(request, call.options, call.masks, cost, False, {}))
    else:
        call = Call(wanted, *inputs, _at_length(cached.masks, session.length, stop))
    _require_rows(session, call, layer)
    step = CachedStep(session.cache, session.length)
    log_fields = {**shape_fields(request, call), "outputs": request.outputs, "operations": cost.operations}
    return BoundCall(request, layer, call, cost, log_fields, operation=step, session=session)


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members that are given: null means for most fields that they are left out."""
    return {name: value for name, value in members.items() if value is not None or name not in NULLABLE_FIELDS}


def _length_after(members: Mapping[str, Any], options: StepOptions, session: Session) -> int:
    """The session's length after the step. Raises TooLarge for more rows than its capacity."""
    name = "key" if "key" in members else "query"
    length = session.length + (members[name].shape[-2] if options.append else 0)
    if session.capacity is not None and length > session.capacity:
        raise TooLarge.where(f"/{name}", f"at most {session.capacity} rows (capacity)", str(length))
    return int(length)


def _with_new_rows(call: Call, members: Mapping[str, Any], rows: AttendRequest, append: bool) -> Call:
    """The call of a request with all keys of a session, as one whose new rows alone are inputs."""
    of_keys = None
    if rows.positions is not None:
        of_keys = call.query_coordinates if rows.key is None else coordinates("key_positions", rows)
    new = replace(call.options, self_attention=append and "key" not in members, keys_as_values=append and "value" not in members)
    return replace(call, options=new, key_coordinates=of_keys)


def _at_length(masks: Masks, length: int, num_keys: int) -> Masks:
    """The masks of an earlier step for a session of `length` rows, which has so many keys after the step."""
    count = masks.positions.shape[1]
    positions = torch.arange(length, length + count)[None]
    return replace(masks, positions=positions, num_keys=num_keys, aligned=length == 0 and count == num_keys)


def _options(members: dict[str, Any], session: Session) -> StepOptions:
    """Takes the fields that only calls with a session have from the members. Raises InvalidRequest or LengthMismatch."""
    options = validate(StepOptions, {name: members.pop(name) for name in StepOptions.model_fields if name in members})
    absent = {"layer": "no layer, since the session has one"}
    absent |= dict.fromkeys(("query_lengths", "key_lengths"), "one sequence, as a session is one")
    absent["segments"] = "query_segments and key_segments, since the keys are those of all calls"
    if not options.append:
        absent |= {name: f"no {name}, since append is false" for name in ("key", "value", "key_positions")}
    for name, expected in absent.items():
        if name in members:
            raise InvalidRequest.where(f"/{name}", expected, name)
    session.require_length(options.expected_length)
    return options


def _cache_key(members: Mapping[str, Any], options: StepOptions, spec: LayerSpec) -> Hashable | None:
    """A key that is equal for steps whose validity does not differ, whatever their numbers and the length of their session."""
    if spec.extents:
        return None
    key = cache_key(members) if members.keys().isdisjoint(LENGTH_FIELDS) else None
    return None if key is None else ("step", options.append, key)


def _new_rows(members: Mapping[str, Any], layer: LoadedLayer, append: bool) -> AttendRequest:
    """The rows of the request, checked against the layer. If nothing is appended, key and value have no rows. Raises InvalidRequest."""
    fields = {name: members[name] for name in ROW_FIELDS if name in members}
    takes_value = "value" in cached_tensors(layer.spec)
    if not append and isinstance(query := members.get("query"), np.ndarray) and query.ndim > 1:
        widths = {name: width for name, width in _widths(layer.spec).items() if name == "key" or takes_value}
        fields |= {name: np.zeros((*query.shape[:-2], 0, width), query.dtype) for name, width in widths.items()}
        if isinstance(positions := members.get("positions"), np.ndarray):
            fields["key_positions"] = np.zeros((*query.shape[:-2], 0, *positions.shape[query.ndim - 1 :]))
    rows = validate(AttendRequest, {"layer": layer.name, "query_offset": 0} | fields)
    if rows.batched and rows.query.shape[0] != 1:
        raise InvalidRequest.where("/query", "one sequence, with a batch axis of 1 or none", f"{rows.query.shape[0]} batch items")
    if rows.value is not None and not takes_value:
        raise InvalidRequest.where("/value", "no value, since sessions of this layer expand keys and values from the same rows", "value")
    check_against_layer(rows, layer.spec)
    return rows


def _whole_request(members: Mapping[str, Any], rows: AttendRequest, session: Session, stop: int) -> AttendRequest:
    """The request with all `stop` keys instead of the new ones."""
    if unknown := [name for name in members if name not in SessionAttendRequest.model_fields]:
        raise InvalidRequest(problems=[unknown_field(pointer([name]), name, SessionAttendRequest) for name in unknown])
    request = validate(AttendRequest, _with_all_keys(members, rows, session, stop))
    check_against_layer(request, session.layer.spec)
    refuse_outputs_of_inputs(request, session.layer.spec)
    return request


def refuse_outputs_of_inputs(request: AttendRequest, spec: LayerSpec) -> None:
    """Raises InvalidRequest for outputs that depend on the inputs of earlier calls, which a session does not keep."""
    for i, name in enumerate(request.outputs):
        if name.endswith("_gradient"):
            raise InvalidRequest.where(f"/outputs/{i}", "no gradients, since a session does not keep the inputs of earlier calls", name)
        if name in OWN_OUTPUTS and OWN_OUTPUTS[name].axes[0] == "k" and name not in cached_tensors(spec):
            raise InvalidRequest.where(f"/outputs/{i}", f"no {name}, since sessions of this layer keep its keys and values", name)


def _require_rows(session: Session, call: Call, layer: LoadedLayer) -> None:
    """Raises SessionConflict if the call needs rows that are freed."""
    if not session.cache.first:
        return
    if call.masks.positions.numel():
        session.require_visible(int(call.masks.positions.min()), "/query_offset")
    if call.options.fully_masked == "uniform" and layer.attention.fully_masked(call) is not None:
        expected = "zero or error, since a query without any key would average rows that the layer's window has freed"
        raise SessionConflict.where("/fully_masked", expected, "uniform")
    if call.pattern is not None:
        freed = call.pattern[..., : session.cache.first]
        if (freed if call.pattern_rows is None else freed * call.pattern_rows).any():
            expected = f"weights of 0 for the first {session.cache.first} rows, which the layer's window has freed"
            raise SessionConflict.where("/pattern", expected, "others")


def _with_all_keys(members: Mapping[str, Any], rows: AttendRequest, session: Session, stop: int) -> dict[str, Any]:
    """The members of a request with all `stop` keys of the session, which have a shape, and no numbers."""
    lead = rows.query.shape[:-2]
    whole = {**members, "layer": session.layer.name, "query": rows.query}
    for name, width in _widths(session.layer.spec).items():
        whole[name] = np.broadcast_to(np.zeros((), np.float32), (*lead, stop, width))
    if rows.positions is not None:
        whole["key_positions"] = np.broadcast_to(np.zeros((), np.int64), (*lead, stop, *rows.positions.shape[1 + len(lead) :]))
    whole.setdefault("query_offset", session.length)
    return whole


def bind_without_step(session: Session, bind: Bind, decoded: Decoded, layer: LoadedLayer, admission: Admission) -> BoundCall:
    """The bound call of a request to another endpoint, which reads the rows of a session and appends none. Raises what `bind` raises, or
    SessionConflict."""
    bound = bind(decoded._replace(members=members_with_session_keys(session, decoded.members)), layer, admission)
    call = bound.call
    bound = bound._replace(call=replace(call, key=call.key[:, :0], value=call.value[:, :0], key_coordinates=None))
    _require_rows(session, bound.call, layer)
    if session.cache.first and isinstance(request := bound.request, AnalysisRequest):
        for name in METRICS_OF_ALL_VALUES & set(request.metrics_for(layer.spec)):
            raise SessionConflict.where("/metrics", "metrics of visible keys alone, since the values of the first rows are freed", name)
    return bound._replace(operation=CachedOperation(session.cache, bound.operation))


def members_with_session_keys(session: Session, members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a request that names a session, with all keys of that session in place of its name. Raises InvalidRequest."""
    own = {name: value for name, value in _given(members).items() if name != "session"}
    for name in ("layer", "key", "value", "key_positions", "query_lengths", "key_lengths"):
        if name in own:
            raise InvalidRequest.where(f"/{name}", f"no {name} beside session", name)
    return _with_all_keys(own, _new_rows(own, session.layer, append=False), session, session.length)


def _widths(spec: LayerSpec) -> dict[str, int]:
    return {"key": spec.key_dim, "value": spec.value_dim}
