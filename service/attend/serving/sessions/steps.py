"""Prepares a call that appends rows to a session and attends to all of its rows."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attend.attention.cache import cached_tensors, follows_from_cache
from attend.attention.call import Call
from attend.attention.decoding import CachedForwardPass
from attend.attention.masks import Masks
from attend.axes import GRADIENTS, MASKS, OPTIONAL_INPUTS
from attend.errors import InvalidRequest, TooLarge, pointer
from attend.serving.admission import Admission
from attend.serving.calls import call_options, input_tensors, make_call, no_rows
from attend.serving.cost import predict_call
from attend.serving.executor import Outcome
from attend.serving.prepared import Prepared
from attend.serving.prepared_cache import cache_key
from attend.serving.request_type import RequestType
from attend.serving.requests import Request
from attend.serving.scheduler import Scheduler
from attend.serving.sessions.registry import SessionRegistry
from attend.serving.sessions.rows import KEY_ROWS, SEQUENCE_LENGTHS, present_members, require_rows, with_session_defaults
from attend.serving.sessions.session import Session
from attend.spec import LayerSpec
from attend.wire.codec import Decoded
from attend.wire.problems import unknown_field, validate
from attend.wire.schemas.attend import AttendRequest, Past
from attend.wire.schemas.sessions import SessionAttendRequest, StepOptions

MASKS_AND_OPTIONAL_INPUTS = (*MASKS, *OPTIONAL_INPUTS)
LENGTH_FIELDS = ("query_offset", "tokens")  # fields whose validity depends on the session's length


class StepRequestType(RequestType[AttendRequest]):
    """A call that appends rows to a session, and then attends to all of its rows."""

    in_shards = False  # it is computed where its cache is

    def prepare_for_session(self, session: Session, decoded: Decoded, admission: Admission) -> Prepared:
        """The prepared step. An earlier prepared step is reused if only numbers and the session's length differ.

        Raises InvalidRequest, LengthMismatch, SessionConflict, or TooLarge for a cost or length beyond the limits.
        """
        layer, spec, members = session.layer, session.layer.spec, present_members(decoded.members)
        if decoded.sequence is not None:
            del members["layer"]  # the model of the sequence, which is the layer of the session
        step = _options(members, session)
        key = _cache_key(members, step, spec)
        cached = None if key is None else layer.prepared_cache.get(key)
        if cached is None:
            _refuse_unknown(members)
            request = self.validated(Decoded(with_session_defaults(session, members)), spec, Past(session.length, step.append))
            stop, options = request.num_keys, call_options(request, spec)
        else:
            request, stop = cached.fields, session.length + (_new_rows(members) if step.append else 0)
            options = replace(cached.call.options, num_keys=stop)
        if session.capacity is not None and stop > session.capacity:
            at = "/key" if "key" in members else "/query"
            raise TooLarge.where(at, f"at most {session.capacity} rows (capacity)", str(stop))
        cost = predict_call(options, tuple(request.outputs), request.reply, spec, request.batched, cached=session.length)
        admission.require(cost)
        if cached is None:
            call = make_call(request, spec)
            if key is not None and (same := Prepared(layer, call, cost, fields=request).without_numbers()) is not None:
                layer.prepared_cache.keep(key, same)
        else:
            inputs = input_tensors(members["query"], members.get("key"), members.get("value"), spec, request.reproducible)
            if not step.append:
                inputs = (inputs[0], *no_rows(inputs[0], spec))
            call = Call(options, *inputs, _at_length(cached.call.masks, session.length, stop))
        require_rows(session, call)
        operation = CachedForwardPass(session.cache, session.length)
        log_fields = self.log_fields(request, layer, call, cost)
        return Prepared(layer, call, cost, operation, request, log_fields=log_fields, session=session)

    def check(self, request: AttendRequest, spec: LayerSpec) -> None:
        """Raises InvalidRequest also for outputs that depend on the inputs of earlier calls, which a session does not keep, and for values
        that it does not keep."""
        if request.value is not None and "value" not in cached_tensors(spec):
            expected = "no value, since sessions of this layer expand keys and values from the same rows"
            raise InvalidRequest.where("/value", expected, "value")
        super().check(request, spec)
        for i, name in enumerate(request.outputs):
            if name in GRADIENTS:
                raise InvalidRequest.where(f"/outputs/{i}", "no gradients, since a session does not keep the inputs of earlier calls", name)
            if not follows_from_cache(spec, name):
                expected = f"no {name}, since sessions of this layer do not keep what it is computed from"
                raise InvalidRequest.where(f"/outputs/{i}", expected, name)


STEP = StepRequestType(AttendRequest)  # POST /sessions/{id}/attend, and parts of sequences of the Open Inference Protocol


async def compute_step(scheduler: Scheduler, sessions: SessionRegistry, session: Session, prepared: Prepared, request: Request) -> Outcome:
    """The outcome of a prepared step of this session. Raises what `Scheduler.submit` raises, OutOfMemory, and InvalidRequest for new rows
    that overflow."""
    await sessions.reserve(session.cache, prepared.call.masks.num_keys)
    outcome = await scheduler.submit(prepared, request)
    session.require_finite_rows(prepared.layer.spec)
    sessions.metrics.count_step()
    return outcome


def _new_rows(members: Mapping[str, Any]) -> int:
    """Number of rows that a step with these members appends."""
    rows: int = members["key" if "key" in members else "query"].shape[-2]
    return rows


def _at_length(masks: Masks, length: int, num_keys: int) -> Masks:
    """The masks of an earlier step for a session of `length` rows, which has so many keys after the step."""
    count = masks.positions.shape[1]
    positions = torch.arange(length, length + count)[None]
    return masks._replace(positions=positions, num_keys=num_keys, aligned=length == 0 and count == num_keys)


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
    if spec.extents or any(isinstance(members.get(name), np.ndarray) for name in MASKS_AND_OPTIONAL_INPUTS):
        return None
    key = cache_key(members) if members.keys().isdisjoint(LENGTH_FIELDS) else None
    return None if key is None else ("step", options.append, key)


def _refuse_unknown(members: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for members that a call to a session does not have."""
    if unknown := [name for name in members if name not in SessionAttendRequest.model_fields]:
        raise InvalidRequest(problems=[unknown_field(pointer([name]), name, SessionAttendRequest) for name in unknown])
