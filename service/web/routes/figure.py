"""POST /attend/figure."""

from functools import partial

from fastapi import FastAPI, Request, Response

from service.serving.engine import Engine
from service.web.openapi.examples import FIGURE
from service.web.request_reader import read
from service.web.routes.attend import demand_started, refusals, takes
from service.wire.negotiation import PICTURES, acceptable

PAGE_POLICY = "sandbox allow-scripts; default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def install(app: FastAPI, engine: Engine) -> None:
    """Adds the route."""

    @app.post(
        "/attend/figure",
        tags=["attend"],
        response_class=Response,
        responses={
            200: {"description": "The picture.", "content": {media: {"schema": {"type": "string"}} for media in PICTURES}},
            **refusals(400, 404, 406, 409, 413, 415, 422, 429, 500, 503, 504, 507),
        },
        openapi_extra=takes("FigureRequest", FIGURE, "Heat maps of both heads; needs the layer `tiny` of PUT /layers/{name}."),
    )
    async def figure(request: Request) -> Response:
        """A picture of the attention weights: PNG, SVG or a standalone HTML page. The same request gives the same bytes."""
        demand_started(engine)
        raw = await read(request.scope, request.receive, engine, form_of_reply=partial(acceptable, supported=tuple(PICTURES)))
        answer = await engine.figure(raw)
        record = request.scope["attend"]
        record.phases, record.about = answer.phases, answer.about
        headers = {
            "Server-Timing": answer.phases.server_timing(),
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": PAGE_POLICY,
        }
        if raw.reply_coding:
            headers["Content-Encoding"] = raw.reply_coding
        return Response(b"".join(answer.pieces), 200, headers, media_type=answer.media_type)
