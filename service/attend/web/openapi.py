"""GET /openapi.json, generated from the table of endpoints and Pydantic models, and GET /docs, with assets from this server.

`request_body_doc` and `error_responses` describe routes that read the body themselves; a test posts each of their examples.
"""

import math
from functools import cache, partial
from typing import Any

from fastapi import Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.staticfiles import StaticFiles

from attend.version import __version__
from attend.web.endpoints import READ, EndpointTable
from attend.wire.negotiation import CODECS, JSON, PROBLEM_JSON
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.figure import FigureRequest
from attend.wire.schemas.layers import PutLayer
from attend.wire.schemas.schema import ProblemDocument
from attend.wire.schemas.sessions import PatchSession, PostFork, PostSession, SessionAttendRequest
from attend.wire.schemas.tensors import json_schemas
from attend.wire.schemas.words import WordsRequest
from attend.wire.v2 import schemas

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
DOCUMENTS = (  # documents that routes read or write without FastAPI
    *(AttendRequest, AnalysisRequest, FigureRequest, PutLayer, WordsRequest, ProblemDocument),
    *(PostSession, PatchSession, PostFork, SessionAttendRequest),
    *(schemas.InferenceRequest, schemas.InferenceReply, schemas.V2Error),
    *(schemas.LoadRequest, schemas.UnloadRequest, schemas.IndexRequest),
)
REFERENCE = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
STATUS_MEANINGS = {  # of refusals
    400: "The body is not valid JSON, or a key is repeated.",
    401: "An API key is required.",
    403: "This server does not allow it.",
    404: "No such layer.",
    406: "No supported media type is accepted.",
    409: "The layers cannot be changed that way here, or the layer is unloaded.",
    410: "The session has ended.",
    412: "The session does not have expected_length rows.",
    413: "Too large: bytes, depth, parameters, or predicted memory.",
    415: "An unsupported media type.",
    421: "Another replica has the session.",
    422: "Well-formed, but it breaks the contract or does not fit the layer.",
    429: "The queue is full; see Retry-After.",
    500: "Server error.",
    503: "Not ready yet.",
    504: "The deadline of X-Request-Timeout passed.",
    507: "Not enough memory, or no disk space for a layer.",
}
BODY_ERRORS = (400, 404, 409, 413, 415, 422, 429, 500, 503, 504, 507)  # of a route that reads a body
CALL_ERRORS = (*BODY_ERRORS, 406)  # of a route that computes

PUT_LAYER_EXAMPLE = {"spec": {"d_model": 4, "num_heads": 2, "seed": 7}}
ATTEND_EXAMPLE = {
    "layer": "tiny",
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
    "causal": True,
    "reply": {"decimals": 3},
}
# Four rows for the layer `default`, which every new server has
ROWS_EXAMPLE = {"query": [[round(math.sin((row + 1) * (column + 1) / 9), 2) for column in range(64)] for row in range(4)], "causal": True}
TOKENS_EXAMPLE = {"tokens": {"query": ["the", "cat", "saw", "the"]}}
DEFAULT_LAYER_EXAMPLE = {**ROWS_EXAMPLE, "reply": {"decimals": 3}}
FIGURE_EXAMPLE = {**ROWS_EXAMPLE, **TOKENS_EXAMPLE, "figure": {"kind": "heads", "format": "svg"}}
METRICS_EXAMPLE = ["entropy", "confidence", "strongest_links", "previous_token_score", "zero_ablation"]
ANALYSIS_EXAMPLE = {**ROWS_EXAMPLE, **TOKENS_EXAMPLE, "metrics": METRICS_EXAMPLE, "reply": {"decimals": 3}}
STEP_EXAMPLE = {"query": [[0.1] * 64], "causal": True, "outputs": ["output"], "reply": {"decimals": 3}}
PLAN_EXAMPLE = {"query": {"shape": [2, 1000, 64]}, "causal": True, "outputs": ["output"]}
INFER_EXAMPLE = {
    "inputs": [{"name": "query", "shape": [1, 3, 4], "datatype": "FP32", "data": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]}],
    "parameters": {"causal": True, "reply": '{"decimals": 3}'},
}
LOAD_EXAMPLE = {"parameters": {"config": '{"d_model": 4, "num_heads": 2, "seed": 7}'}}
WORDS_EXAMPLE = {"text": "The cat sat on the mat", "layer": "default"}


