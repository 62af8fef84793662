"""The GET routes of /v2: this server, its models, their configuration and statistics."""

from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from service.serving.service import Service
from service.web.openapi.examples import INFER
from service.web.routes.attend import error_responses_as, request_body_doc, schema
from service.web.v2.description import ProtocolExtensions, config_of, metadata_of, statistics_of
from service.web.v2.infer import require_version
from service.wire.negotiation import JSON
from service.wire.v2.schemas import Health, ModelConfig, ModelMetadata, ModelReady, ServerMetadata, Statistics

MODEL = "/v2/models/{name}"
VERSIONED = MODEL + "/versions/{version}"


def _require_version(request: Request) -> None:
    """Raises LayerNotFound if the path has a version other than VERSION."""
    require_version(request.path_params.get("version"))


V2: dict[str, Any] = {"tags": ["v2"], "response_model_exclude_none": True, "dependencies": [Depends(_require_version)]}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of the refusals of a route under /v2."""
    return error_responses_as("V2Error", JSON, *statuses, meaning={400: "Anything wrong with the request."})


def health_of(ready: bool) -> Health:
    """The body of a health reply; different clients read different members."""
    return Health(live=True, ready=ready, error=None if ready else "not ready")


def install(app: FastAPI, service: Service, extensions: ProtocolExtensions) -> None:
    """Adds the routes."""

    @app.get("/v2", **V2, response_model=ServerMetadata)
    async def server() -> ServerMetadata:
        """Name, version, and which extensions of the protocol work here."""
        return extensions.metadata()

    @app.get("/v2/health/live", **V2, response_model=Health)
    async def live() -> Health:
        """The process is alive. `ready` does not check the device."""
        return health_of(service.ready and len(service.registry) > 0)

    @app.get("/v2/health/ready", **V2, response_model=Health, responses={503: {"model": Health, "description": "Not ready."}})
    async def ready(response: Response) -> Health:
        """Every layer is loaded and warm, there is one, and the device computes, as for /health/ready."""
        good = await service.serves()
        response.status_code = 200 if good else 503
        return health_of(good)

    @app.get("/v2/models/stats", **V2, response_model=Statistics, responses=error_responses(409))
    async def all_statistics() -> Response:
        """Statistics of every model."""
        extensions.require_statistics()
        layers = service.registry.all()
        text = await run_in_threadpool(lambda: statistics_of(service, layers, extensions.workers).model_dump_json())  # slow for many layers
        return Response(text, media_type=JSON)

    @app.get(VERSIONED, **V2, include_in_schema=False, response_model=ModelMetadata)
    @app.get(MODEL, **V2, response_model=ModelMetadata, responses=error_responses(404, 409))
    async def model(name: str) -> ModelMetadata:
        """Inputs and outputs of a model. Like every path of a model, it also exists below /versions/1."""
        return metadata_of(service.registry.find(name, at=""))

    @app.get(f"{VERSIONED}/ready", **V2, include_in_schema=False, response_model=ModelReady)
    @app.get(
        f"{MODEL}/ready",
        **V2,
        response_model=ModelReady,
        responses={503: {"model": ModelReady, "description": "Not ready."}, **error_responses(404, 409)},
    )
    async def model_ready(name: str, response: Response) -> ModelReady:
        """Whether calls to a model are answered. 409 for an unloaded one."""
        service.registry.find(name, at="")
        good = await service.answers()
        response.status_code = 200 if good else 503
        return ModelReady(name=name, ready=good)

    @app.get(f"{VERSIONED}/config", **V2, include_in_schema=False, response_model=ModelConfig)
    @app.get(f"{MODEL}/config", **V2, response_model=ModelConfig, responses=error_responses(404, 409))
    async def config(name: str) -> ModelConfig:
        """Model configuration, as in Triton."""
        return config_of(service.registry.find(name, at=""), service, service.wire_limits.body_bytes)

    @app.get(f"{VERSIONED}/stats", **V2, include_in_schema=False, response_model=Statistics)
    @app.get(f"{MODEL}/stats", **V2, response_model=Statistics, responses=error_responses(404, 409))
    async def statistics(name: str) -> Statistics:
        """How many calls a model has answered, and how long each phase took, since the server started."""
        extensions.require_statistics()
        return statistics_of(service, [service.registry.find(name, at="")], extensions.workers)

    @app.post(
        f"{MODEL}/infer",
        tags=["v2"],
        responses={
            200: {"description": "The outputs asked for.", "content": {JSON: {"schema": schema("InferenceReply")}}},
            **error_responses(400, 404, 409, 413, 415, 429, 500, 503, 504, 507),
        },
        response_model=None,
        openapi_extra=request_body_doc("InferenceRequest", INFER, "Three positions, causal; needs the layer `tiny` of PUT /layers/{name}."),
    )
    async def infer(name: str) -> None:
        """POST /attend in this protocol's form, JSON or with tensors as bytes."""
        raise AssertionError("answered by the hot endpoint")
