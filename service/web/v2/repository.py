"""The model repository extension: lists, creates, unloads and reloads layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.errors import InvalidRequest, RequestError
from service.serving.requests import NO_PARAMETERS, RawRequest
from service.serving.service import Service
from service.web.openapi.examples import LOAD
from service.web.request_reader import read_as
from service.web.routes.attend import request_body_doc, require_started
from service.web.routes.layers import NewName, require_name
from service.web.v2.description import ProtocolExtensions, index_of
from service.web.v2.routes import error_responses
from service.wire.codec import CODECS
from service.wire.negotiation import JSON
from service.wire.problems import describe_value
from service.wire.v2.error_paths import V2ErrorPaths
from service.wire.v2.parameters import read_nested, require_known
from service.wire.v2.schemas import RepositoryModel

LARGEST = 1 << 16  # bytes of a body, before and after decompression; a spec has some hundreds
MODEL = "/v2/repository/models/{name}"


def install(app: FastAPI, service: Service, extensions: ProtocolExtensions) -> None:
    """Adds the routes."""

    @app.post(
        "/v2/repository/index",
        tags=["v2"],
        response_model=list[RepositoryModel],
        responses=error_responses(400),
        openapi_extra=request_body_doc("IndexRequest", {"ready": True}, "Those that are ready.", required=False),
    )
    async def index(request: Request) -> list[RepositoryModel]:
        """The models that are held, which are ready, and unless a body says {"ready": true} the unloaded ones, which are unavailable."""
        document = await _document(request, service)
        require_known(document, ("ready",), "")
        if not isinstance(ready := document.get("ready", False), bool):
            raise InvalidRequest.where("/ready", "true or false", describe_value(ready))
        return index_of(service.registry.documents(), ready)

    @app.post(
        f"{MODEL}/load",
        tags=["v2"],
        response_class=Response,
        responses=error_responses(400, 403, 404, 409, 413, 503),
        openapi_extra=request_body_doc("LoadRequest", LOAD, "A seeded layer.", required=False),
    )
    async def load(name: NewName, request: Request) -> Response:
        """Makes or replaces a layer by the LayerSpec in `parameters.config`, or makes an unloaded one available; it serves when the reply
        comes."""
        extensions.require_writable()
        await load_layer(service, name, await _parameters(request, service))
        return Response()

    @app.post(
        f"{MODEL}/unload",
        tags=["v2"],
        response_class=Response,
        responses=error_responses(400, 403, 404, 409, 503),
        openapi_extra=request_body_doc("UnloadRequest", {}, "No body is needed.", required=False),
    )
    async def unload(name: str, request: Request) -> Response:
        """Makes a layer unavailable, and keeps it: `load` brings it back, DELETE /layers/{name} removes it. Calls that are bound to it are
        still answered."""
        extensions.require_writable()
        await unload_layer(service, name, await _parameters(request, service))
        return Response()


async def load_layer(service: Service, name: str, parameters: Mapping[str, Any]) -> None:
    """Creates or replaces the layer by the parameter `config`, a LayerSpec as JSON text; without it, reloads the unloaded layer."""
    require_started(service)
    require_known(parameters, ("config",), "/parameters")
    if (config := parameters.get("config")) is None:
        await service.loader.load(name)
        return
    if not isinstance(config, str):
        raise InvalidRequest.where("/parameters/config", "a LayerSpec as JSON text", describe_value(config))
    require_name(name)
    await run_in_threadpool(read_nested, config, "/parameters/config")  # must be complete JSON: it is inserted into other JSON
    try:
        await service.put_layer(name, RawRequest(b'{"spec": %b}' % config.encode()))
    except RequestError as refusal:
        raise _of_config(refusal) from None


async def unload_layer(service: Service, name: str, parameters: Mapping[str, Any]) -> None:
    """Unloads the layer. `unload_dependents` changes nothing: no layer depends on another."""
    require_started(service)
    require_known(parameters, ("unload_dependents",), "/parameters")
    with V2ErrorPaths():
        await service.loader.unload(name)


def _of_config(refusal: RequestError) -> RequestError:
    """The refusal with paths into /parameters/config instead of /spec."""
    if not refusal.problems:
        return refusal
    return type(refusal)(problems=[replace(p, at="/parameters/config" + p.at.removeprefix("/spec")) for p in refusal.problems])


async def _document(request: Request, service: Service) -> dict[str, Any]:
    """The body as a JSON object; {} for an empty body."""
    limit = ("", LARGEST) if service.wire_limits.body_bytes > LARGEST else None
    raw = await read_as(CODECS[JSON], CODECS[JSON], NO_PARAMETERS, request.scope["attend"], request.receive, service, limit)
    return await service.read_object(raw, LARGEST)


async def _parameters(request: Request, service: Service) -> dict[str, Any]:
    document = await _document(request, service)
    require_known(document, ("parameters",), "")
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequest.where("/parameters", "an object", describe_value(parameters))
    return parameters
