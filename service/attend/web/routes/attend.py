"""POST /attend, POST /attend/analysis, POST /attend/plan and POST /attend/figure."""

import math

from starlette.responses import Response

from attend.errors import NotAcceptable
from attend.serving.analysis import ANALYSIS
from attend.serving.figures import FIGURE
from attend.serving.plan import plan_call
from attend.serving.request_type import ATTEND
from attend.web.endpoints import INFER, LAYER, SESSION, EndpointTable
from attend.web.openapi import BINARY
from attend.web.replies import PiecesResponse
from attend.web.request_reader import receive_body
from attend.web.requests import Body, HttpRequest
from attend.wire.negotiation import BINARY_TYPES, CODECS, JSON, PICTURES, accepted_type, media_type_of_body
from attend.wire.schemas.analysis import AnalysisReply, AnalysisRequest
from attend.wire.schemas.attend import AttendReply, AttendRequest
from attend.wire.schemas.figure import FigureRequest
from attend.wire.schemas.plan import Plan

# Four rows for the layer `default`, which every new server has
ROWS_EXAMPLE = {"query": [[round(math.sin((row + 1) * (column + 1) / 9), 2) for column in range(64)] for row in range(4)], "causal": True}
TOKENS_EXAMPLE = {"tokens": {"query": ["the", "cat", "saw", "the"]}}
DEFAULT_LAYER_EXAMPLE = {**ROWS_EXAMPLE, "reply": {"decimals": 3}}
ATTEND_EXAMPLE = {
    "layer": "tiny",
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
    "causal": True,
    "reply": {"decimals": 3},
}
METRICS_EXAMPLE = ["entropy", "confidence", "strongest_links", "previous_token_score", "zero_ablation"]
ANALYSIS_EXAMPLE = {**ROWS_EXAMPLE, **TOKENS_EXAMPLE, "metrics": METRICS_EXAMPLE, "reply": {"decimals": 3}}
PLAN_EXAMPLE = {"query": {"shape": [2, 1000, 64]}, "causal": True, "outputs": ["output"]}
FIGURE_EXAMPLE = {**ROWS_EXAMPLE, **TOKENS_EXAMPLE, "figure": {"kind": "heads", "format": "svg"}}
PICTURE_CONTENT = {media: {"schema": BINARY if name == "png" else {"type": "string"}} for media, name in PICTURES.items()}
PICTURE_POLICY = (
    b"content-security-policy",
    b"sandbox allow-scripts; default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
)
endpoints = EndpointTable()


@endpoints.add(
    "POST",
    "/attend",
    INFER,
    needs_layers=True,
    tags=["attend"],
    response_model=AttendReply,
    body=Body(AttendRequest, ((DEFAULT_LAYER_EXAMPLE, "Four rows, causal."), (ATTEND_EXAMPLE, "For the layer `tiny`.")), BINARY_TYPES),
    refusals=(*LAYER, NotAcceptable),
)
async def attend(request: HttpRequest) -> Response:
    """Attention output and weights for queries, keys, values and masks.

    With `Accept: application/vnd.safetensors` the reply is a safetensors file with the same outputs.
    """
    await receive_body(request)
    return PiecesResponse(await request.service.engine.answer(request, ATTEND))


@endpoints.add(
    "POST",
    "/attend/analysis",
    INFER,
    needs_layers=True,
    tags=["attend"],
    response_model=AnalysisReply,
    body=Body(AnalysisRequest, ((ANALYSIS_EXAMPLE, "What each head does with four words."),), BINARY_TYPES),
    refusals=(*LAYER, *SESSION, NotAcceptable),
)
async def analysis(request: HttpRequest) -> Response:
    """Numbers on what each head does.

    The body is that of POST /attend, and the metrics to compute.
    """
    await receive_body(request)
    return PiecesResponse(await request.service.engine.answer(request, ANALYSIS))


@endpoints.add(
    "POST",
    "/attend/plan",
    INFER,
    needs_layers=True,
    tags=["attend"],
    response_model=Plan,
    body=Body(AttendRequest, ((PLAN_EXAMPLE, "Tensors may be given by shape alone."),), BINARY_TYPES),
    refusals=(*LAYER, *SESSION),
)
async def plan(request: HttpRequest) -> Response:
    """Shapes and cost of the reply to a body, and whether it is admitted. Computes nothing.

    The body is that of POST /attend; with `metrics`, that of POST /attend/analysis.
    """
    await receive_body(request)
    found = await plan_call(request.service.engine, request)
    return Response(found.model_dump_json(), media_type=JSON)


@endpoints.add(
    "POST",
    "/attend/figure",
    INFER,
    needs_layers=True,
    tags=["attend"],
    response_class=Response,
    responses={200: {"description": "The picture.", "content": PICTURE_CONTENT}},
    body=Body(FigureRequest, ((FIGURE_EXAMPLE, "Heat maps of all heads."),), BINARY_TYPES),
    refusals=(*LAYER, *SESSION, NotAcceptable),
)
async def figure(request: HttpRequest) -> Response:
    """A picture of the attention weights: PNG, SVG or a standalone HTML page. The same request gives the same bytes."""
    codec = CODECS[media_type_of_body(request.header(b"content-type"))]
    picture_type = accepted_type(request.header(b"accept"), tuple(PICTURES))
    await receive_body(request, codec, {"picture_type": picture_type})
    return PiecesResponse(await request.service.engine.answer(request, FIGURE), PICTURE_POLICY)
