"""POST /attend/plan: shapes and cost of a reply, from the request alone. Nothing is computed."""

import math

from attend.serving import analysis
from attend.serving.binding import check_against_layer
from attend.serving.cost import predict, wire_datatype
from attend.serving.engine import Engine
from attend.serving.requests import RawRequest
from attend.serving.sessions.reference import reference_of
from attend.serving.sessions.registry import Session
from attend.serving.sessions.steps import members_with_session_keys, refuse_outputs_of_inputs
from attend.tensors import DATATYPES
from attend.wire.codec import Decoded
from attend.wire.problems import validate
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendRequest, Plan, PlannedTensor
from attend.wire.schemas.schema import LayerReference, Refusal


async def plan_call(engine: Engine, raw: RawRequest) -> Plan:
    """The plan of a request to POST /attend, or with `metrics` to POST /attend/analysis. Raises InvalidRequest, and what finding the layer
    or the session raises."""
    size = raw.size
    decoded = await engine.run(raw, size, engine.decode, raw, AnalysisRequest, True)
    reference = reference_of(raw, decoded, in_body=True)
    session = (
        None if reference is None else reference.find(engine.require_sessions(), raw.api_key)
    )  # here: sessions belong to the event loop
    return await engine.run(raw, size, _plan, engine, decoded, session)


def _plan(engine: Engine, decoded: Decoded, session: Session | None) -> Plan:
    """The plan, with the limits that the request exceeds."""
    document = AnalysisRequest if "metrics" in decoded.members else AttendRequest
    if session is None:
        members = {name: value for name, value in decoded.members.items() if name != "session"}
        layer = engine.find(members, document)
    else:
        layer, members = session.layer, members_with_session_keys(session, decoded.members)
    request = validate(document, members)
    if session is not None and document is AttendRequest:
        refuse_outputs_of_inputs(request, layer.spec)
    check_against_layer(request, layer.spec)
    if isinstance(request, AnalysisRequest):
        analysis.check_metrics(request, layer.spec)
        predicted = analysis.predict_analysis(request, layer.spec)
    else:
        predicted = predict(request, layer.spec)
    problems, _ = engine.admission.refusals(request, layer.spec, predicted)
    outputs = {}
    for name, shape in predicted.outputs.items():
        if isinstance(request, AnalysisRequest):
            datatype = analysis.datatype_of(name, request, layer.spec)
        else:
            datatype = wire_datatype(name, request.reply.datatype, layer.spec)
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
