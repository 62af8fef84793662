"""The gRPC server: options, port, methods, and the standard services health and reflection.

It runs on the event loop of the HTTP server, with the same service.

The health service replies SERVING while calls are answered. The library's asyncio version notifies only one of several watchers of the
same name. Here every watcher gets a change of readiness within `CHECK_INTERVAL` seconds, and immediately when the shutdown gate closes;
then its stream ends, so that watchers do not delay the shutdown. Neither standard service needs a key, so the numbers of their messages,
watchers and reflection streams are limited.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from service.errors import AttendError, MalformedBody
from service.serving.byte_budget import ByteBudget, CallLimit
from service.serving.service import Service, ShutdownGate
from service.serving.sessions.placement import GRPC
from service.serving.streams import MessageReader, with_time_limit
from service.web.errors import grpc_code_of
from service.web.grpc.calls import MAX_CALLS, CallHandlers, GrpcOptions, address_of
from service.web.grpc.messages import POOL, SERVICE
from service.web.grpc.methods import Methods
from service.web.v2.description import ProtocolExtensions

WINDOW_BYTES = 64 * 1024  # bytes of an unread message that HTTP/2's flow control admits
MAX_CONNECTIONS = 1024
MAX_CONNECTION_AGE_MS = 3600 * 1000  # until a client has to reconnect; its old connection is closed after as many milliseconds again
MAX_WATCHES = 256  # streams of the health service's Watch
MAX_KEYLESS = 4  # health messages read at the same time, and reflection streams: neither needs a key
CHECK_INTERVAL = 0.5  # seconds between two checks of readiness
CheckResponse = health_pb2.HealthCheckResponse
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


class Health:
    """The health service. It reports GRPCInferenceService and "", the whole server."""

    names = frozenset({SERVICE.full_name, ""})

    def __init__(self, service: Service, largest: int, seconds: float) -> None:
        self.service = service
        self._reader, self._watches = MessageReader(MAX_KEYLESS, largest, seconds), CallLimit(MAX_WATCHES, "health watches")
        self._budget = ByteBudget(MAX_KEYLESS * largest)  # not the service's budget: a server without free budget is still healthy

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers to register. Each reads its message itself."""
        methods = {"Check": partial(self._answer, self._check), "Watch": partial(self._answer, self._watch)}
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        )

    async def _answer(self, method: Callable[[Any], Awaitable[None]], _: Any, context: Any) -> None:
        try:
            await method(context)
        except AttendError as refusal:
            await _abort(context, refusal)

    async def _check(self, context: Any) -> None:
        """Sends the state of the named service. Aborts with NOT_FOUND for an unknown name."""
        name = await self._name(context)
        if name not in self.names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'no service "{name[:60]}"')
        await self._send(context, await self._status(name))

    async def _watch(self, context: Any) -> None:
        """Sends the current state and every change of it, until the gate closes."""
        with self._watches.slot(address_of(context.peer())):
            name, sent = await self._name(context), None
            while True:
                last = not self.service.gate.open  # read before the status, which changes when the gate closes
                if (status := await self._status(name)) != sent:
                    await self._send(context, status)
                    sent = status
                if last:
                    return
                await self.service.gate.closes_within(CHECK_INTERVAL)

    async def _name(self, context: Any) -> str:
        """The name of the service in the request. Raises MalformedBody, or as `MessageReader.read`."""
        with self._budget.lease(address_of(context.peer())) as lease:
            message = await self._reader.read(context.read, lease)
        try:
            return str(health_pb2.HealthCheckRequest.FromString(message).service)
        except DecodeError:
            raise MalformedBody.where("", "a HealthCheckRequest", f"{len(message)} bytes of something else") from None

    async def _send(self, context: Any, status: int) -> None:
        await context.write(CheckResponse(status=status).SerializeToString())

    async def _status(self, name: str) -> int:
        if name not in self.names:
            return int(CheckResponse.SERVICE_UNKNOWN)
        return int(CheckResponse.SERVING if await self.service.is_serving_layers() else CheckResponse.NOT_SERVING)


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the library has no annotations
    """The library's service; a stream ends when `gate` closes; it is aborted if no request arrives within `seconds`."""

    def __init__(self, gate: ShutdownGate, seconds: float) -> None:
        super().__init__((SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), POOL)
        self.gate, self.seconds, self._streams = gate, seconds, CallLimit(MAX_KEYLESS, "reflection streams")

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers each request, until the client ends the stream or the gate closes."""
        try:
            with self._streams.slot(address_of(context.peer())):
                requests = self.gate.until_closed(with_time_limit(request_iterator, self.seconds))
                async for reply in super().ServerReflectionInfo(requests, context):
                    yield reply
        except AttendError as refusal:
            await _abort(context, refusal)


async def _abort(context: Any, refusal: AttendError) -> None:
    await context.abort(grpc.StatusCode[grpc_code_of(refusal)], refusal.detail)
