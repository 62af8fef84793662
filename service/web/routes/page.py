"""GET /: the page for a browser, a JSON index for other clients; and the files of the page.

The page is plain HTML, CSS and ES modules in `page/`, and the heat-map viewer in `service/assets/`, served as they are. Its
Content-Security-Policy allows only these files. Browsers revalidate them by ETag on every visit.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service import __version__
from service.serving.service import Service
from service.wire.negotiation import HTML, JSON, acceptable

FOLDERS = ("web/page", "assets")
CONTRACT = "1"  # version of the wire contract; a new version requires changes in clients
TYPES = {".html": HTML, ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


@cache
def page_files() -> Mapping[str, File]:
    """Name -> file. Each process reads the files once."""
    found = {}
    for path in chain.from_iterable(files("service").joinpath(folder).iterdir() for folder in FOLDERS):
        body = path.read_bytes()
        found[path.name] = File(body, TYPES[PurePath(path.name).suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


def install(app: FastAPI, service: Service, about: dict[str, Any]) -> None:
    """Adds the routes. `about`: further members of the index."""

    @app.get(
        "/",
        tags=["operation"],
        response_model=dict[str, Any],
        responses={200: {"description": "The index, or the page for callers that prefer text/html.", "content": {HTML: {}}}},
    )
    async def index(request: Request) -> Response:
        """Version, threads, limits and layers; in a browser, a page that shows heads."""
        if acceptable(request.headers.get("accept", ""), (JSON, HTML)) == HTML:
            return _served(request, "index.html", {"Vary": "Accept"})
        layers = [layer.name for layer in service.registry.all()]
        document = {"name": "attend", "version": __version__, "contract": CONTRACT, **about, "layers": layers, "documentation": "/docs"}
        return JSONResponse(document, headers={"Vary": "Accept"})

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in page_files():
            raise HTTPException(404)
        return _served(request, name, {})


def _served(request: Request, name: str, headers: Mapping[str, str]) -> Response:
    file = page_files()[name]
    headers = {**HEADERS, **headers, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
