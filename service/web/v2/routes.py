"""The routes of /v2: this server, its models, inference, and the model repository, which lists, creates, unloads and reloads layers."""

import re
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.types import Receive, Send

from service.errors import MalformedBody, RequestError
from service.serving.documents import put_layer, read_object
from service.serving.engine import ATTEND
from service.serving.requests import RawRequest
from service.serving.service import Service
from service.web.openapi import INFER_EXAMPLE, LOAD_EXAMPLE, request_body_doc, schema, v2_error_responses
from service.web.records import HttpRecord
from service.web.request_reader import read_request
from service.web.routes.attend import send_reply
from service.web.routes.layers import NewName
from service.web.v2.description import ProtocolExtensions, config_of, index_of, metadata_of, statistics_of
from service.wire.json.strict import parse_nested
from service.wire.negotiation import CODECS, JSON
from service.wire.problems import validate
from service.wire.schemas.document import require_layer_name
from service.wire.v2.codec import HEADER_LENGTH, V2Codec
from service.wire.v2.members import require_version
from service.wire.v2.schemas import (
    Health,
    IndexRequest,
    LoadParameters,
    LoadRequest,
    ModelConfig,
    ModelMetadata,
    ModelReady,
    RepositoryModel,
    ServerMetadata,
    Statistics,
    StrictModel,
    UnloadRequest,
)

MODEL_PATH = "/v2/models/{name}"
VERSIONED_PATH = re.compile(rf"({MODEL_PATH.format(name='[^/]+')})/versions/([^/]+)(/.*)?")
INFER_PATH = re.compile(rf"{MODEL_PATH.format(name='([^/]+)')}(?:/versions/([^/]+))?/infer/?")
REPOSITORY_PATH = "/v2/repository/models/{name}"
CONFIG_PATH = "/parameters/config"  # the place of the spec in a request to load a model
MAX_BODY_BYTES = 1 << 16  # bytes of a body for the model repository, before and after decompression; a spec has some hundreds
CODEC = V2Codec()
ROUTE_OPTIONS: dict[str, Any] = {"tags": ["v2"], "response_model_exclude_none": True}
D = TypeVar("D", bound=StrictModel)


async def answer_infer(service: Service, model: str, version: str | None, record: HttpRecord, receive: Receive, send: Send) -> None:
    """POST /v2/models/{name}/infer, with or without /versions/1; it bypasses FastAPI's routing, as POST /attend does.

    The header Inference-Header-Content-Length decides how the body is read. Content-Type and Accept are ignored: clients send arbitrary
    ones.
    """
    service.require_started()
    service.registry.find(model, at="")
    require_version(version)
    parameters = {"model": model, "header_length": _header_length(record)}
    raw = await read_request(record, receive, service, CODEC, parameters)
    await send_reply(await service.engine.answer(raw, ATTEND), record, send)


def _header_length(record: HttpRecord) -> str:
    """Inference-Header-Content-Length, "" if there is none. Raises MalformedBody if several differ: a proxy may have used another one."""
    if len(record.repeated) and len({value for name, value in record.repeated if name == HEADER_LENGTH}) > 1:
        raise MalformedBody.where("", "one Inference-Header-Content-Length", "several that differ")
    return record.header(HEADER_LENGTH)


def plain_path(path: str) -> str:
    """A path under /v2 without trailing slash and without the version of a model. Raises LayerNotFound for an unknown version."""
    if (found := VERSIONED_PATH.fullmatch(path.rstrip("/"))) is None:
        return path.rstrip("/")
    require_version(found[2])
    return found[1] + (found[3] or "")


def health_of(ready: bool) -> Health:
    """The body of a health reply; different clients read different members."""
    return Health(live=True, ready=ready, error=None if ready else "not ready")


