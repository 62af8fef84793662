"""POST /attend/plan: shapes and cost of a reply, from the request alone. Nothing is computed."""

import math
from typing import Any

from attend.limits import WireLimits
from attend.serving.analysis import ANALYSIS
from attend.serving.engine import Engine
from attend.serving.request_type import ATTEND, RequestType
from attend.serving.requests import Request
from attend.serving.sessions.rows import members_that_read, session_in_body
from attend.serving.sessions.session import Session
from attend.serving.sessions.steps import STEP
from attend.tensors import DATATYPES
from attend.wire.codec import Decoded
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import Past
from attend.wire.schemas.plan import Plan, PlannedTensor
from attend.wire.schemas.schema import LayerReference, Refusal


async def plan_call(engine: Engine, request: Request) -> Plan:
    """The plan of a request to POST /attend, or with `metrics` to POST /attend/analysis. Raises InvalidRequest, and what finding the layer
    or the session raises."""
    await engine.unpack(request, engine.wire_limits.max_body_bytes)
    size = request.size  # decoding takes the body out of the request
    decoded = await engine.run(request, size, _decode, request, engine.wire_limits)
    session_id = session_in_body(decoded.members)
    # on the event loop, as all sessions
    session = None if session_id is None else engine.require_sessions().find(session_id, request.api_key, "/session")
    return await engine.run(request, size, _plan, engine, decoded, session)


def _decode(request: Request, limits: WireLimits) -> Decoded:
    return request.codec.decode(request.take_body(), request.codec_parameters, AnalysisRequest.tensor_kinds, limits, shapes_alone=True)


def _plan(engine: Engine, decoded: Decoded, session: Session | None) -> Plan:
    """The plan, with the limits that the request exceeds."""
    request_type: RequestType[Any] = ANALYSIS if "metrics" in decoded.members else ATTEND if session is None else STEP
    if session is None:
        members = {name: value for name, value in decoded.members.items() if name != "session"}
        layer = engine.find(members, request_type.schema)
    else:
        layer, members = session.layer, members_that_read(session, decoded.members)
    past = None if session is None else Past(session.length, appends=False)
    request = request_type.validated(decoded._replace(members=members), layer.spec, past)
    predicted = request_type.predict(request, layer.spec)
    problems, _ = engine.admission.refusals(predicted, request_type.may_be_cut(request, layer.spec))
    outputs = {}
    for name, shape in predicted.outputs.items():
        datatype = request_type.datatype_of(name, request, layer.spec)
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
