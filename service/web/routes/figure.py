"""POST /attend/figure."""

from fastapi import FastAPI, Request, Response

from service.serving.service import Service
from service.web.openapi.operations import CALL_ERRORS, FIGURE, error_responses, request_body_doc
from service.web.record import Record
from service.web.request_reader import read_as
from service.web.routes.attend import require_started
from service.wire.codec import CODECS
from service.wire.negotiation import PICTURES, acceptable, form_of_body

PAGE_POLICY = "sandbox allow-scripts; default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def install(app: FastAPI, service: Service) -> None:
    """Adds the route."""

    @app.post(
        "/attend/figure",
        tags=["attend"],
        response_class=Response,
        responses={
            200: {"description": "The picture.", "content": {media: {"schema": {"type": "string"}} for media in PICTURES}},
            **error_responses(*CALL_ERRORS),
        },
        openapi_extra=request_body_doc("FigureRequest", (FIGURE, "Heat maps of all heads."), binary=True),
    )
    async def figure(request: Request) -> Response:
        """A picture of the attention weights: PNG, SVG or a standalone HTML page. The same request gives the same bytes."""
        require_started(service)
        record: Record = request.scope["attend"]
        codec = CODECS[form_of_body(record.header(b"content-type"))]
        accepted = {"accept": acceptable(record.header(b"accept"), tuple(PICTURES))}
        reply = await service.engine.figure(await read_as(codec, codec, accepted, record, request.receive, service))
        record.phases, record.log_fields = reply.phases, reply.log_fields
        headers = {name.decode(): value.decode() for name, value in reply.headers}
        headers |= {"Server-Timing": reply.phases.server_timing(), "Content-Security-Policy": PAGE_POLICY}
        return Response(b"".join(reply.pieces), 200, headers)
