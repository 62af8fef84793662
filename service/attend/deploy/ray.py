"""The application on Ray Serve: `serve run attend.deploy.ray:app`, with settings from the same ATTEND_… variables.

A replica is the application of `web/app.py`, behind Ray's proxy. To stop a replica, Ray sends it no new calls and waits for the accepted
ones. With `shards`, a call that is too large for one replica is divided by keys among that many actors, each with all layers; the replica
merges their results: see `serving/shards.py`. If an actor or a node fails, its part is computed again.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attend.attention.call import Call, Result
from attend.cli.logs import configure_logs
from attend.deploy.session_router import SessionRouter
from attend.errors import AttendError, CapacityError, NotReady
from attend.serving.cost import Cost
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.shards import find_layer
from attend.serving.threads import prepare_torch
from attend.settings import Settings, read_settings
from attend.web.app import create_app, create_service

ATTEMPTS = 5  # to compute one part, if actors fail
WHY_FIXED = "layers cannot be changed over HTTP under Ray Serve, whose replicas share none; set them with ATTEND_LAYERS"
PAUSE = 0.2  # seconds of pause after the first failed attempt; n times as many after the nth


@serve.deployment
@serve.ingress()
class Attend:
    """A replica: the application of these settings."""

    def __init__(self, settings: Settings, shards: DeploymentHandle | None = None) -> None:
        _prepare(settings)
        self._app = create_app(_behind_proxy(settings), why_fixed=WHY_FIXED)
        self._service = self._app.state.service
        if shards is not None:
            self._service.engine.use_shards(RayShards(shards, settings.shards))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _Pickled(self._app)

    async def check_health(self) -> None:
        """Raises NotReady; Ray calls this and replaces a replica for which it raises."""
        if not await self._service.is_answering():
            raise NotReady("the layers could not be loaded, or the device does not answer")


@serve.deployment
class Shard:
    """An actor with all layers, which computes parts of calls, one at a time."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        _prepare(settings)
        self._service = create_service(settings)
        await self._service.start(settings.all_layers())

    async def compute(self, name: str, fingerprint: str, part: Call, cost: Cost) -> Result:
        """The result of a part. Raises LayerNotFound; LayerConflict if the actor's layer of that name has another fingerprint."""
        layer = find_layer(self._service.registry, name, fingerprint)
        return (await self._service.scheduler.submit(Prepared(layer, part, cost))).result

    async def check_health(self) -> None:
        if not await self._service.is_answering():
            raise NotReady("the device does not answer")


class RayShards:
    """The actors that compute parts for `serving/shards.py`. Each part is sent to a free actor, and to another one if that fails."""

    def __init__(self, handle: DeploymentHandle, count: int) -> None:
        self.handle, self.count = handle, count

    async def compute(self, layer: LoadedLayer, parts: Sequence[Call], cost: Cost) -> list[Result]:
        """The result of each part. Raises what a shard raised, or CapacityError if all attempts fail."""
        return await asyncio.gather(*(self._compute_part(layer, part, cost) for part in parts))

    async def _compute_part(self, layer: LoadedLayer, part: Call, cost: Cost) -> Result:
        failed = 0
        while True:
            try:
                result: Result = await self.handle.compute.remote(layer.name, layer.fingerprint, part, cost)
                return result
            except (RayError, RayServeException) as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, AttendError):
                    raise cause from None
                failed += 1
                if failed == ATTEMPTS:
                    raise CapacityError("the shards for this call have failed; others are being started") from error
                await asyncio.sleep(PAUSE * failed)


class _Pickled:
    """The application with messages that can be pickled for Ray's proxy, another process: bytes instead of memory views.

    It removes the header x-request-id, because the proxy adds one to every reply.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def copied(message: Message) -> None:
            if isinstance(message.get("body"), memoryview):
                message = {**message, "body": bytes(message["body"])}
            elif message["type"] == "http.response.start":
                message = {**message, "headers": [pair for pair in message["headers"] if pair[0] != b"x-request-id"]}
            await send(message)

        await self.app(scope, receive, copied)


def build(settings: Settings) -> serve.Application:
    """The Serve application of these settings."""
    resources = {"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus}
    stop_seconds = settings.drain_seconds + settings.shutdown_seconds
    shards = None
    if settings.shards > 1:
        shards = Shard.options(  # type: ignore[attr-defined]  # the decorator made a Deployment of it
            num_replicas=settings.shards, max_ongoing_requests=1, ray_actor_options=resources, graceful_shutdown_timeout_s=stop_seconds
        ).bind(settings)
    scaling = {"min_replicas": min(2, settings.replicas), "max_replicas": settings.replicas, "target_ongoing_requests": 8}
    application: serve.Application = Attend.options(  # type: ignore[attr-defined]  # the decorator made a Deployment of it
        autoscaling_config=scaling,
        max_ongoing_requests=1000,
        ray_actor_options=resources,
        graceful_shutdown_timeout_s=stop_seconds,
        request_router_config=RequestRouterConfig(request_router_class=SessionRouter) if settings.session_memory else RequestRouterConfig(),
    ).bind(settings, shards)
    return application


def _behind_proxy(settings: Settings) -> Settings:
    """The settings for one of several processes, behind a proxy that everyone may reach."""
    name = serve.get_replica_context().replica_id.unique_id  # by which `SessionRouter` finds the replica of a session
    given: dict[str, Any] = {"workers": max(2, settings.workers), "host": "0.0.0.0", "replica_name": name}
    return settings.model_copy(update=given)


def _prepare(settings: Settings) -> None:
    """Sets up the process as `attend serve` does."""
    threads = settings.threads or max(1, int(settings.replica_cpus))
    prepare_torch(threads)
    torch.set_num_threads(threads)
    configure_logs(settings.log_format, settings.log_level)


def __getattr__(name: str) -> Any:
    """`app`, built on first access, so that importing this module reads no settings."""
    if name == "app":
        return build(read_settings({}))
    raise AttributeError(name)