def add_endpoints(table: EndpointTable) -> None:
    """Adds GET /openapi.json, GET /docs and the files of that page."""
    files, document = StaticFiles(packages=[("fastapi_swagger", "resources")]), cache(partial(describe, table))

    @table.add("GET", "/openapi.json", READ, include_in_schema=False)
    async def openapi_json(request: Request) -> Response:
        """The document of the server as the client sees it: below the prefix that a proxy removes."""
        whole = await run_in_threadpool(document)  # takes a few hundred milliseconds the first time
        root = request.scope.get("root_path", "")
        return JSONResponse({**whole, "servers": [{"url": root}, *whole["servers"]]} if root else whole)

    @table.add("GET", "/docs", READ, include_in_schema=False)
    async def docs(request: Request) -> Response:
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

    @table.add("GET", "/docs/{file}", READ, include_in_schema=False)
    async def docs_file(file: str, request: Request) -> Response:
        return await files.get_response(file, request.scope)


def describe(table: EndpointTable) -> dict[str, Any]:
    """The OpenAPI document of these endpoints."""
    document = get_openapi(
        title="attend",
        version=__version__,
        description=DESCRIPTION,
        routes=[endpoint.route for endpoint in table],
        tags=[{"name": name, "description": description} for name, description in TAGS.items()],
        servers=[{"url": "/"}],
        contact={"name": "The maintainers of attend"},
        license_info={"name": "MIT", "identifier": "MIT"},
    )
    definitions = {**json_schemas(DOCUMENTS), **document["components"]["schemas"]}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's refusals, which this service does not send
        definitions.pop(unused, None)
    document["components"]["schemas"] = _ordered(definitions)
    document["components"]["securitySchemes"] = SECURITY
    document["security"] = [{}, *({name: []} for name in SECURITY)]  # {}: a server without keys needs none
    for endpoint in (endpoint for endpoint in table if endpoint.route.include_in_schema):
        operation = document["paths"][endpoint.path][endpoint.method.lower()]
        first_paragraph = operation["description"].partition("\n\n")[0]
        operation["summary"] = " ".join(first_paragraph.split()).removesuffix(".")
        if endpoint.scopes:
            refusals = v2_error_responses if endpoint.path.startswith("/v2") else error_responses
            operation["responses"] |= {str(status): refusal for status, refusal in refusals(401, 403).items()}
        refusal = operation["responses"].get("422", {}).get("content", {})
        if "application/json" in refusal and "HTTPValidationError" in str(refusal["application/json"]):
            del operation["responses"]["422"]
    return document


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
        add(schema(name))
    return ordered


def request_body_doc(model: str, *examples: tuple[Any, str], binary: bool = False, required: bool = True) -> dict[str, Any]:
    """The request body of a route that reads the body itself. An example is a body and its summary."""
    named = {f"example{i}": {"summary": summary, "value": value} for i, (value, summary) in enumerate(examples, 1)}
    content: dict[str, Any] = {JSON: {"schema": schema(model), "examples": named}}
    if binary:
        content |= {media_type: {"schema": BINARY} for media_type, codec in CODECS.items() if codec.is_file}
    return {"requestBody": {"required": required, "content": content}}


def schema(model: str) -> dict[str, str]:
    """A reference to the definition of a model."""
    return {"$ref": f"{REFERENCE}{model}"}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route."""
    content = {PROBLEM_JSON: {"schema": schema("ProblemDocument")}}
    return {status: {"description": STATUS_MEANINGS[status], "content": content} for status in sorted(statuses)}


def session_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route under /sessions."""
    responses = error_responses(*statuses)
    responses[404]["description"] = "No such session or layer, or this server keeps no sessions."
    if 409 in responses:
        responses[409]["description"] = "The layer of the rows is another one or unloaded, or rows that are needed are freed."
    return responses


def v2_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route under /v2."""
    content = {JSON: {"schema": schema("V2Error")}}
    descriptions = {**STATUS_MEANINGS, 400: "Anything wrong with the request."}
    return {status: {"description": descriptions[status], "content": content} for status in statuses}
