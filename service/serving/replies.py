"""Builds the reply from a result, and the plan of a reply from the request alone."""

import math
from typing import Any

from service.attention.call import Result
from service.errors import InvalidRequest
from service.serving import analysis
from service.serving.admission import Admission
from service.serving.binding import check_against_layer
from service.serving.casting import numpy_of
from service.serving.cost import predict, wire_datatype
from service.serving.layers.registry import LoadedLayer
from service.serving.requests import BoundCall
from service.spec import LayerSpec
from service.tensors import DATATYPES
from service.wire.codec import Reply
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest, Plan, PlannedTensor
from service.wire.schemas.document import LayerReference, Refusal


def refuse_fully_masked(bound: BoundCall, result: Result) -> None:
    """Raises InvalidRequest for fully masked rows if the request asks for an error."""
    if bound.call.fully_masked == "error" and (first := result.first_fully_masked()):
        rows = ", ".join(f"(batch {b}, head {h}, query {i})" for b, h, i in first)
        raise InvalidRequest.where("/fully_masked", "a key to attend to for every row", f"none for {rows}")


def build_reply(bound: BoundCall, result: Result) -> Reply:
    """The outputs under the names and in the order of the request, without the batch axis if the request has none.

    Raises InvalidRequest for fully masked rows if the request asks for an error, and for metrics that overflow.
    """
    if result.fully_masked is not None:
        refuse_fully_masked(bound, result)
    request, layer = bound.request, bound.layer
    if isinstance(request, AnalysisRequest):
        return analysis.build_reply(request, layer, result)
    batched, arrays = request.batched, {}
    for name, tensor in result.tensors.items():
        arrays[name] = numpy_of(tensor if batched else tensor[0])
    tensors: dict[str, Any] = {}
    for name in request.outputs:
        tensors[name] = arrays[name] if name in arrays else _parts(name, arrays)
    datatype = wire_datatype("output", request.reply.datatype, layer.spec)
    session = None if bound.session is None else {"id": bound.session.id, "length": bound.call.masks.num_keys}
    return Reply({"name": layer.name, "fingerprint": layer.fingerprint}, result.fully_masked_rows, datatype, tensors, session=session)


def _parts(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """An output that is several arrays: `keys` and `values` of the largest weights, or "0", "1", … for several sequences in one query."""
    if "keys" in arrays:
        return {part: arrays[part] for part in ("keys", "values")}
    return {part.partition(".")[2]: array for part, array in arrays.items() if part.startswith(f"{name}.")}


def plan_of(request: AttendRequest, layer: LoadedLayer, admission: Admission) -> Plan:
    """Shapes and cost of the reply, and the limits that the request exceeds. Raises InvalidRequest if it does not fit the layer."""
    check_against_layer(request, layer.spec)
    if isinstance(request, AnalysisRequest):
        analysis.check_metrics(request, layer.spec)
        predicted = analysis.predict_analysis(request, layer.spec)
    else:
        predicted = predict(request, layer.spec)
    problems, _ = admission.refusals(request, layer.spec, predicted)
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


def _datatype(name: str, request: AttendRequest, spec: LayerSpec) -> str:
    kind = analysis.datatype_of(name, request, spec) if isinstance(request, AnalysisRequest) else None
    return kind or wire_datatype(name, request.reply.datatype, spec)
