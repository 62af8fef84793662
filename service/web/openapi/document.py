"""GET /openapi.json, generated from the routes and Pydantic models, and GET /docs, with assets from this server."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles

from service import __version__
from service.web.openapi.operations import error_responses
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import request_schemas
from service.wire.schemas.figure import FigureRequest
from service.wire.schemas.text import WordsRequest
from service.wire.v2.schemas import protocol_schemas

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    "Referrer-Policy": "no-referrer",
}
TAGS = {
    "attend": "Attention, and what its heads do.",
    "layers": "The layers that calls name.",
    "words": "Vectors for a text.",
    "v2": "The Open Inference Protocol: every layer is a model.",
    "operation": "Health, metrics, and the index.",
}
SECURITY = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
DESCRIPTION = """Post queries, keys, values and masks; get the output **and the attention weights**.

In shapes, b is batch, q queries, k keys, h heads, d width of a head. Requests without a batch axis get replies without one.
Every refusal is a problem document with what was expected, what was received, and where."""


def install(app: FastAPI) -> None:
    """Adds the document, and the routes of the page."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI documents it

    @app.get("/docs", include_in_schema=False)
    async def page(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        page = get_swagger_ui_html(
            openapi_url=f"{root}/openapi.json",
            title="attend",
            swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
            swagger_css_url=f"{root}/docs/swagger-ui.css",
            swagger_favicon_url=f"{root}/docs/favicon-32x32.png",
            swagger_ui_parameters={"tryItOutEnabled": True},
        )
        page.headers.update(HEADERS)
        return page

    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))


def operation_id(route: APIRoute) -> str:
    """The name of the route's function, which generated clients call theirs; those of the Open Inference Protocol begin with v2."""
    return f"v2_{route.name}" if route.path.startswith("/v2") else route.name


def _summarise(operation: dict[str, Any]) -> None:
    """Makes the first paragraph of the description the summary."""
    operation["summary"] = " ".join(operation["description"].partition("\n\n")[0].split()).removesuffix(".")


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="attend",
        version=__version__,
        description=DESCRIPTION,
        routes=app.routes,
        tags=[{"name": name, "description": description} for name, description in TAGS.items()],
        servers=[{"url": app.root_path or "/"}],
        contact={"name": "The maintainers of attend"},
        license_info={"name": "MIT", "identifier": "MIT"},
    )
    requests = request_schemas(AnalysisRequest, FigureRequest, WordsRequest)
    schemas = {**requests, **protocol_schemas(), **document["components"]["schemas"]}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's refusals, which this service does not send
        schemas.pop(unused, None)
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    document["components"]["securitySchemes"] = SECURITY
    document["security"] = [{}, *({name: []} for name in SECURITY)]  # {}: a server without keys needs none
    for name, path in document["paths"].items():
        for operation in path.values():
            _summarise(operation)
            if not name.startswith("/health/"):
                operation["responses"] |= {str(status): refusal for status, refusal in error_responses(401, 403).items()}
            refusal = operation["responses"].get("422", {}).get("content", {})
            if "application/json" in refusal and "HTTPValidationError" in str(refusal["application/json"]):
                del operation["responses"]["422"]
    return document
