"""GET, PUT and DELETE of layers."""

import re

from fastapi import FastAPI, Request, Response

from service.errors import InvalidRequest
from service.serving.engine import Engine
from service.web.attend import demand_started, refusals, takes
from service.web.examples import PUT_TINY
from service.web.reading import read
from service.wire.documents import LAYER_NAME, LayerDocument, Layers
from service.wire.refusals import shown

NAME = re.compile(LAYER_NAME)


def demand_name(name: str) -> None:
    """Raises InvalidRequest where no layer may have the name."""
    if not NAME.fullmatch(name):
        raise InvalidRequest.where("", f"a layer name matching {LAYER_NAME}", shown(name))


def install(app: FastAPI, engine: Engine, why_not: Exception | None) -> None:
    """Adds the routes; `why_not` is raised where layers cannot be changed over HTTP."""

    def demand_writable() -> None:
        if why_not is not None:
            raise why_not

    @app.get("/layers", tags=["layers"], response_model=Layers)
    async def get_layers() -> Layers:
        """The layers that are held."""
        return Layers(layers=[layer.document() for layer in engine.catalogue.all()])

    @app.get("/layers/{name}", tags=["layers"], response_model=LayerDocument, responses=refusals(404))
    async def get_layer(name: str) -> LayerDocument:
        """One layer: its spec with all defaults filled in, its fingerprint, where it lives."""
        return engine.catalogue.find(name).document()

    @app.put(
        "/layers/{name}",
        tags=["layers"],
        response_model=LayerDocument,
        responses={201: {"model": LayerDocument, "description": "The layer is new."}, **refusals(400, 403, 409, 413, 415, 422, 500, 503)},
        openapi_extra=takes("PutLayer", PUT_TINY, "A seeded layer."),
    )
    async def put_layer(name: str, request: Request, response: Response) -> LayerDocument:
        """Makes or replaces a layer; it serves when the reply comes."""
        demand_writable()
        demand_name(name)
        demand_started(engine)
        with engine.holding() as hold:
            layer, new = await engine.put_layer(name, await read(request.scope, request.receive, engine, hold))
        response.status_code = 201 if new else 200
        return layer.document()

    @app.delete("/layers/{name}", tags=["layers"], status_code=204, responses=refusals(403, 404, 409, 503))
    async def delete_layer(name: str) -> None:
        """Removes a layer; calls that are bound to it are still answered."""
        demand_writable()
        demand_started(engine)
        engine.delete_layer(name)
