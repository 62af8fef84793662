"""GET /: the page for a browser, a JSON index for other clients; and the files of the page.

The page is plain HTML, CSS and ES modules in `page/`, and the heat-map viewer in `service/attend/assets/`, served as they are. Its
Content-Security-Policy allows only these files. Browsers revalidate them by ETag on every visit.
"""

import mimetypes
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles

from attend.serving.layer_requests import known_families
from attend.serving.layers.registry import by_name
from attend.version import __version__
from attend.web.endpoints import PUBLIC, READ, TIMED, EndpointTable
from attend.web.request_reader import begin_without_body
from attend.web.requests import HttpRequest
from attend.wire.negotiation import HTML, JSON, accepted_type

CONTRACT = "1"  # version of the wire contract; a new version requires changes in clients
NAME_BYTES = 20  # of the name of a layer in the index, roughly
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


endpoints = EndpointTable()
FILES = PageFiles(packages=[("attend", "web/page"), ("attend", "assets")])


@endpoints.add(
    "GET",
    "/",
    READ,
    page=True,
    any_query=True,
    tags=["operation"],
    refusals=TIMED,
    response_model=dict[str, Any],
    responses={200: {"description": "The index, or the page for callers that prefer text/html.", "content": {HTML: {}}}},
)
async def index(request: HttpRequest) -> Response:
    """Version, threads, limits and layers; in a browser, a page that shows heads."""
    if accepted_type(request.header(b"accept"), (JSON, HTML)) == HTML:
        response = await FILES.get_response("index.html", request.scope)
    else:
        layers = request.service.registry.all()

        def reply() -> Response:
            about = {"name": "attend", "version": __version__, "contract": CONTRACT, **request.app.state.index_members}
            return JSONResponse({**about, "layers": [layer.name for layer in by_name(layers)], "documentation": "/docs"})

        begin_without_body(request)
        response = await request.service.engine.run(request, NAME_BYTES * len(layers), reply)  # in a thread, as GET /layers
    response.headers["Vary"] = "Accept"
    return response


@endpoints.add("GET", "/page/{file}", PUBLIC, any_query=True, include_in_schema=False)
async def page_file(request: HttpRequest, file: str) -> Response:
    if file == "families.json":  # with which the page offers the parts of a model's folder
        return JSONResponse(known_families(), headers=HEADERS)
    return await FILES.get_response(file, request.scope)
