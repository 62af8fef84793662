"""The gRPC server: port, methods, health and reflection. It runs on the event loop of the HTTP server, with the same service."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2_grpc

from service.serving.service import Service
from service.web.grpc import reflection
from service.web.grpc.calls import SERVICE, CallContext, Calls
from service.web.grpc.channel import channel_options
from service.web.grpc.health import Health
from service.web.grpc.methods import Methods
from service.web.v2.description import ProtocolExtensions

log = structlog.get_logger("attend")


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """`largest`: bytes of a message; `seconds`: time for a message to arrive; `grace`: seconds for running calls once the gate closes;
    `tls`: files of certificate and key, None for plaintext."""

    largest: int
    seconds: float
    grace: float
    tls: tuple[Path, Path] | None = None


@asynccontextmanager
async def serving(
    service: Service, extensions: ProtocolExtensions, address: str, limits: GrpcLimits, context: CallContext
) -> AsyncIterator[None]:
    """Serves until the service's gate closes or the block ends; then gives running calls `limits.grace` seconds to end."""
    server = grpc.aio.server(options=channel_options(limits.largest, limits.seconds))
    calls = Calls(service, Methods(service, extensions, limits.largest), context, limits.largest, limits.seconds)
    checks = Health(service, frozenset({SERVICE.full_name}), limits.largest, limits.seconds)
    server.add_generic_rpc_handlers((calls.handler(), checks.handler()))
    names = (SERVICE.full_name, health.SERVICE_NAME, reflection.NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.Reflection(service.gate, names, limits.seconds), server)
    if limits.tls is None:
        port = server.add_insecure_port(address)
    else:
        certificate, key = (path.read_bytes() for path in limits.tls)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    log.info("listening for gRPC", address=re.sub(r"\d+$", str(port), address))
    service.gate.add(partial(server.stop, limits.grace))  # together with HTTP, so that the two grace periods do not add up
    try:
        yield
    finally:
        service.stop_admitting()
        await service.gate.closed()
