"""GET /: the page for a browser, a JSON index for other clients; the files of the page; and /words, with which it makes vectors of a text.

The page is plain HTML, CSS and ES modules in `page/`, and the heat-map viewer in `service/assets/`, served as they are. Its
Content-Security-Policy allows only these files. Browsers revalidate them by ETag on every visit.
"""

import mimetypes
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.staticfiles import StaticFiles

from service import __version__
from service.serving.service import Service
from service.serving.text import TextEncoder
from service.web.openapi import BODY_ERRORS, WORDS_EXAMPLE, error_responses, request_body_doc
from service.web.request_reader import read_request
from service.wire.negotiation import HTML, JSON, accepted_type
from service.wire.schemas.text import Vocabulary, Words

CONTRACT = "1"  # version of the wire contract; a new version requires changes in clients
MAX_TEXT_BODY_BYTES = 1 << 20  # bytes; the longest text with every character escaped
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
mimetypes.add_type("text/javascript", ".js")  # systems differ


class PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The file, or 304, with the page's headers."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def install(app: FastAPI, service: Service, members: dict[str, Any]) -> None:
    """Adds GET / and the page's files. `members`: further members of the JSON index."""
    files = PageFiles(packages=[("service", "web/page"), ("service", "assets")])
    app.mount("/page", files)

    @app.get(
        "/",
        tags=["operation"],
        response_model=dict[str, Any],
        responses={200: {"description": "The index, or the page for callers that prefer text/html.", "content": {HTML: {}}}},
    )
    async def index(request: Request) -> Response:
        """Version, threads, limits and layers; in a browser, a page that shows heads."""
        if accepted_type(request.headers.get("accept", ""), (JSON, HTML)) == HTML:
            response = await files.get_response("index.html", request.scope)
        else:
            layers = [layer.name for layer in service.registry.all()]
            about = {"name": "attend", "version": __version__, "contract": CONTRACT}
            response = JSONResponse({**about, **members, "layers": layers, "documentation": "/docs"})
        response.headers["Vary"] = "Accept"
        return response


def install_words(app: FastAPI, service: Service, model: bool) -> None:
    """Adds the routes of /words. `model`: whether layers of the installed model may be loaded on demand."""
    encoder = TextEncoder(service, model)

    @app.get("/words", tags=["words"], response_model=Vocabulary)
    async def get_words() -> Vocabulary:
        """The available layers of a real model, or what to install for them."""
        return await encoder.vocabulary()

    @app.post(
        "/words",
        tags=["words"],
        response_model=Words,
        responses=error_responses(*BODY_ERRORS),
        openapi_extra=request_body_doc("WordsRequest", (WORDS_EXAMPLE, "A sentence for the layer `default`.")),
    )
    async def post_words(request: Request) -> Response:
        """Tokens and vectors of a sentence for a layer: from the real model for its own layers, from hashes of the words for others."""
        service.require_started()
        words = await encoder.read(await read_request(request.scope["attend"], request.receive, service, largest=MAX_TEXT_BODY_BYTES))
        return Response(await run_in_threadpool(words.model_dump_json), media_type=JSON)  # megabytes for a wide layer
