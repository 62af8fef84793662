"""GET /openapi.json, generated from the table of endpoints and Pydantic models, and GET /docs, with assets from this server."""

import inspect
from functools import partial
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles

from attend.errors import (
    DeadlinePassed,
    Forbidden,
    InvalidRequest,
    MalformedBody,
    NotReady,
    OutOfMemory,
    Overloaded,
    ServiceFault,
    TooLarge,
    Unauthenticated,
    UnsupportedMediaType,
)
from attend.version import __version__
from attend.web.endpoints import READ, EndpointTable
from attend.web.errors import STATUSES, status_in
from attend.web.requests import Body, Endpoint, HttpRequest, is_v2
from attend.wire.negotiation import JSON, PROBLEM_JSON
from attend.wire.schemas.schema import ProblemDocument
from attend.wire.schemas.tensors import json_schemas
from attend.wire.v2.schemas import InferenceReply, V2Error

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    "Referrer-Policy": "no-referrer",
}
TAGS = {
    "attend": "Attention, and what its heads do.",
    "layers": "The layers that calls name.",
    "sessions": "Sequences whose keys and values the server keeps, for decoding.",
    "words": "Vectors for a text.",
    "v2": "The Open Inference Protocol: every layer is a model.",
    "operation": "Health, metrics, and the index.",
}
SECURITY = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
DESCRIPTION = """Post queries, keys, values and masks; get the output **and the attention weights**.

In shapes, b is batch, q queries, k keys, h heads, d width of a head. Requests without a batch axis get replies without one.
Every refusal is a problem document with what was expected, what was received, and where."""
REFERENCE = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
KEY_REFUSALS = (Unauthenticated, Forbidden)
BODY_REFUSALS = (
    *(MalformedBody, InvalidRequest, TooLarge, UnsupportedMediaType),
    *(Overloaded, DeadlinePassed, OutOfMemory, ServiceFault),
)


endpoints = EndpointTable()
FILES = StaticFiles(packages=[("fastapi_swagger", "resources")])


@endpoints.add("GET", "/openapi.json", READ, any_query=True, include_in_schema=False)
async def openapi_json(request: HttpRequest) -> Response:
    """The document of the server as the client sees it: below the prefix that a proxy removes."""
    whole = await run_in_threadpool(request.app.state.openapi)  # takes a few hundred milliseconds the first time
    root = request.scope.get("root_path", "")
    return JSONResponse({**whole, "servers": [{"url": root}, *whole["servers"]]} if root else whole)


@endpoints.add("GET", "/docs", READ, any_query=True, include_in_schema=False)
async def docs(request: HttpRequest) -> Response:
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


@endpoints.add("GET", "/docs/{file}", READ, any_query=True, include_in_schema=False)
async def docs_file(request: HttpRequest, file: str) -> Response:
    return await FILES.get_response(file, request.scope)


def describe(table: EndpointTable) -> dict[str, Any]:
    """The OpenAPI document of these endpoints."""
    document = get_openapi(
        title="attend",
        version=__version__,
        description=DESCRIPTION,
        routes=[_route(endpoint) for endpoint in table],
        tags=[{"name": name, "description": description} for name, description in TAGS.items()],
        servers=[{"url": "/"}],
        contact={"name": "The maintainers of attend"},
        license_info={"name": "MIT", "identifier": "MIT"},
    )
    models = [endpoint.body.model for endpoint in table if endpoint.body is not None and endpoint.body.model is not None]
    definitions = {**json_schemas([*models, ProblemDocument, V2Error, InferenceReply]), **document["components"]["schemas"]}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's refusals, which this service does not send
        definitions.pop(unused, None)
    document["components"]["schemas"] = _ordered(definitions)
    document["components"]["securitySchemes"] = SECURITY
    document["security"] = [{}, *({name: []} for name in SECURITY)]  # {}: a server without keys needs none
    for endpoint in (endpoint for endpoint in table if endpoint.documented):
        operation = document["paths"][endpoint.path][endpoint.method.lower()]
        first_paragraph = operation["description"].partition("\n\n")[0]
        operation["summary"] = " ".join(first_paragraph.split()).removesuffix(".")
        operation["responses"].pop("422", None)  # FastAPI's own, which this service does not send
        operation["responses"] = {**_refusals(endpoint), **operation["responses"]}
        if endpoint.body is not None:
            operation["requestBody"] = _request_body(endpoint.body)
    return document


def _route(endpoint: Endpoint) -> APIRoute:
    """The endpoint for FastAPI, which describes the function's parameters but the first one, the request."""
    function = endpoint.function
    name = f"v2_{function.__name__}" if is_v2(endpoint.path) else function.__name__  # from which generated clients name their methods
    return APIRoute(
        endpoint.path,
        partial(function, None),
        methods=[endpoint.method],
        name=function.__name__,
        operation_id=name,
        description=inspect.getdoc(function),
        **endpoint.description,
    )


def _ordered(definitions: dict[str, Any]) -> dict[str, Any]:
    """The schemas by name, each after those that it refers to: orval writes constants in this order, and one may extend another."""
    ordered: dict[str, Any] = {}

    def add(node: Any) -> None:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix(REFERENCE)
            if name in definitions and name not in ordered:
                add(definitions[name])
                ordered[name] = definitions[name]
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            add(part)

    for name in sorted(definitions):
        add({"$ref": f"{REFERENCE}{name}"})
    return ordered


def _request_body(body: Body) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if body.model is not None:
        examples = {f"example{i}": {"summary": summary, "value": value} for i, (value, summary) in enumerate(body.examples, 1)}
        content[JSON] = {"schema": schema(body.model), "examples": examples}
    content |= {media_type: {"schema": BINARY} for media_type in body.binary}
    return {"required": body.required, "content": content}


def _refusals(endpoint: Endpoint) -> dict[str, Any]:
    """The refusals of an endpoint by status: those of its row, and those that scopes, body, query and need of layers imply."""
    kinds = [*endpoint.refusals, *(KEY_REFUSALS if endpoint.scopes else ()), *(BODY_REFUSALS if endpoint.body is not None else ())]
    kinds += [NotReady] * endpoint.needs_layers + [InvalidRequest] * (not endpoint.any_query)
    v2 = is_v2(endpoint.path)
    content = {JSON: {"schema": schema(V2Error)}} if v2 else {PROBLEM_JSON: {"schema": schema(ProblemDocument)}}
    meanings: dict[int, dict[str, None]] = {}
    for row in (STATUSES[kind] for kind in STATUSES if kind in kinds):
        meanings.setdefault(status_in(v2, row.status), {})[row.meaning] = None
    return {str(status): {"description": " ".join(meanings[status]), "content": content} for status in sorted(meanings)}


def schema(model: type) -> dict[str, str]:
    """A reference to the definition of a model."""
    return {"$ref": f"{REFERENCE}{model.__name__}"}
