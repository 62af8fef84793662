"""The gRPC server: port, methods, health and reflection. It runs on the event loop of the HTTP server, with the same service."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import structlog
from grpc_reflection.v1alpha import reflection_pb2_grpc

from service.serving.service import Service
from service.web.grpc.calls import SERVICE, CallHandlers, GrpcOptions
from service.web.grpc.channel import channel_options
from service.web.grpc.methods import Methods
from service.web.grpc.standard_services import NAMES, Health, Reflection
from service.web.v2.description import ProtocolExtensions

log = structlog.get_logger("attend")


@asynccontextmanager
async def run_grpc_server(service: Service, extensions: ProtocolExtensions, address: str, options: GrpcOptions) -> AsyncIterator[None]:
    """Serves until the service's gate closes or the block ends; then gives running calls `options.grace` seconds to end."""
    largest, seconds = options.largest, options.seconds
    server = grpc.aio.server(options=channel_options(largest, seconds))
    calls = CallHandlers(service, Methods(service, extensions, largest), options)
    checks = Health(service, frozenset({SERVICE.full_name}), largest, seconds)
    server.add_generic_rpc_handlers((calls.handler(), checks.handler()))
    names = (SERVICE.full_name, *NAMES)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(service.gate, names, seconds), server)
    if options.tls is None:
        port = server.add_insecure_port(address)
    else:
        certificate, key = (path.read_bytes() for path in options.tls)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    log.info("listening for gRPC", address=re.sub(r"\d+$", str(port), address))
    service.gate.add(partial(server.stop, options.grace))  # together with HTTP, so that the two grace periods do not add up
    try:
        yield
    finally:
        service.stop_admitting()
        await service.gate.closed()
