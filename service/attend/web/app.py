"""Builds the application of one process from its settings: service, routes, checks, telemetry and gRPC server."""

import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from attend.errors import Forbidden, LayerConflict, NotReady
from attend.limits import QueueLimits, ServingLimits, WireLimits
from attend.serving.memory import default_limit
from attend.serving.service import NO_PAGES, Service, ServiceOptions, open_service
from attend.serving.sessions.ids import default_replica, new_process
from attend.serving.sessions.registry import SessionRegistry
from attend.settings import Settings
from attend.web import replies
from attend.web.access_log import AccessLog
from attend.web.application import Application
from attend.web.connections import OPTIONS_KEY, ConnectionOptions
from attend.web.cors import Cors
from attend.web.guard import Guard
from attend.web.keys import Keyring
from attend.web.requests import Handler
from attend.web.slow_peers import SlowPeerTimer
from attend.web.telemetry import start_telemetry
from attend.web.v2.description import ProtocolExtensions
from attend.wire.native import numbers

T = TypeVar("T", WireLimits, ServingLimits, QueueLimits)


def create_app(
    settings: Settings, pages: Mapping[str, str] = NO_PAGES, clock: Callable[[], float] = time.monotonic, why_fixed: str = ""
) -> Application:
    """The application. Once it runs, it loads its layers in the background; /health/ready reports when they are ready, and the log, with
    `pages`. `clock` returns monotonic seconds, as that of its event loop does. `why_fixed`: why layers cannot be changed over HTTP,
    whatever the settings say; "": they can."""
    keyring = Keyring(settings.keys_file) if settings.keys_file else None
    service = create_service(settings, clock)
    extensions = ProtocolExtensions(
        why_not_writable=_why_not_writable(settings, why_fixed),
        why_no_statistics=_why_no_statistics(settings, service),
        sessions=settings.session_memory > 0,
        workers=settings.workers,
    )

    @asynccontextmanager
    async def lifespan(app: Application) -> AsyncIterator[dict[str, Any]]:
        if settings.workers > 1:  # load before accepting connections, over HTTP or gRPC: meanwhile the other workers answer
            await service.begin(settings.all_layers(), pages)
            if service.failed:  # the log says why
                raise NotReady("the layers could not be loaded")
        async with _grpc(settings, service, extensions, app.table.grpc_scopes(), keyring, access_log):
            if settings.workers == 1:
                service.begin(settings.all_layers(), pages)
            yield {"service": service, OPTIONS_KEY: connections}
        service.close()
        if telemetry is not None:
            telemetry.close()

    telemetry = start_telemetry(service) if settings.telemetry else None
    access_log = AccessLog(service.metrics, settings.access_log, telemetry)
    timer = SlowPeerTimer(settings.client_timeout, settings.min_client_rate)
    connections = ConnectionOptions(timer, service.metrics, access_log.refusal)
    middleware = partial(_middleware, settings, keyring, access_log)
    return Application(service, extensions, _index_members(settings, service), middleware, lifespan)


def _middleware(settings: Settings, keyring: Keyring | None, access_log: AccessLog, handle: Handler) -> Handler:
    """What every request passes before `handle`: the last line first."""
    names = frozenset(_comma_separated(settings.allowed_hosts.lower()))
    open_to_browsers = settings.is_local and keyring is None  # any page open in a browser on this machine can reach the server
    hosts = names if (names or open_to_browsers) and "*" not in names else None
    origins = _comma_separated(settings.cors_origins)
    if hosts is not None or keyring is not None:
        handle = Guard(handle, hosts, origins, keyring)
    if origins:
        handle = Cors(handle, origins)
    return replies.around(access_log.around(handle))


def create_service(settings: Settings, clock: Callable[[], float] = time.monotonic) -> Service:
    """The service with these settings; it has no layers yet."""
    service = open_service(settings.device, service_options(settings), clock)
    if settings.session_memory:
        service.engine.sessions = _session_registry(settings, service)
    return service


def section(kind: type[T], settings: Settings) -> T:
    """The limits of one kind, as the settings have them."""
    return kind(**{name: value for name, value in settings if name in kind.__dataclass_fields__})


