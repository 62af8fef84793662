"""The standard gRPC services: health, for the whole server and for GRPCInferenceService, and reflection.

The health service replies SERVING while calls are answered. The library's asyncio version notifies only one of several watchers of the
same name. Here every watcher gets a change of readiness within `CHECK_INTERVAL` seconds, and immediately when the shutdown gate closes;
then its stream ends, so that watchers do not delay the shutdown. Neither service needs a key, so the numbers of messages, watchers and
reflection streams are limited.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from service.errors import AttendError, MalformedBody
from service.serving.byte_budget import ByteBudget, CallLimit
from service.serving.service import Service, ShutdownGate
from service.serving.streams import MessageReader, with_time_limit
from service.web.errors import grpc_code_of
from service.web.grpc.calls import address_of
from service.web.grpc.messages import POOL, SERVICE

MAX_WATCHES = 256  # streams of the health service's Watch
MAX_KEYLESS = 4  # health messages read at the same time, and reflection streams: neither needs a key
CHECK_INTERVAL = 0.5  # seconds between two checks
CheckResponse = health_pb2.HealthCheckResponse


class Health:
    """The health service. It reports GRPCInferenceService and "", the whole server."""

    names = frozenset({SERVICE.full_name, ""})

    def __init__(self, service: Service, largest: int, seconds: float) -> None:
        self.service = service
        self._reader, self._watches = MessageReader(MAX_KEYLESS, largest, seconds), CallLimit(MAX_WATCHES, "health watches")
        self._budget = ByteBudget(MAX_KEYLESS * largest)  # not the budget of calls: a server that has spent that is still healthy

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
