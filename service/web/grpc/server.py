"""The gRPC server: options, port, methods, health and reflection. It runs on the event loop of the HTTP server, with the same service."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import structlog
from grpc_reflection.v1alpha import reflection_pb2_grpc

from service.serving.service import Service
from service.serving.sessions.placement import GRPC
from service.web.grpc.calls import MAX_CALLS, CallHandlers, GrpcOptions
from service.web.grpc.methods import Methods
from service.web.grpc.standard_services import Health, Reflection
from service.web.v2.description import ProtocolExtensions

WINDOW_BYTES = 64 * 1024  # bytes of an unread message that HTTP/2's flow control admits
MAX_CONNECTIONS = 1024
MAX_CONNECTION_AGE_MS = 3600 * 1000  # until a client has to reconnect; after as many again its old connection is closed
log = structlog.get_logger("attend")


def server_options(largest: int, seconds: float) -> list[tuple[str, int]]:
    """Options of `grpc.aio.server`: message sizes, connections, and timeouts for dead peers."""
    milliseconds = max(1, round(seconds * 1000))
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),  # the size of a reply is checked before it is computed
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        ("grpc.http2.bdp_probe", 0),  # the probe would enlarge the window of unread messages
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.write_buffer_size", 0),  # a write completes only when the connection has taken it
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", MAX_CONNECTION_AGE_MS),
    ]


@asynccontextmanager
async def run_grpc_server(service: Service, extensions: ProtocolExtensions, address: str, options: GrpcOptions) -> AsyncIterator[None]:
    """Serves until the service's gate closes or the block ends; then gives running calls `options.grace` seconds to end."""
    largest, seconds = options.largest, options.seconds
    server = grpc.aio.server(options=server_options(largest, seconds))
    methods = Methods(service, extensions, largest)
    calls = CallHandlers(service, methods, options)
    checks = Health(service, largest, seconds)
    server.add_generic_rpc_handlers((calls.handler(), checks.handler()))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(service.gate, seconds), server)
    if options.tls is None:
        port = server.add_insecure_port(address)
    else:
        certificate, key = (path.read_bytes() for path in options.tls)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    sessions = service.engine.sessions
    if sessions is not None and sessions.workers is not None:
        server.add_insecure_port(f"unix:{sessions.workers.own.with_suffix(GRPC)}")
    await server.start()
    log.info("listening for gRPC", address=re.sub(r"\d+$", str(port), address))
    service.gate.add(partial(server.stop, options.grace))  # together with HTTP, so that the two grace periods do not add up
    try:
        yield
    finally:
        service.stop_admitting()
        await service.gate.closed()
        await methods.forwarder.close()
