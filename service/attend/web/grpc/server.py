"""The gRPC server: options, port, methods, and the standard services health and reflection.

It runs on the event loop of the HTTP server, with the same service.

The library keeps a header block that never ends, before it calls any handler, and has no option to bound it. So the process ends by itself
when its memory exceeds a limit: gRPC's connections are closed at once, accepted HTTP requests are answered.
"""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import structlog

from attend.serving.memory import MemoryWatch
from attend.serving.service import Service
from attend.web.grpc.calls import MAX_CALLS, CallHandlers, GrpcOptions
from attend.web.grpc.health import Health
from attend.web.grpc.methods import Methods
from attend.web.grpc.reflection import Reflection
from attend.web.v2.description import ProtocolExtensions

WINDOW_BYTES = 64 * 1024  # bytes of an unread message that HTTP/2's flow control lets through
MAX_CONNECTIONS = 1024
MAX_CONNECTION_AGE_MS = 3600 * 1000  # until a client has to reconnect; its old connection is closed after as many milliseconds again
CLOSE_SECONDS = 2.0  # for connections to close when the server stops; the library waits without end for one that floods it with headers
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
    checks, reflection = Health(service, largest, seconds), Reflection(service.gate, seconds)
    server.add_generic_rpc_handlers((calls.handler(), checks.handler(), *reflection.handlers()))
    if options.tls is None:
        port = server.add_insecure_port(address)
    else:
        certificate, key = (path.read_bytes() for path in options.tls)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    log.info("listening for gRPC", address=re.sub(r"\d+$", str(port), address))
    exceeded = False

    async def stop() -> None:
        grace = 0 if exceeded else options.grace  # 0: every call is cancelled and every connection closed at once
        with suppress(TimeoutError):
            async with service.until(service.clock() + grace + CLOSE_SECONDS):
                await server.stop(grace)

    def end_process(used: int) -> None:
        nonlocal exceeded
        exceeded = True
        log.error("memory limit exceeded: this process ends", resident_bytes=used, max_resident_bytes=options.memory)
        service.refuse_requests()
        os.kill(os.getpid(), signal.SIGTERM)

    service.gate.add(stop)  # together with HTTP, so that the two grace periods do not add up
    watch = MemoryWatch(options.memory, end_process)
    try:
        yield
    finally:
        watch.close()
        service.refuse_requests()
        await service.gate.closed()