def install(app: FastAPI, service: Service, extensions: ProtocolExtensions) -> None:
    """Adds the routes."""

    @app.get("/v2", **ROUTE_OPTIONS, response_model=ServerMetadata)
    async def server() -> ServerMetadata:
        """Name, version, and which extensions of the protocol work here."""
        return extensions.metadata()

    @app.get("/v2/health/live", **ROUTE_OPTIONS, response_model=Health)
    async def live() -> Health:
        """The process is alive. `ready` says whether calls are answered, without checking the device."""
        return health_of(service.ready and len(service.registry) > 0)

    @app.get("/v2/health/ready", **ROUTE_OPTIONS, response_model=Health, responses={503: {"model": Health, "description": "Not ready."}})
    async def ready(response: Response) -> Health:
        """200 if /health/ready is 200 and the server has a layer."""
        is_ready = await service.is_serving_layers()
        response.status_code = 200 if is_ready else 503
        return health_of(is_ready)

    @app.get("/v2/models/stats", **ROUTE_OPTIONS, response_model=Statistics, responses=v2_error_responses(409))
    async def all_statistics() -> Response:
        """Statistics of every model."""
        extensions.require_statistics()
        layers = service.registry.all()
        text = await run_in_threadpool(lambda: statistics_of(service, layers, extensions.workers).model_dump_json())  # slow for many layers
        return Response(text, media_type=JSON)

    @app.get(MODEL_PATH, **ROUTE_OPTIONS, response_model=ModelMetadata, responses=v2_error_responses(404, 409))
    async def model(name: str) -> ModelMetadata:
        """Inputs and outputs of a model. Like every path of a model, it also exists below /versions/1."""
        return metadata_of(service.registry.find(name, at=""))

    @app.get(
        f"{MODEL_PATH}/ready",
        **ROUTE_OPTIONS,
        response_model=ModelReady,
        responses={503: {"model": ModelReady, "description": "Not ready."}, **v2_error_responses(404, 409)},
    )
    async def model_ready(name: str, response: Response) -> ModelReady:
        """Whether calls to a model are answered. 409 for an unloaded one."""
        service.registry.find(name, at="")
        is_ready = await service.is_answering()
        response.status_code = 200 if is_ready else 503
        return ModelReady(name=name, ready=is_ready)

    @app.get(f"{MODEL_PATH}/config", **ROUTE_OPTIONS, response_model=ModelConfig, responses=v2_error_responses(404, 409))
    async def config(name: str) -> ModelConfig:
        """Model configuration, as in Triton."""
        return config_of(service.registry.find(name, at=""), service, service.wire_limits.body_bytes)

    @app.get(f"{MODEL_PATH}/stats", **ROUTE_OPTIONS, response_model=Statistics, responses=v2_error_responses(404, 409))
    async def statistics(name: str) -> Statistics:
        """How many calls a model has answered, and how long each phase took, since the server started."""
        extensions.require_statistics()
        return statistics_of(service, [service.registry.find(name, at="")], extensions.workers)

    @app.post(
        f"{MODEL_PATH}/infer",
        tags=["v2"],
        responses={
            200: {"description": "The requested outputs.", "content": {JSON: {"schema": schema("InferenceReply")}}},
            **v2_error_responses(400, 404, 409, 413, 415, 429, 500, 503, 504, 507),
        },
        response_model=None,
        openapi_extra=request_body_doc(
            "InferenceRequest", (INFER_EXAMPLE, "Three positions, causal; for the layer `tiny` of PUT /layers/{name}.")
        ),
    )
    async def infer(name: str) -> None:
        """POST /attend in this protocol: JSON, or JSON and tensors as bytes."""
        raise AssertionError("handled before routing")

    _install_repository(app, service, extensions)


def _install_repository(app: FastAPI, service: Service, extensions: ProtocolExtensions) -> None:
    """Adds the routes of the model repository extension."""

    @app.post(
        "/v2/repository/index",
        tags=["v2"],
        response_model=list[RepositoryModel],
        responses=v2_error_responses(400),
        openapi_extra=request_body_doc("IndexRequest", ({"ready": True}, "Those that are ready."), required=False),
    )
    async def index(request: Request) -> list[RepositoryModel]:
        """The loaded models, with state READY, and the unloaded ones, UNAVAILABLE, unless the body is {"ready": true}."""
        return index_of(service.registry.documents(), (await _read(request, service, IndexRequest)).ready)

    @app.post(
        f"{REPOSITORY_PATH}/load",
        tags=["v2"],
        response_class=Response,
        responses=v2_error_responses(400, 403, 404, 409, 413, 503),
        openapi_extra=request_body_doc("LoadRequest", (LOAD_EXAMPLE, "A seeded layer."), required=False),
    )
    async def load(name: NewName, request: Request) -> Response:
        """Creates or replaces a layer by the LayerSpec in `parameters.config`; without it, loads an unloaded layer. The layer is usable
        once the reply arrives."""
        extensions.require_writable()
        await load_layer(service, name, (await _read(request, service, LoadRequest)).parameters or LoadParameters())
        return Response()

    @app.post(
        f"{REPOSITORY_PATH}/unload",
        tags=["v2"],
        response_class=Response,
        responses=v2_error_responses(400, 403, 404, 409, 503),
        openapi_extra=request_body_doc("UnloadRequest", ({}, "No body is needed."), required=False),
    )
    async def unload(name: str, request: Request) -> Response:
        """Unloads a layer: it answers no new calls until it is loaded again. DELETE /layers/{name} removes it."""
        extensions.require_writable()
        await _read(request, service, UnloadRequest)
        await unload_layer(service, name)
        return Response()


async def load_layer(service: Service, name: str, parameters: LoadParameters) -> None:
    """Creates or replaces the layer by the parameter `config`, a LayerSpec as JSON text; without it, reloads the unloaded layer."""
    service.require_started()
    if (config := parameters.config) is None:
        await service.loader.load(name)
        return
    require_layer_name(name)
    await run_in_threadpool(parse_nested, config, CONFIG_PATH)  # must be complete JSON: it is inserted into other JSON
    try:
        await put_layer(service, name, RawRequest(b'{"spec": %b}' % config.encode()))
    except RequestError as refusal:
        if not refusal.problems:
            raise
        raise refusal.with_paths(lambda at: CONFIG_PATH + at.removeprefix("/spec")) from None


async def unload_layer(service: Service, name: str) -> None:
    service.require_started()
    try:
        await service.loader.unload(name)
    except RequestError as refusal:
        raise refusal.with_paths(lambda _: "") from None  # the name is in the path


async def _read(request: Request, service: Service, model: type[D]) -> D:
    """The body, validated as `model`; an empty body is {}."""
    raw = await read_request(request.scope["attend"], request.receive, service, CODECS[JSON], largest=MAX_BODY_BYTES)
    return validate(model, await read_object(service, raw, MAX_BODY_BYTES))
