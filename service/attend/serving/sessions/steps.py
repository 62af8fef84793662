"""Binds a call to a session: new rows are checked by themselves, everything else against all rows that the session then has."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attend.attention.cache import follows_from_cache
from attend.attention.call import Call
from attend.attention.decoding import CachedStep
from attend.attention.masks import Masks
from attend.axes import GRADIENTS, MASKS, OTHERS
from attend.errors import InvalidRequest, TooLarge, pointer
from attend.serving.admission import Admission
from attend.serving.binding import Binding, Prepared, Submit
from attend.serving.calls import call_options, field_tensor, input_tensors, make_call
from attend.serving.cost import predict_call, reply_contents
from attend.serving.executor import Outcome
from attend.serving.prepared_cache import cache_key
from attend.serving.requests import Request
from attend.serving.sessions.registry import Session
from attend.serving.sessions.rows import KEY_ROWS, SEQUENCE_LENGTHS, given, new_rows, require_rows, widths_of_rows, with_all_keys
from attend.spec import LayerSpec
from attend.wire.codec import Decoded
from attend.wire.problems import unknown_field, validate
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.sessions import SessionAttendRequest, StepOptions

MASKS_AND_OTHERS = (*MASKS, *OTHERS)
LENGTH_FIELDS = ("query_offset", "tokens")  # fields whose validity depends on the session's length


class StepBinding(Binding[AttendRequest]):
    """A call that appends rows to a session, and then attends to all of its rows."""

    in_shards = False  # it is computed where its cache is

    def bind_to_session(self, session: Session, decoded: Decoded, admission: Admission) -> Prepared:
        """The prepared step. An earlier prepared step is reused if only numbers and the session's length differ.

        Raises InvalidRequest, LengthMismatch, SessionConflict, or TooLarge for a cost or length beyond the limits.
        """
        layer, spec, members = session.layer, session.layer.spec, given(decoded.members)
        if decoded.sequence is not None:
            del members["layer"]  # the model of the sequence, which is the layer of the session
        step = _options(members, session)
        key = _cache_key(members, step, spec)
        cached = None if key is None else layer.prepared.get(key)
        if cached is None:
            rows = new_rows(members, layer, step.append)
            stop = _length_after(members, step, session)
            _refuse_unknown(members)
            request = self.validated(Decoded(with_all_keys(members, rows, session, stop)), spec)
        else:
            stop, request = _length_after(members, step, session), cached.request
        options = replace(call_options(request, spec) if cached is None else cached.options, num_keys=stop)
        cost = predict_call(options, reply_contents(request), spec, cached=session.length)
        admission.require(cost)
        query, *appended = input_tensors(members["query"], members.get("key"), members.get("value"), spec, request.reproducible)
        if not step.append:
            appended = [query.new_zeros(1, 0, width) for width in widths_of_rows(spec).values()]
        inputs = (query, appended[0], appended[1])
        if cached is None:
            call = _with_new_rows(make_call(request, spec, inputs), members, rows, step.append, spec)
            if key is not None and (same := Prepared(self, request, layer, call, cost).without_numbers()) is not None:
                layer.prepared.keep(key, same)
        else:
            call = Call(options, *inputs, _at_length(cached.masks, session.length, stop))
        require_rows(session, call)
        operation = CachedStep(session.cache, session.length)
        log_fields = self.log_fields(request, layer, call, cost)
        return Prepared(self, request, layer, call, cost, operation, log_fields=log_fields, session=session)

    async def compute(self, submit: Submit, bound: Prepared, request: Request) -> Outcome:
        """As `Binding.compute`. Raises also OutOfMemory, and InvalidRequest for new rows that overflow."""
        session = bound.session
        assert session is not None
        await session.registry.reserve(session.cache, bound.call.masks.num_keys)
        outcome = await super().compute(submit, bound, request)
        session.require_finite_rows(bound.layer.spec)
        session.registry.metrics.count_step()
        return outcome

    def check(self, request: AttendRequest, spec: LayerSpec) -> None:
        """Raises InvalidRequest also for outputs that depend on the inputs of earlier calls, which a session does not keep."""
        super().check(request, spec)
        for i, name in enumerate(request.outputs):
            if name in GRADIENTS:
                raise InvalidRequest.where(f"/outputs/{i}", "no gradients, since a session does not keep the inputs of earlier calls", name)
            if not follows_from_cache(spec, name):
                expected = f"no {name}, since sessions of this layer do not keep what it is computed from"
                raise InvalidRequest.where(f"/outputs/{i}", expected, name)


STEP = StepBinding(AttendRequest)  # POST /sessions/{id}/attend, and parts of sequences of the Open Inference Protocol


def _length_after(members: Mapping[str, Any], options: StepOptions, session: Session) -> int:
    """The session's length after the step. Raises TooLarge for more rows than its capacity."""
    name = "key" if "key" in members else "query"
    length = session.length + (members[name].shape[-2] if options.append else 0)
    if session.capacity is not None and length > session.capacity:
        raise TooLarge.where(f"/{name}", f"at most {session.capacity} rows (capacity)", str(length))
    return int(length)


def _with_new_rows(call: Call, members: Mapping[str, Any], rows: AttendRequest, append: bool, spec: LayerSpec) -> Call:
    """The call of a request with all keys of a session, as one whose new rows alone are inputs."""
    of_keys = None
    if rows.positions is not None:
        of_keys = (
            call.query_coordinates if rows.key_positions is None else field_tensor("key_positions", rows.key_positions, rows.batched, spec)
        )
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
    absent |= dict.fromkeys(SEQUENCE_LENGTHS, "one sequence, as a session is one")
    absent["segments"] = "query_segments and key_segments, since the keys are those of all calls"
    if not options.append:
        absent |= {name: f"no {name}, since append is false" for name in KEY_ROWS}
    for name, expected in absent.items():
        if name in members:
            raise InvalidRequest.where(f"/{name}", expected, name)
    session.require_length(options.expected_length)
    return options


def _cache_key(members: Mapping[str, Any], options: StepOptions, spec: LayerSpec) -> Hashable | None:
    """A key that is equal for steps whose validity does not differ, whatever their numbers and the length of their session."""
    if spec.extents or any(isinstance(members.get(name), np.ndarray) for name in MASKS_AND_OTHERS):
        return None
    key = cache_key(members) if members.keys().isdisjoint(LENGTH_FIELDS) else None
    return None if key is None else ("step", options.append, key)


def _refuse_unknown(members: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for members that a call to a session does not have."""
    if unknown := [name for name in members if name not in SessionAttendRequest.model_fields]:
        raise InvalidRequest(problems=[unknown_field(pointer([name]), name, SessionAttendRequest) for name in unknown])
