"""What an operator asks: health, metrics, and the index."""

from typing import Any

from fastapi import FastAPI, Response

from service import __version__
from service.serving.engine import Engine

CONTRACT = "1"  # of the wire; it changes when a caller would have to


def install(app: FastAPI, engine: Engine, about: dict[str, Any]) -> None:
    """Adds the routes; `about` is what the index tells beside the layers."""

    @app.get("/", tags=["operation"], response_model=dict[str, Any])
    async def index() -> dict[str, Any]:
        """Version, threads, limits, layers."""
        layers = [layer.name for layer in engine.catalogue.all()]
        return {"name": "attend", "version": __version__, "contract": CONTRACT, **about, "layers": layers, "documentation": "/docs"}

    @app.get("/health/live", tags=["operation"], response_model=dict[str, bool])
    async def live() -> dict[str, bool]:
        """The process answers."""
        return {"live": True}

    @app.get(
        "/health/ready",
        tags=["operation"],
        response_model=dict[str, bool],
        responses={503: {"model": dict[str, bool], "description": "Not ready."}},
    )
    async def ready(response: Response) -> dict[str, bool]:
        """Every configured layer is loaded and warm, and the device computes: a tiny call does, if nothing else has just done."""
        ready = await engine.answers()
        response.status_code = 200 if ready else 503
        return {"ready": ready}

    @app.get(
        "/health/startup",
        tags=["operation"],
        response_model=dict[str, bool],
        responses={503: {"model": dict[str, bool], "description": "Still starting."}},
    )
    async def startup(response: Response) -> dict[str, bool]:
        """Starting is over; probes of readiness and liveness may begin."""
        response.status_code = 200 if engine.started else 503
        return {"started": engine.started}

    @app.get("/metrics", tags=["operation"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        engine.sample()
        return Response(engine.metrics.text(), media_type=engine.metrics.content_type)
