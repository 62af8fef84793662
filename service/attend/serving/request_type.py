"""What an endpoint computes of a request: `RequestType`.

To prepare a request is to validate it, to compare it with its layer, to admit its predicted cost, and to make its call. Invalid requests
are refused here at the latest. Only shapes are read before the cost is admitted, so that no array is allocated for a call that is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from attend.attention.call import FROM_HEADS, SCORED, Call, Result
from attend.attention.dataflow import is_of_rows
from attend.attention.decoding import CachedOperation
from attend.attention.operations import FORWARD, Operation, forward_pass
from attend.axes import TENSOR_FIELDS
from attend.errors import InvalidRequest
from attend.serving.admission import Admission
from attend.serving.calls import make_call, packed_attention
from attend.serving.casting import numpy_of
from attend.serving.cost import Cost, predict, wire_datatype
from attend.serving.layer_checks import check_against_layer
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.prepared_cache import cache_key
from attend.serving.requests import Request
from attend.serving.sessions.rows import members_that_read, require_rows
from attend.serving.sessions.session import Session
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH
from attend.wire.codec import MANY_PIECES, Decoded, Encoded, Reply, joined
from attend.wire.compression import compress
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest, Past

R = TypeVar("R", bound=AttendRequest)
INDIVISIBLE = ("dropout", *(name for name, field in TENSOR_FIELDS.items() if not field.divisible))  # fields of calls that are never cut


class RequestType(Generic[R]):
    """What an endpoint computes of a request. This is POST /attend: the outputs of the layer. Other endpoints override what differs.

    `prepare` calls `validated`, `predict`, `may_be_cut`, `operation` and `describe`, in this order. Once the engine has the
    result of the call, `encode` encodes what `build_reply` makes of it.
    """

    is_kept = True  # whether a request of an earlier one's shape is not prepared again
    draws = False  # whether `encode` draws a picture, in the thread that does so
    in_shards = True  # whether shards may compute parts of a call that is too large for one process

    def __init__(self, schema: type[R]) -> None:
        """`schema`: the model of the body. It may have the field `session`, which names a session in place of keys."""
        self.schema = schema
        self.session_in_body = "session" in schema.model_fields

    def prepare(self, decoded: Decoded, layer: LoadedLayer, admission: Admission, past: Past | None = None) -> Prepared:
        """The prepared request, which reads a session if it has a `past`.

        Raises InvalidRequest, or TooLarge for a cost beyond the limits, and what the hooks raise.
        """
        members = decoded.members
        key = cache_key(members) if self.is_kept else None
        kept: Prepared | None = None if key is None else layer.prepared_cache.get(key)
        if kept is not None and (again := kept.with_numbers(members, layer)) is not None:
            return again
        request = self.validated(decoded, layer.spec, past)
        cost = self.predict(request, layer.spec)
        in_parts = admission.require(cost, self.may_be_cut(request, layer.spec))
        call = make_call(request, layer.spec)
        operation = self.operation(request, layer, call)
        log_fields = self.log_fields(request, layer, call, cost)
        prepared = Prepared(layer, call, cost, operation, request, in_parts, log_fields)
        if key is not None and (same := prepared.without_numbers()) is not None:
            if operation is FORWARD and not in_parts:  # later calls need not choose a kernel
                same = same._replace(operation=forward_pass(layer.attention, call))
            layer.prepared_cache.keep(key, same)
        return prepared

    def prepare_for_session(self, session: Session, decoded: Decoded, admission: Admission) -> Prepared:
        """The prepared form of a request that names a session in place of keys: it reads the rows and appends none.

        Raises what `prepare` raises, or SessionConflict.
        """
        members = members_that_read(session, decoded.members)
        prepared = self.prepare(decoded._replace(members=members), session.layer, admission, Past(session.length, appends=False))
        optional_inputs = {name: tensor for name, tensor in prepared.call.optional_inputs.items() if name != "key_coordinates"}
        call = replace(prepared.call, optional_inputs=optional_inputs)
        require_rows(session, call)
        return prepared._replace(call=call, operation=CachedOperation(session.cache, prepared.operation))

    def validated(self, decoded: Decoded, spec: LayerSpec, past: Past | None = None) -> R:
        """The request, which fits the layer and, if it has a `past`, the rows of its session. Raises InvalidRequest."""
        request = validate(self.schema, decoded.members, context=past)
        self.check(request, spec)
        return request

    def check(self, request: R, spec: LayerSpec) -> None:
        """Raises InvalidRequest if the request does not fit the layer."""
        check_against_layer(request, spec)

    def predict(self, request: R, spec: LayerSpec) -> Cost:
        """The cost of a request that fits the layer."""
        return predict(request, spec)

    def may_be_cut(self, request: R, spec: LayerSpec) -> bool:
        """Whether shards may compute the call in parts, cut along its keys. Dropout, gradients and replaced rows depend on all keys at
        once, and several sequences in one query are not cut either."""
        if not self.in_shards or not spec.splits_over_keys or any(getattr(request, name, None) is not None for name in INDIVISIBLE):
            return False
        return all(name in SCORED | FROM_HEADS or is_of_rows(spec.program, name) for name in request.outputs)

    def operation(self, request: R, layer: LoadedLayer, call: Call) -> Operation:
        """What is computed of the call."""
        return FORWARD if request.query_lengths is None else packed_attention(request, layer.spec)

    def log_fields(self, request: R, layer: LoadedLayer, call: Call, cost: Cost) -> dict[str, Any]:
        """The fields of the log line: the layer, the lengths of the sequences, what is computed, and its operations."""
        shapes = {"layer": layer.name, "query": request.query.shape, "keys": call.masks.num_keys}
        return {**shapes, **self.describe(request, layer.spec), "operations": cost.operations}

    def describe(self, request: R, spec: LayerSpec) -> dict[str, Any]:
        """What is computed, in the log line."""
        return {"outputs": request.outputs}

    def datatype_of(self, name: str, request: R, spec: LayerSpec) -> str:
        """The V2 datatype of an output in the reply."""
        return wire_datatype(name, request.reply.datatype, spec)

    def encode(
        self, prepared: Prepared, result: Result, decoded: Decoded, request: Request, check: Callable[[], None] = lambda: None
    ) -> Encoded:
        """Headers and bytes of the reply. `check`: what a picture calls at intervals while it is drawn.

        Raises InvalidRequest for non-finite numbers, for fully masked rows if the request asks for an error, and what `build_reply` raises.
        """
        if result.fully_masked is not None:
            refuse_fully_masked(prepared, result)
        reply = self.build_reply(prepared, result)
        headers, pieces = request.reply_codec.encode(reply, prepared.fields.reply, decoded.reply_format)
        if request.reply_coding:
            return compress((headers, pieces), request.reply_coding)
        return headers, pieces if len(pieces) < MANY_PIECES else joined(pieces)

    def build_reply(self, prepared: Prepared, result: Result) -> Reply:
        """The outputs under the names and in the order of the request, without the batch axis if the request has none."""
        fields, layer = prepared.fields, prepared.layer
        batched, arrays = fields.batched, {}
        for name, tensor in result.tensors.items():
            array = tensor.numpy() if tensor.dtype is torch.float32 else numpy_of(tensor)
            arrays[name] = array if batched else array[0]
        tensors: dict[str, Any] = {}
        for name in fields.outputs:
            tensors[name] = arrays[name] if name in arrays else _parts(name, arrays)
        datatype = fields.reply.datatype or BY_TORCH[layer.spec.dtype].name
        masked = 0 if result.fully_masked is None else result.fully_masked_rows
        session = None if prepared.session is None else {"id": prepared.session.id, "length": prepared.call.masks.num_keys}
        return Reply({"name": layer.name, "fingerprint": layer.fingerprint}, masked, datatype, tensors, session=session)


ATTEND = RequestType(AttendRequest)  # POST /attend, and infer of the Open Inference Protocol


def refuse_fully_masked(prepared: Prepared, result: Result) -> None:
    """Raises InvalidRequest for fully masked rows if the request asks for an error."""
    if prepared.call.options.fully_masked == "error" and (first := result.first_fully_masked()):
        rows = ", ".join(f"(batch {b}, head {h}, query {i})" for b, h, i in first)
        raise InvalidRequest.where("/fully_masked", "a key to attend to for every row", f"none for {rows}")


def _parts(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """An output that is several arrays: `keys` and `values` of the largest weights, or "0", "1", … for several sequences in one query."""
    if "keys" in arrays:
        return {part: arrays[part] for part in ("keys", "values")}
    return {part.partition(".")[2]: array for part, array in arrays.items() if part.startswith(f"{name}.")}
