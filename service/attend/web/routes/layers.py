"""GET, PUT and DELETE of /layers, and GET of a layer's weights as a file, and of its circuits."""

from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response

from attend.errors import LayerConflict, LayerNotFound, OutOfMemory, Overloaded, ServiceFault, StorageFull, TooLarge
from attend.serving import layer_requests
from attend.serving.layers.files import CheckpointQuery
from attend.serving.layers.registry import by_name
from attend.web.endpoints import ADMIN, LAYER, READ, TIMED, EndpointTable
from attend.web.openapi import BINARY
from attend.web.replies import response_of_file
from attend.web.request_reader import begin_without_body, deadline_of, receive_body
from attend.web.requests import Body, HttpRequest
from attend.wire.negotiation import JSON, SAFETENSORS
from attend.wire.schemas.layers import Circuits, LayerInfo, Layers, PutLayer
from attend.wire.schemas.schema import LAYER_NAME, require_layer_name

PUT_LAYER_EXAMPLE = {"spec": {"d_model": 4, "num_heads": 2, "seed": 7}}
NewName = Annotated[str, Path(json_schema_extra={"pattern": LAYER_NAME})]  # documents the pattern; `require_layer_name` checks it
INFO_BYTES = 1500  # of the description of a layer, roughly
endpoints = EndpointTable()


@endpoints.add("GET", "/layers", READ, tags=["layers"], response_model=Layers, refusals=TIMED)
async def get_layers(request: HttpRequest) -> Response:
    """All layers, loaded and unloaded."""
    registry = request.service.registry
    layers = registry.with_unloaded()

    def text() -> str:
        return Layers(layers=list(map(registry.info_of, by_name(layers)))).model_dump_json()

    begin_without_body(request)
    # in a thread: a thousand layers take tenths of a second
    return Response(await request.service.engine.run(request, INFO_BYTES * len(layers), text), media_type=JSON)


@endpoints.add("GET", "/layers/{name}", READ, needs_layers=True, tags=["layers"], response_model=LayerInfo, refusals=(LayerNotFound,))
async def get_layer(request: HttpRequest, name: str) -> Response:
    """One layer: its spec with all defaults filled in, its fingerprint, its device."""
    return Response(request.service.registry.layer_info(name).model_dump_json(), media_type=JSON)


@endpoints.add(
    "PUT",
    "/layers/{name}",
    ADMIN,
    needs_layers=True,
    tags=["layers"],
    response_model=LayerInfo,
    responses={
        201: {"model": LayerInfo, "description": "The layer is new."},
    },
    body=Body(PutLayer, ((PUT_LAYER_EXAMPLE, "A seeded layer."),), (SAFETENSORS,)),
    refusals=(LayerConflict, StorageFull),
)
async def put_layer(
    request: HttpRequest,
    name: NewName,
    layout: Annotated[str | None, Query(description="Layout of the checkpoint; needed only if its names fit several layouts.")] = None,
    prefix: Annotated[str | None, Query(description="Name of the layer in the checkpoint, or enough of it to select one.")] = None,
    spec: Annotated[str | None, Query(description="JSON: fields that the tensors do not determine, such as num_heads.")] = None,
) -> Response:
    """Create or replace a layer; it is usable once the reply arrives.

    The body is JSON (a spec and optional weights) or a safetensors file: one of GET /layers/{name}/weights, or a checkpoint, from which
    one layer is read. If the file's metadata have `config` (the text of a model's config.json), `layer` (a number) and, where the model
    has several, `part` (encoder, decoder or cross), the config decides what the layer computes.
    """
    request.app.state.extensions.require_writable()
    require_layer_name(name)
    await receive_body(request, layer=True)
    layer, new, assumed = await layer_requests.put_layer(request.service, name, request, CheckpointQuery(layout, prefix, spec))
    info = request.service.registry.info_of(layer).model_copy(update={"assumed": dict(assumed) or None})
    return Response(info.model_dump_json(), 201 if new else 200, media_type=JSON)


@endpoints.add(
    "GET",
    "/layers/{name}/weights",
    READ,
    needs_layers=True,
    tags=["layers"],
    response_class=Response,
    responses={
        200: {"content": {SAFETENSORS: {"schema": BINARY}}, "description": "The weights."},
    },
    refusals=(*LAYER, *TIMED, Overloaded, OutOfMemory),
)
async def get_weights(request: HttpRequest, name: str) -> Response:
    """The weights under their canonical names, as a safetensors file that PUT accepts; its metadata contains the spec."""
    begin_without_body(request)
    return response_of_file(await layer_requests.export_layer(request.service, name, request), name)


@endpoints.add(
    "GET",
    "/layers/{name}/circuits",
    READ,
    needs_layers=True,
    tags=["layers"],
    response_model=Circuits,
    refusals=(*LAYER, *TIMED, TooLarge, Overloaded, OutOfMemory),
)
async def get_circuits(request: HttpRequest, name: str) -> Response:
    """The QK and OV circuits of each head: singular values, and scores of matching and copying (Elhage et al. 2021).

    They depend on the weights alone. A layer is refused if it has no projections, or more than one matrix for each input of a head
    (`latent`, `differential`).
    """
    begin_without_body(request)
    return Response(await layer_requests.layer_circuits(request.service, name, request), media_type=JSON)


@endpoints.add(
    "DELETE",
    "/layers/{name}",
    ADMIN,
    needs_layers=True,
    tags=["layers"],
    status_code=204,
    response_class=Response,  # without a body and its type
    refusals=(LayerNotFound, LayerConflict, *TIMED, ServiceFault),
)
async def delete_layer(request: HttpRequest, name: str) -> Response:
    """Removes a layer; calls that were accepted before are still answered."""
    request.app.state.extensions.require_writable()
    await request.service.loader.remove(name, deadline_of(request))
    return Response(status_code=204)
