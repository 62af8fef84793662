"""GET, PUT and DELETE of /layers, and GET of a layer's weights as a file."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from service.errors import InvalidRequest, Problem, pointer
from service.serving import documents
from service.serving.layers.files import CheckpointQuery
from service.serving.service import Service
from service.web.openapi import BINARY, PUT_LAYER_EXAMPLE, error_responses, request_body_doc
from service.web.records import HttpRecord
from service.web.request_reader import deadline_of, lease_of, read_request
from service.wire.codec import Buffer
from service.wire.negotiation import SAFETENSORS
from service.wire.problems import MAX_PROBLEMS, describe_value
from service.wire.schemas.document import LAYER_NAME, require_layer_name
from service.wire.schemas.layers import LayerDocument, Layers

QUERY_PARAMETERS = ("layout", "prefix", "spec")
NewName = Annotated[str, Path(json_schema_extra={"pattern": LAYER_NAME})]  # documents the pattern; `require_layer_name` checks it
CHUNK_BYTES = 1 << 20  # bytes sent at a time, so that a slow client does not cause a second copy of the weights


def install(app: FastAPI, service: Service, require_writable: Callable[[], None]) -> None:
    """Adds the routes. `require_writable` raises an error if layers cannot be changed over HTTP."""

    @app.get("/layers", tags=["layers"], response_model=Layers)
    async def get_layers() -> Layers:
        """All layers, loaded and unloaded."""
        return Layers(layers=service.registry.documents())

    @app.get("/layers/{name}", tags=["layers"], response_model=LayerDocument, responses=error_responses(404))
    async def get_layer(name: str) -> LayerDocument:
        """One layer: its spec with all defaults filled in, its fingerprint, its device."""
        return service.registry.document(name)

    @app.put(
        "/layers/{name}",
        tags=["layers"],
        response_model=LayerDocument,
        responses={
            201: {"model": LayerDocument, "description": "The layer is new."},
            **error_responses(400, 403, 409, 413, 415, 422, 429, 500, 503, 504, 507),
        },
        openapi_extra=request_body_doc("PutLayer", (PUT_LAYER_EXAMPLE, "A seeded layer."), binary=True),
    )
    async def put_layer(
        name: NewName,
        request: Request,
        response: Response,
        layout: Annotated[str | None, Query(description="Layout of the checkpoint; needed only if its names fit several layouts.")] = None,
        prefix: Annotated[str | None, Query(description="Name of the layer in the checkpoint, or enough of it to select one.")] = None,
        spec: Annotated[str | None, Query(description="JSON: fields that the tensors do not determine, such as num_heads.")] = None,
    ) -> LayerDocument:
        """Create or replace a layer; it is usable once the reply arrives.

        The body is JSON (a spec and optional weights) or a safetensors file: one of GET /layers/{name}/weights, or a checkpoint, from which
        one layer is read. If the file's metadata have `config` (the text of a model's config.json), `layer` (a number) and, where the model
        has several, `part` (encoder, decoder or cross), the config decides what the layer computes.
        """
        require_writable()
        require_layer_name(name)
        _require_query_parameters([name for name, _ in request.query_params.multi_items()])
        service.require_started()
        raw = await read_request(request.scope["attend"], request.receive, service, layer=True)
        layer, new, assumed = await documents.put_layer(service, name, raw, CheckpointQuery(layout, prefix, spec))
        response.status_code = 201 if new else 200
        return service.registry.describe(layer).model_copy(update={"assumed": dict(assumed) or None})

    @app.get(
        "/layers/{name}/weights",
        tags=["layers"],
        response_class=StreamingResponse,
        responses={
            200: {"content": {SAFETENSORS: {"schema": BINARY}}, "description": "The weights."},
            **error_responses(404, 409, 429, 507),
        },
    )
    async def get_weights(name: str, request: Request) -> StreamingResponse:
        """The weights under their canonical names, as a safetensors file that PUT accepts; its metadata contains the spec."""
        return send_file(await documents.export_layer(service, name), name, request.scope["attend"], service)

    @app.delete("/layers/{name}", tags=["layers"], status_code=204, responses=error_responses(403, 404, 409, 500, 503, 504))
    async def delete_layer(name: str, request: Request) -> None:
        """Removes a layer; calls that are bound to it are still answered."""
        require_writable()
        service.require_started()
        await service.loader.remove(name, deadline_of(request.scope["attend"], service))


def _require_query_parameters(names: Sequence[str]) -> None:
    """Raises InvalidRequest if a query parameter of PUT /layers/{name} is unknown or occurs twice."""
    unknown = [name for name in names if name not in QUERY_PARAMETERS][:MAX_PROBLEMS]
    problems = [
        Problem(pointer([name]), f"a query parameter among {', '.join(QUERY_PARAMETERS)}", describe_value(name)) for name in unknown
    ]
    problems += [Problem(pointer([name]), "the query parameter once", "it twice") for name in QUERY_PARAMETERS if names.count(name) > 1]
    if problems:
        raise InvalidRequest(problems=problems)


def send_file(pieces: Sequence[Buffer], name: str, record: HttpRecord, service: Service) -> StreamingResponse:
    """The response with a safetensors file to save as `name`. Its bytes count against the byte budget: the file stays in memory until it
    is sent, even if the layer or session is replaced meanwhile."""
    size = sum(map(len, pieces))
    lease_of(record, service).add(size)
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}.safetensors"'}
    return StreamingResponse(_chunks(pieces), headers=headers, media_type=SAFETENSORS)


async def _chunks(pieces: Sequence[Buffer]) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        whole = memoryview(piece)
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]
