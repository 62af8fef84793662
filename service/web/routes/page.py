"""GET /: the page for a browser, a JSON index for other clients; and the files of the page.

The page is plain HTML, CSS and ES modules in `page/`, and the heat-map viewer in `service/assets/`, served as they are. Its
Content-Security-Policy allows only these files. Browsers revalidate them by ETag on every visit.
"""

import mimetypes
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.staticfiles import StaticFiles

from service import __version__
from service.serving.service import Service
from service.wire.negotiation import HTML, JSON, accepted_type

CONTRACT = "1"  # version of the wire contract; a new version requires changes in clients
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
    """Adds the routes. `members`: further members of the JSON index."""
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
            document = {
                "name": "attend",
                "version": __version__,
                "contract": CONTRACT,
                **members,
                "layers": layers,
                "documentation": "/docs",
            }
            response = JSONResponse(document)
        response.headers["Vary"] = "Accept"
        return response
