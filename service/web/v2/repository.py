"""The model repository extension: the layers that are held, and making and removing them, as PUT and DELETE of /layers do."""

from typing import Any

from fastapi import FastAPI, Request, Response

from service.errors import InvalidRequest, TooLarge
from service.serving.engine import Asked, Engine
from service.web.attend import demand_started, takes
from service.web.examples import LOAD
from service.web.layers import demand_name
from service.web.reading import read_as
from service.web.v2.routes import refusals
from service.wire.compression import unpack
from service.wire.negotiation import JSON
from service.wire.refusals import pointer, shown
from service.wire.scan import parse_strictly
from service.wire.v2.documents import RepositoryModel
from service.wire.v2.members import VERSION

LARGEST = 1 << 20  # bytes of a body: a spec has some hundreds
MODEL = "/v2/repository/models/{name}"


def install(app: FastAPI, engine: Engine, why_not: Exception | None) -> None:
    """Adds the routes; `why_not` is raised where layers cannot be changed over the network."""

    def demand_writable() -> None:
        if why_not is not None:
            raise why_not
        demand_started(engine)

    @app.post("/v2/repository/index", tags=["v2"], response_model=list[RepositoryModel], responses=refusals(400))
    async def index(request: Request) -> list[RepositoryModel]:
        """The models that are held, all of them ready. A body may say {"ready": true}."""
        document = await _document(request, engine)
        ready = document.pop("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest.where("/ready", "true or false", shown(ready))
        _demand_nothing_else(document, "")
        return [RepositoryModel(name=layer.name, version=VERSION, state="READY", reason="") for layer in engine.catalogue.all()]

    @app.post(
        f"{MODEL}/load",
        tags=["v2"],
        response_class=Response,
        responses=refusals(400, 403, 404, 409, 413, 503),
        openapi_extra=takes("LoadRequest", LOAD, "A seeded layer."),
    )
    async def load(name: str, request: Request) -> Response:
        """Makes or replaces a layer by the LayerSpec in `parameters.config`; it serves when the reply comes."""
        demand_writable()
        parameters = await _parameters(request, engine)
        config = parameters.pop("config", None)
        _demand_nothing_else(parameters, "/parameters")
        await load_layer(engine, name, config)
        return Response()

    @app.post(f"{MODEL}/unload", tags=["v2"], response_class=Response, responses=refusals(400, 403, 404, 409, 503))
    async def unload(name: str, request: Request) -> Response:
        """Removes a layer; calls that are bound to it are still answered. Nothing depends on a layer."""
        demand_writable()
        parameters = await _parameters(request, engine)
        parameters.pop("unload_dependents", None)
        _demand_nothing_else(parameters, "/parameters")
        await engine.delete_layer(name)
        return Response()


async def load_layer(engine: Engine, name: str, config: Any) -> None:
    """Makes the layer that the LayerSpec `config`, JSON text, says; without one it must be there already."""
    if config is None:
        engine.catalogue.find(name)
        return
    if not isinstance(config, str):
        raise InvalidRequest.where("/parameters/config", "a LayerSpec as JSON text", shown(config))
    demand_name(name)
    text = config.encode(errors="surrogatepass")
    parse_strictly(text)  # one document, not the middle of another
    await engine.put_layer(name, Asked(b'{"spec": %b}' % text))


async def _document(request: Request, engine: Engine) -> dict[str, Any]:
    """The JSON object that the body is; an empty one where there is none."""
    headers = {name: value.decode("latin-1") for name, value in request.scope["headers"]}
    with engine.holding() as hold:
        asked = await read_as(JSON, JSON, headers, request.scope, request.receive, engine, hold)
        text = unpack(asked.body, asked.coding, LARGEST)
    if len(text) > LARGEST:
        raise TooLarge.where("", f"a body of at most {LARGEST} bytes", str(len(text)))
    document = parse_strictly(text) if text.strip() else {}
    if not isinstance(document, dict):
        raise InvalidRequest.where("", "a JSON object", shown(document))
    return document


async def _parameters(request: Request, engine: Engine) -> dict[str, Any]:
    document = await _document(request, engine)
    parameters = document.pop("parameters", {})
    _demand_nothing_else(document, "")
    if not isinstance(parameters, dict):
        raise InvalidRequest.where("/parameters", "an object", shown(parameters))
    return parameters


def _demand_nothing_else(left: dict[str, Any], at: str) -> None:
    for name, value in left.items():
        raise InvalidRequest.where(at + pointer([name]), "no member of that name", shown(value))
