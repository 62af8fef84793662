"""POST /attend, POST /attend/analysis, POST /attend/plan and POST /attend/figure.

`web/access.py` calls all but POST /attend/plan before any routing: they bypass FastAPI's request parsing, which would allocate a Python
object per number. The routes declared for them here are never called; OpenAPI is generated from them.
"""

from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Send

from service.serving.engine import ANALYSIS, ATTEND, FIGURE, CallKind
from service.serving.plan import plan_call
from service.serving.requests import EncodedReply
from service.serving.service import Service
from service.web.openapi import (
    ANALYSIS_EXAMPLE,
    ATTEND_EXAMPLE,
    BODY_ERRORS,
    CALL_ERRORS,
    DEFAULT_LAYER_EXAMPLE,
    FIGURE_EXAMPLE,
    PLAN_EXAMPLE,
    error_responses,
    request_body_doc,
)
from service.web.records import Endpoint, HttpRecord
from service.web.request_reader import read_request
from service.wire.negotiation import CODECS, PICTURES, accepted_type, media_type_of_body
from service.wire.schemas.analysis import AnalysisReply
from service.wire.schemas.attend import AttendReply, Plan

PICTURE_POLICY = (
    b"content-security-policy",
    b"sandbox allow-scripts; default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
)
MAX_JOINED_BYTES = 64 * 1024  # replies up to this size, in bytes, are joined: copying costs less than several sends


def endpoints(service: Service) -> dict[str, Endpoint]:
    """The endpoints that bypass FastAPI, by their path."""

    async def answer(kind: CallKind, record: HttpRecord, receive: Receive, send: Send) -> None:
        service.require_started()
        raw = await read_request(record, receive, service)
        await send_reply(await service.engine.answer(raw, kind), record, send)

    async def figure(record: HttpRecord, receive: Receive, send: Send) -> None:
        service.require_started()
        codec = CODECS[media_type_of_body(record.header(b"content-type"))]
        picture_type = accepted_type(record.header(b"accept"), tuple(PICTURES))
        raw = await read_request(record, receive, service, codec, {"picture_type": picture_type})
        await send_reply(await service.engine.answer(raw, FIGURE), record, send, PICTURE_POLICY)

    return {"/attend": partial(answer, ATTEND), "/attend/analysis": partial(answer, ANALYSIS), "/attend/figure": figure}


async def send_reply(reply: EncodedReply, record: HttpRecord, send: Send, *headers: tuple[bytes, bytes]) -> None:
    """Sends a reply, a large one in pieces. Each piece is freed once it is sent: freeing all at once would block the event loop."""
    record.phases, record.log_fields = reply.phases, reply.log_fields
    size = sum(map(len, reply.pieces))
    pieces = reply.pieces if size > MAX_JOINED_BYTES else [b"".join(reply.pieces)]
    pieces.reverse()
    timing = (b"server-timing", reply.phases.server_timing().encode())
    whole = [*reply.headers, *headers, (b"content-length", b"%d" % size), timing]
    await send({"type": "http.response.start", "status": 200, "headers": whole})
    while pieces:
        piece = pieces.pop()
        await send({"type": "http.response.body", "body": piece, "more_body": bool(pieces)})


def install(app: FastAPI, service: Service) -> None:
    """Adds POST /attend/plan, and routes that document the endpoints that bypass FastAPI."""

    @app.post(
        "/attend",
        tags=["attend"],
        response_model=AttendReply,
        responses=error_responses(*CALL_ERRORS),
        openapi_extra=request_body_doc(
            "AttendRequest", (DEFAULT_LAYER_EXAMPLE, "Four rows, causal."), (ATTEND_EXAMPLE, "For the layer `tiny`."), binary=True
        ),
    )
    async def attend() -> None:
        """Attention output and weights for queries, keys, values and masks.

        With `Accept: application/vnd.safetensors` the reply is a safetensors file with the same outputs.
        """
        raise AssertionError("handled before routing")

    @app.post(
        "/attend/analysis",
        tags=["attend"],
        response_model=AnalysisReply,
        responses=error_responses(*CALL_ERRORS),
        openapi_extra=request_body_doc("AnalysisRequest", (ANALYSIS_EXAMPLE, "What each head does with four words."), binary=True),
    )
    async def analysis() -> None:
        """Numbers on what each head does.

        The body is that of POST /attend, and the metrics to compute.
        """
        raise AssertionError("handled before routing")

    @app.post(
        "/attend/plan",
        tags=["attend"],
        response_model=Plan,
        responses=error_responses(*BODY_ERRORS),
        openapi_extra=request_body_doc("AttendRequest", (PLAN_EXAMPLE, "Tensors may be given by shape alone."), binary=True),
    )
    async def plan(request: Request) -> Plan:
        """Shapes and cost of the reply to a body, and whether it is admitted. Computes nothing.

        The body is that of POST /attend; with `metrics`, that of POST /attend/analysis.
        """
        service.require_started()
        return await plan_call(service.engine, await read_request(request.scope["attend"], request.receive, service))

    @app.post(
        "/attend/figure",
        tags=["attend"],
        response_class=Response,
        responses={
            200: {"description": "The picture.", "content": {media: {"schema": {"type": "string"}} for media in PICTURES}},
            **error_responses(*CALL_ERRORS),
        },
        openapi_extra=request_body_doc("FigureRequest", (FIGURE_EXAMPLE, "Heat maps of all heads."), binary=True),
    )
    async def figure() -> None:
        """A picture of the attention weights: PNG, SVG or a standalone HTML page. The same request gives the same bytes."""
        raise AssertionError("handled before routing")
