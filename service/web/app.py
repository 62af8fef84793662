"""Builds the application of one process from its settings: service, routes, checks, telemetry and gRPC server."""

import ipaddress
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from service.errors import Forbidden, LayerConflict, NotReady
from service.serving.admission import ServingLimits
from service.serving.scheduler import QueueLimits
from service.serving.service import Service, open_service
from service.serving.sessions.placement import Place, Workers, default_replica
from service.serving.sessions.registry import SessionRegistry
from service.settings import Settings
from service.web import openapi
from service.web.access import Access, Application
from service.web.forwarding import Forwarder
from service.web.guard import Guard
from service.web.keys import Keyring
from service.web.routes import attend, health, layers, page, sessions
from service.web.telemetry import Telemetry, endpoint_labels, start_telemetry
from service.web.v2 import routes as v2
from service.web.v2.description import ProtocolExtensions
from service.wire.limits import WireLimits
from service.wire.native import numbers


def create_app(settings: Settings, private_socket: Path | None = None) -> FastAPI:
    """The application. Once it runs, it loads its layers in the background; /health/ready reports when they are ready.

    `private_socket`: the path of the Unix socket on which other workers forward requests to this process, if there are several.
    """
    keyring = Keyring(settings.keys_file) if settings.keys_file else None
    service = create_service(settings, private_socket)
    forwarder = Forwarder(service, settings.keepalive_timeout)
    extensions = ProtocolExtensions(
        why_not_writable=_why_not_writable(settings),
        why_no_statistics=_why_no_statistics(settings, service),
        sessions=settings.session_memory > 0,
        workers=settings.workers,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with _grpc(settings, service, extensions, keyring, telemetry):
            if settings.workers > 1:  # load before accepting connections: after a restart, the other workers answer
                await service.begin(settings.all_layers())
                if service.failed:  # the log says why
                    raise NotReady("the layers could not be loaded")
            else:
                service.begin(settings.all_layers())
            yield {"service": service}
            await forwarder.close()
        service.close()
        if telemetry is not None:
            telemetry.close()

    telemetry = start_telemetry(service) if settings.telemetry else None
    app = Application(
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=openapi.operation_id,
    )
    attend.install(app, service)
    layers.install(app, service, extensions.require_writable)
    sessions.install(app, service, forwarder)
    page.install_words(app, service, model=settings.workers == 1)  # a layer loaded on demand would exist in one worker only
    v2.install(app, service, extensions)
    page.install(app, service, _index_members(settings, service))
    health.install(app, service)
    app.state.service = service
    openapi.install(app)
    label, guard = endpoint_labels(app.routes), _guard(settings, keyring)
    app.access = Access(app.call_route, service, settings.access_log, label, forwarder, guard, telemetry)
    if origins := _comma_separated(settings.cors_origins):
        exposed = ["X-Request-Id", "Server-Timing", "Retry-After"]
        app.access = CORSMiddleware(app.access, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    return app


def create_service(settings: Settings, private_socket: Path | None = None) -> Service:
    """The service with these settings; it has no layers yet."""
    wire = WireLimits(settings.max_body_bytes, settings.max_layer_bytes, settings.max_depth, settings.max_tensors)
    limits = ServingLimits(**{field.name: getattr(settings, field.name) for field in fields(ServingLimits)})
    queue = QueueLimits(settings.max_queue_operations, settings.max_queue_bytes, settings.batch_delay)
    service = open_service(settings.device, wire, limits, queue, settings.max_batch_calls, settings.layers_dir)
    if settings.session_memory:
        service.engine.sessions = _session_registry(settings, service, private_socket)
    service.compress, service.timeout = settings.compress_replies, settings.request_timeout
    service.probe.timeout = settings.ready_timeout
    return service


def _session_registry(settings: Settings, service: Service, private_socket: Path | None) -> SessionRegistry:
    """The sessions of this process: the place that their ids name, and the memory for them, which the workers share equally."""
    replica = settings.replica_name or default_replica(f"{socket.gethostname()}:{settings.port}")
    if private_socket is None:
        place, memory, workers = Place(replica, 0, int(1000 * time.time()) % 2**32), settings.session_memory, None
    else:
        workers = Workers(private_socket, settings.workers)
        place, memory = Place(replica, *workers.number_and_epoch), settings.session_memory // settings.workers
    shared = settings.keys_file is not None
    return SessionRegistry(service.registry, service.metrics, memory, place, shared, workers=workers)


def _grpc(
    settings: Settings, service: Service, extensions: ProtocolExtensions, keyring: Keyring | None, telemetry: Telemetry | None
) -> AbstractAsyncContextManager[None]:
    """A context manager that runs the gRPC server; it does nothing without `grpc_port`."""
    if settings.grpc_port is None:
        return nullcontext()
    from service.web.grpc.calls import GrpcOptions  # needs the extra `grpc`
    from service.web.grpc.server import run_grpc_server

    address = f"[{settings.host}]:{settings.grpc_port}" if ":" in settings.host else f"{settings.host}:{settings.grpc_port}"
    tls = None if settings.tls_cert is None or settings.tls_key is None else (settings.tls_cert, settings.tls_key)
    options = GrpcOptions(
        largest=min(settings.max_grpc_bytes, settings.max_body_bytes),
        seconds=settings.client_timeout,
        grace=settings.shutdown_seconds,
        tls=tls,
        log_requests=settings.access_log,
        keyring=keyring,
        telemetry=telemetry,
    )
    return run_grpc_server(service, extensions, address, options)


def _why_not_writable(settings: Settings) -> Exception | None:
    """Why layers cannot be changed over HTTP here, as the error to raise; None if they can."""
    if not is_local(settings) and settings.keys_file is None:
        where = "a Unix socket, which every user can reach" if settings.uds else "an address that is not loopback"
        return Forbidden(f"layers cannot be changed over HTTP on {where}, unless there are keys (--keys-file)")
    if settings.workers > 1 and settings.layers_dir is None:
        return LayerConflict(
            "with several workers, layers can be changed over HTTP only with --layers-dir, through which the workers share them"
        )
    return None


def _why_no_statistics(settings: Settings, service: Service) -> Exception | None:
    """Why there are no model statistics here, as the error to raise; None if there are."""
    if settings.workers > 1 and not service.metrics.shared:
        return LayerConflict("there are no model statistics: with several workers they need a shared folder, and this server has none")
    return None


def _guard(settings: Settings, keyring: Keyring | None) -> Guard | None:
    """The guard that these settings require; None if they require no check."""
    names = frozenset(_comma_separated(settings.allowed_hosts.lower()))
    open_to_browsers = is_local(settings) and keyring is None  # any page open in a browser on this machine can reach the server
    hosts = names if (names or open_to_browsers) and "*" not in names else None
    return Guard(hosts, _comma_separated(settings.cors_origins), keyring) if hosts is not None or keyring is not None else None


def _comma_separated(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def is_local(settings: Settings) -> bool:
    """Whether the server listens on a loopback address, which only this machine can reach."""
    try:
        return settings.uds is None and ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        return settings.uds is None and settings.host == "localhost"


def _index_members(settings: Settings, service: Service) -> dict[str, Any]:
    """The members of the JSON index that depend on the settings."""
    return {
        "workers": settings.workers,
        "threads": service.threads,
        "device": service.device,
        "json_numbers": numbers.variant(),
        "limits": {name: getattr(settings, name) for name in Settings.model_fields if name.startswith("max_") or name == "session_memory"},
    }
