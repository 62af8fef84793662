"""Results -> replies and their bytes; and what a reply would be, before anything is computed."""

import math
from typing import Any

from service.attention.call import Result
from service.errors import Problem
from service.serving import analysis, cost
from service.serving.binding import masked_rows
from service.serving.bound_call import BoundCall
from service.serving.layers.registry import HeldLayer, numpy_of
from service.serving.requests import RawRequest
from service.spec import LayerSpec
from service.tensors import DATATYPES
from service.wire.codec import CODECS
from service.wire.compression import pack
from service.wire.negotiation import JSON
from service.wire.reply import Buffer, Reply
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest, LayerReference, Plan, PlannedTensor, Refusal


def written(bound: BoundCall, result: Result, raw: RawRequest) -> list[Buffer]:
    """The reply's bytes. Raises InvalidRequest where the caller wanted an error for rows without keys or numbers that are not finite."""
    refuse_empty(bound, result)
    form = raw.own or CODECS[raw.reply_form]
    pieces = form.encode(reply_of(bound.request, bound.layer, result), bound.request.reply)
    return pack(pieces, raw.reply_coding) if raw.reply_coding else pieces


def refuse_empty(bound: BoundCall, result: Result) -> None:
    """Raises InvalidRequest where a row has no key and the caller wanted to be told so."""
    if bound.call.fully_masked == "error" and (first := result.first_fully_masked()):
        raise masked_rows(first)


def reply_of(request: AttendRequest, layer: HeldLayer, result: Result) -> Reply:
    """The result under the caller's names and in the caller's order, without the batch axis where the caller sent none."""
    if isinstance(request, AnalysisRequest):
        return analysis.reply_of(request, layer, result)
    arrays = {name: numpy_of(tensor if request.batched else tensor[0]) for name, tensor in result.tensors.items()}
    tensors: dict[str, Any] = {}
    for name in request.outputs:
        tensors[name] = {part: arrays[part] for part in ("keys", "values")} if name not in arrays else arrays[name]
    datatype = cost.wire_datatype("output", request.reply.datatype, layer.spec)
    return Reply({"name": layer.name, "fingerprint": layer.fingerprint}, result.fully_masked_rows, datatype, tensors)


def plan_of(request: AttendRequest, layer: HeldLayer, predicted: cost.Cost, problems: list[Problem]) -> Plan:
    """What the reply to the request would be, and why it is not admitted."""
    outputs = {}
    for name, shape in predicted.outputs.items():
        datatype = _datatype(name, request, layer.spec)
        outputs[name] = PlannedTensor(shape=list(shape), datatype=datatype, bytes=math.prod(shape) * DATATYPES[datatype].size)
    return Plan(
        layer=LayerReference(name=layer.name, fingerprint=layer.fingerprint),
        outputs=outputs,
        operations=predicted.operations,
        memory_bytes=predicted.memory_bytes,
        reply_bytes=predicted.reply_bytes,
        admitted=not problems,
        refusals=[Refusal(at=p.at, expected=p.expected, got=p.got) for p in problems],
    )


def predicted_bytes(bound: BoundCall, raw: RawRequest) -> int:
    """Of the reply, in the form that was asked for. One of V2 with tensors as bytes is taken for text, which is longer."""
    if (raw.own.media_type if raw.own else raw.reply_form) == JSON:
        return bound.cost.reply_bytes
    shapes = bound.cost.outputs.items()
    return sum(math.prod(shape) * DATATYPES[_datatype(name, bound.request, bound.layer.spec)].size for name, shape in shapes)


def _datatype(name: str, request: AttendRequest, spec: LayerSpec) -> str:
    kind = analysis.datatype_of(name, request, spec) if isinstance(request, AnalysisRequest) else None
    return kind or cost.wire_datatype(name, request.reply.datatype, spec)
