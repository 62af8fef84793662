"""GET /health/live, /health/ready, /health/startup and /metrics, for operators."""

from typing import Any

from starlette.responses import JSONResponse, Response

from attend.web.endpoints import METRICS, PUBLIC, TIMED, EndpointTable
from attend.web.request_reader import begin_without_body
from attend.web.requests import HttpRequest

LAYER_BYTES = 200  # of the lines of a layer in the metrics, roughly
ROUTE_OPTIONS: dict[str, Any] = {"tags": ["operation"], "response_model": dict[str, bool], "any_query": True}
endpoints = EndpointTable()


@endpoints.add("GET", "/health/live", PUBLIC, **ROUTE_OPTIONS)
async def live(request: HttpRequest) -> Response:
    """The process is alive."""
    return JSONResponse({"live": True})


@endpoints.add("GET", "/health/ready", PUBLIC, **ROUTE_OPTIONS, responses={503: {"model": dict[str, bool], "description": "Not ready."}})
async def ready(request: HttpRequest) -> Response:
    """200 if all configured layers are loaded and warmed up and the device answers a small test call (skipped after a recent call)."""
    ready = await request.service.is_answering()
    return JSONResponse({"ready": ready}, 200 if ready else 503)


@endpoints.add(
    "GET", "/health/startup", PUBLIC, **ROUTE_OPTIONS, responses={503: {"model": dict[str, bool], "description": "Still starting."}}
)
async def startup(request: HttpRequest) -> Response:
    """Starting is over; probes of readiness and liveness may begin."""
    return JSONResponse({"started": request.service.started}, 200 if request.service.started else 503)


@endpoints.add(
    "GET",
    "/metrics",
    METRICS,
    any_query=True,
    tags=["operation"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
    refusals=TIMED,
)
async def metrics(request: HttpRequest) -> Response:
    """Prometheus metrics."""
    service = request.service
    service.sample()
    begin_without_body(request)
    size = LAYER_BYTES * len(service.registry)
    # in a thread: it has lines for each layer, and several workers read the files of all
    return Response(await service.engine.run(request, size, service.metrics.text), media_type=service.metrics.content_type)
