"""The routes of /v2: this server, its models, inference, and the model repository, which lists, creates, unloads and reloads layers."""

from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from attend.errors import LayerConflict, LayerNotFound, MalformedBody, StorageFull
from attend.serving.layer_requests import make_layer, read_object
from attend.serving.layers.registry import LoadedLayer
from attend.serving.request_type import ATTEND
from attend.serving.service import Service
from attend.web.endpoints import ADMIN, INFER, LAYER, PUBLIC, READ, TIMED, EndpointTable
from attend.web.openapi import schema
from attend.web.replies import PiecesResponse
from attend.web.request_reader import begin_without_body, receive_body
from attend.web.requests import Body, HttpRequest
from attend.web.routes.layers import NewName
from attend.web.v2.description import config_of, index_of, metadata_of, statistics_of
from attend.wire.negotiation import CODECS, JSON
from attend.wire.problems import validate
from attend.wire.schemas.schema import require_layer_name
from attend.wire.v2.codec import CODEC, HEADER_LENGTH
from attend.wire.v2.members import decode_config, require_version
from attend.wire.v2.schemas import (
    Health,
    IndexRequest,
    InferenceReply,
    InferenceRequest,
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
VERSION_PATH = f"{MODEL_PATH}/versions/{{version}}"  # every path of a model also exists below it
REPOSITORY_PATH = "/v2/repository/models/{name}"
STATISTICS_BYTES = 1000  # of the statistics of a model, roughly
MODEL_BYTES = 80  # of the entry of a model in the index of the repository, roughly
MAX_BODY_BYTES = 1 << 16  # bytes of a body for the model repository, before and after decompression; a spec has some hundreds
INFER_EXAMPLE = {
    "inputs": [{"name": "query", "shape": [1, 3, 4], "datatype": "FP32", "data": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]}],
    "parameters": {"causal": True, "reply": '{"decimals": 3}'},
}
LOAD_EXAMPLE = {"parameters": {"config": '{"d_model": 4, "num_heads": 2, "seed": 7}'}}
V2Document = Health | ServerMetadata | ModelMetadata | ModelConfig | ModelReady | Statistics
D = TypeVar("D", bound=StrictModel)
OPTIONS: dict[str, Any] = {"tags": ["v2"]}
endpoints = EndpointTable()


def _model(path: str) -> dict[str, Any]:
    """The path of a model, and the same path of its version, as arguments of `EndpointTable.add`."""
    return {"path": MODEL_PATH + path, "aliases": (VERSION_PATH + path,)}


def _header_length(request: HttpRequest) -> str:
    """Inference-Header-Content-Length, "" if there is none. Raises MalformedBody if several differ: a proxy may have used another one."""
    if len(request.repeated) and len({value for name, value in request.repeated if name == HEADER_LENGTH}) > 1:
        raise MalformedBody.where("", "one Inference-Header-Content-Length", "several that differ")
    return request.header(HEADER_LENGTH)


def _document(document: V2Document, status: int = 200) -> Response:
    """The response with a document, without the members that are None."""
    return Response(document.model_dump_json(exclude_none=True), status, media_type=JSON)


def health_of(ready: bool) -> Health:
    """The body of a health reply; different clients read different members."""
    return Health(live=True, ready=ready, error=None if ready else "not ready")


def find(request: HttpRequest, name: str) -> LoadedLayer:
    """The layer of a path. Raises LayerNotFound, also for an unknown version, or LayerUnloaded."""
    require_version(request.path_parameters.get("version"))
    return request.service.registry.find(name)


@endpoints.add("GET", "/v2", READ, grpc_methods=("ServerMetadata",), **OPTIONS, response_model=ServerMetadata)
async def server(request: HttpRequest) -> Response:
    """Name, version, and which extensions of the protocol work here."""
    return _document(request.app.state.extensions.metadata())


@endpoints.add("GET", "/v2/health/live", PUBLIC, any_query=True, grpc_methods=("ServerLive",), **OPTIONS, response_model=Health)
async def live(request: HttpRequest) -> Response:
    """The process is alive. `ready` says whether calls are answered, without checking the device."""
    return _document(health_of(request.service.ready and len(request.service.registry) > 0))


@endpoints.add(
    "GET",
    "/v2/health/ready",
    PUBLIC,
    any_query=True,
    grpc_methods=("ServerReady",),
    **OPTIONS,
    response_model=Health,
    responses={503: {"model": Health, "description": "Not ready."}},
)
async def ready(request: HttpRequest) -> Response:
    """200 if /health/ready is 200 and the server has a layer."""
    is_ready = await request.service.is_serving_layers()
    return _document(health_of(is_ready), 200 if is_ready else 503)


@endpoints.add("GET", "/v2/models/stats", READ, **OPTIONS, response_model=Statistics, refusals=(*TIMED, LayerConflict))
async def all_statistics(request: HttpRequest) -> Response:
    """Statistics of every model."""
    request.app.state.extensions.require_statistics()
    layers = request.service.registry.all()

    def text() -> str:
        return statistics_of(request.service, layers, request.app.state.extensions.workers).model_dump_json()

    begin_without_body(request)
    # in a thread: a thousand models take tenths of a second
    return Response(await request.service.engine.run(request, STATISTICS_BYTES * len(layers), text), media_type=JSON)


@endpoints.add(
    "GET",
    scopes=READ,
    needs_layers=True,
    grpc_methods=("ModelMetadata",),
    **_model(""),
    **OPTIONS,
    response_model=ModelMetadata,
    refusals=LAYER,
)
async def model(request: HttpRequest, name: str) -> Response:
    """Inputs and outputs of a model. Like every path of a model, it also exists below /versions/1."""
    return _document(metadata_of(find(request, name)))


