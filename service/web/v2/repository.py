"""The model repository extension: lists, creates, unloads and reloads layers."""

from typing import TypeVar

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.errors import RequestError
from service.serving.documents import put_layer, read_object
from service.serving.requests import RawRequest
from service.serving.service import Service
from service.web.openapi import LOAD_EXAMPLE, request_body_doc, v2_error_responses
from service.web.request_reader import read_request
from service.web.routes.attend import require_started
from service.web.routes.layers import NewName
from service.web.v2.description import ProtocolExtensions, index_of
from service.wire.json.strict import parse_nested
from service.wire.negotiation import CODECS, JSON
from service.wire.problems import validate
from service.wire.schemas.document import require_layer_name
from service.wire.v2.schemas import IndexRequest, LoadParameters, LoadRequest, RepositoryModel, StrictModel, UnloadRequest

MAX_BODY_BYTES = 1 << 16  # bytes of a body, before and after decompression; a spec has some hundreds
MODEL_PATH = "/v2/repository/models/{name}"
CONFIG_PATH = "/parameters/config"  # the place of the spec in a request
D = TypeVar("D", bound=StrictModel)


def install(app: FastAPI, service: Service, extensions: ProtocolExtensions) -> None:
    """Adds the routes."""

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
        f"{MODEL_PATH}/load",
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
        f"{MODEL_PATH}/unload",
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
    require_started(service)
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
    require_started(service)
    try:
        await service.loader.unload(name)
    except RequestError as refusal:
        raise refusal.with_paths(lambda _: "") from None  # the name is in the path


async def _read(request: Request, service: Service, model: type[D]) -> D:
    """The body, validated as `model`; an empty body is {}."""
    raw = await read_request(request.scope["attend"], request.receive, service, CODECS[JSON], largest=MAX_BODY_BYTES)
    return validate(model, await read_object(service, raw, MAX_BODY_BYTES))