def service_options(settings: Settings) -> ServiceOptions:
    """What the service takes from the settings."""
    limits = section(ServingLimits, settings)
    if settings.grpc_port is not None:  # a process that needs too much memory ends: no call may need so much
        limits = replace(limits, max_memory_bytes=min(limits.max_memory_bytes, _resident_limit(settings) // 2))
    return ServiceOptions(
        wire_limits=section(WireLimits, settings),
        limits=limits,
        queue=section(QueueLimits, settings),
        max_buffered_bytes=settings.max_buffered_bytes,
        batch_calls=settings.max_batch_calls,
        layers_dir=settings.layers_dir,
        compress=settings.compress_replies,
        timeout=settings.request_timeout,
        ready_timeout=settings.ready_timeout,
    )


def _resident_limit(settings: Settings) -> int:
    """The resident bytes above which a process with a gRPC port ends."""
    return settings.max_resident_bytes or default_limit(settings.workers)


def _session_registry(settings: Settings, service: Service) -> SessionRegistry:
    """The sessions of this process, whose ids have the name of the replica."""
    process = new_process(settings.replica_name or default_replica(f"{socket.gethostname()}:{settings.port}"))
    several_owners = settings.keys_file is not None
    return SessionRegistry(service.registry, service.metrics, settings.session_memory, process, several_owners, service.clock)


def _grpc(
    settings: Settings,
    service: Service,
    extensions: ProtocolExtensions,
    scopes: Mapping[str, frozenset[str]],
    keyring: Keyring | None,
    access_log: AccessLog,
) -> AbstractAsyncContextManager[None]:
    """A context manager that runs the gRPC server; it does nothing without `grpc_port`."""
    if settings.grpc_port is None:
        return nullcontext()
    from attend.web.grpc.calls import GrpcOptions  # needs the extra `grpc`
    from attend.web.grpc.server import run_grpc_server

    address = f"[{settings.host}]:{settings.grpc_port}" if ":" in settings.host else f"{settings.host}:{settings.grpc_port}"
    tls = None if settings.tls_cert is None or settings.tls_key is None else (settings.tls_cert, settings.tls_key)
    options = GrpcOptions(
        largest=min(settings.max_grpc_bytes, settings.max_body_bytes),
        seconds=settings.client_timeout,
        grace=settings.shutdown_seconds,
        memory=_resident_limit(settings),
        tls=tls,
        access_log=access_log,
        keyring=keyring,
        scopes=scopes,
    )
    return run_grpc_server(service, extensions, address, options)


def _why_not_writable(settings: Settings, why_fixed: str) -> Callable[[], Exception] | None:
    """Makes the error that says why layers cannot be changed over HTTP here; None if they can."""
    if why_fixed:
        return partial(LayerConflict, why_fixed)
    if not settings.is_local and settings.keys_file is None:
        where = "a Unix socket, which every user can reach" if settings.uds else "an address that is not loopback"
        return partial(Forbidden, f"layers cannot be changed over HTTP on {where}, unless there are keys (--keys-file)")
    if settings.workers > 1 and settings.layers_dir is None:
        return partial(
            LayerConflict,
            "with several workers, layers can be changed over HTTP only with --layers-dir, through which the workers share them",
        )
    return None


def _why_no_statistics(settings: Settings, service: Service) -> Callable[[], Exception] | None:
    """Makes the error that says why there are no model statistics here; None if there are."""
    if settings.workers > 1 and not service.metrics.shared:
        reason = "there are no model statistics: with several workers they need a shared folder, and this server has none"
        return partial(LayerConflict, reason)
    return None


def _comma_separated(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def _index_members(settings: Settings, service: Service) -> dict[str, Any]:
    """The members of the JSON index that depend on the settings."""
    return {
        "workers": settings.workers,
        "threads": service.threads,
        "device": service.device,
        "json_numbers": numbers.variant(),
        "limits": {
            **{name: getattr(settings, name) for name in Settings.model_fields if name.startswith("max_") or name == "session_memory"},
            "max_memory_bytes": service.limits.max_memory_bytes,
            "max_buffered_bytes": service.budget.capacity,
        },
    }