@endpoints.add(
    "GET",
    scopes=READ,
    needs_layers=True,
    grpc_methods=("ModelReady",),
    **_model("/ready"),
    any_query=True,
    **OPTIONS,
    response_model=ModelReady,
    responses={503: {"model": ModelReady, "description": "Not ready."}},
    refusals=LAYER,
)
async def model_ready(request: HttpRequest, name: str) -> Response:
    """Whether calls to a model are answered. 409 for an unloaded one."""
    find(request, name)
    is_ready = await request.service.is_answering()
    return _document(ModelReady(name=name, ready=is_ready), 200 if is_ready else 503)


@endpoints.add(
    "GET",
    scopes=READ,
    needs_layers=True,
    grpc_methods=("ModelConfig",),
    **_model("/config"),
    **OPTIONS,
    response_model=ModelConfig,
    refusals=LAYER,
)
async def config(request: HttpRequest, name: str) -> Response:
    """Model configuration, as in Triton."""
    return _document(config_of(find(request, name), request.service, request.service.wire_limits.max_body_bytes))


@endpoints.add(
    "GET",
    scopes=READ,
    needs_layers=True,
    grpc_methods=("ModelStatistics",),
    **_model("/stats"),
    **OPTIONS,
    response_model=Statistics,
    refusals=(*LAYER, LayerConflict),
)
async def statistics(request: HttpRequest, name: str) -> Response:
    """How many calls a model has answered, and how long each phase took, since the server started."""
    request.app.state.extensions.require_statistics()
    return _document(statistics_of(request.service, [find(request, name)], request.app.state.extensions.workers))


@endpoints.add(
    "POST",
    scopes=INFER,
    needs_layers=True,
    grpc_methods=("ModelInfer", "ModelStreamInfer"),
    **_model("/infer"),
    tags=["v2"],
    responses={200: {"description": "The requested outputs.", "content": {JSON: {"schema": schema(InferenceReply)}}}},
    response_model=None,
    body=Body(InferenceRequest, ((INFER_EXAMPLE, "Three positions, causal; for the layer `tiny` of PUT /layers/{name}."),)),
    refusals=LAYER,
)
async def infer(request: HttpRequest, name: str) -> Response:
    """POST /attend in this protocol: JSON, or JSON and tensors as bytes."""
    find(request, name)  # before the body is read
    # Content-Type and Accept are ignored: clients send arbitrary ones
    await receive_body(request, CODEC, {"model": name, "header_length": _header_length(request)})
    return PiecesResponse(await request.service.engine.answer(request, ATTEND))


@endpoints.add(
    "POST",
    "/v2/repository/index",
    READ,
    grpc_methods=("RepositoryIndex",),
    tags=["v2"],
    response_model=list[RepositoryModel],
    body=Body(IndexRequest, (({"ready": True}, "Those that are ready."),), required=False),
)
async def index(request: HttpRequest) -> Response:
    """The loaded models, with state READY, and the unloaded ones, UNAVAILABLE, unless the body is {"ready": true}."""
    body = await _read(request, IndexRequest)
    layers = request.service.registry.with_unloaded()

    def text() -> str:
        return f"[{','.join(model.model_dump_json() for model in index_of(layers, body.ready))}]"

    # in a thread, as GET /layers
    return Response(await request.service.engine.run(request, MODEL_BYTES * len(layers), text), media_type=JSON)


@endpoints.add(
    "POST",
    f"{REPOSITORY_PATH}/load",
    ADMIN,
    needs_layers=True,
    grpc_methods=("RepositoryModelLoad",),
    tags=["v2"],
    response_class=Response,
    body=Body(LoadRequest, ((LOAD_EXAMPLE, "A seeded layer."),), required=False),
    refusals=(LayerNotFound, LayerConflict, StorageFull),
)
async def load(request: HttpRequest, name: NewName) -> Response:
    """Creates or replaces a layer by the LayerSpec in `parameters.config`; without it, loads an unloaded layer. The layer is usable
    once the reply arrives."""
    request.app.state.extensions.require_writable()
    body = await _read(request, LoadRequest)
    await load_layer(request.service, name, body.parameters or LoadParameters(), request.deadline)
    return Response()


@endpoints.add(
    "POST",
    f"{REPOSITORY_PATH}/unload",
    ADMIN,
    needs_layers=True,
    grpc_methods=("RepositoryModelUnload",),
    tags=["v2"],
    response_class=Response,
    body=Body(UnloadRequest, (({}, "No body is needed."),), required=False),
    refusals=(LayerNotFound, LayerConflict),
)
async def unload(request: HttpRequest, name: str) -> Response:
    """Unloads a layer: it answers no new calls until it is loaded again. DELETE /layers/{name} removes it."""
    request.app.state.extensions.require_writable()
    await _read(request, UnloadRequest)
    await request.service.loader.unload(name, request.deadline)
    return Response()


async def load_layer(service: Service, name: str, parameters: LoadParameters, deadline: float | None) -> None:
    """Creates or replaces the layer by the parameter `config`, a LayerSpec as JSON text; without it, reloads the unloaded layer.

    Raises DeadlinePassed if workers have not followed at the deadline, or another change of a layer is still being made."""
    if (config := parameters.config) is None:
        await service.loader.load(name, deadline)
        return
    require_layer_name(name)
    await make_layer(service, name, await run_in_threadpool(decode_config, config), deadline)


async def _read(request: HttpRequest, model: type[D]) -> D:
    """The body, validated as `model`; an empty body is {}."""
    await receive_body(request, CODECS[JSON], largest=MAX_BODY_BYTES)
    return validate(model, await read_object(request.service, request, MAX_BODY_BYTES))
