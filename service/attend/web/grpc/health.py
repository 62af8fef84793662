"""The standard health service, which needs no key. It reports SERVING while calls are answered.

The library's asyncio version notifies only one of several watchers of the same name, and has no `List`. Here every watcher gets a change
of readiness within `CHECK_INTERVAL` seconds, and immediately when the shutdown gate closes; then its stream ends, so that watchers do not
delay the shutdown. The numbers of messages and watchers are limited.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from attend.errors import AttendError, MalformedBody
from attend.serving.byte_budget import ByteBudget, Lease
from attend.serving.fair_share import FairShare
from attend.serving.service import Service
from attend.serving.streams import MessageReader
from attend.web.grpc.calls import MAX_KEYLESS, abort, address_of
from attend.web.grpc.descriptors import HEALTH_LIST, SERVICE

MAX_WATCHES = 256  # streams of Watch
CHECK_INTERVAL = 0.5  # seconds between two checks of readiness
CheckResponse = health_pb2.HealthCheckResponse


class Health:
    """The methods Check, List and Watch. The services are GRPCInferenceService and "", the whole server."""

    names = frozenset({SERVICE.full_name, ""})

    def __init__(self, service: Service, largest: int, seconds: float) -> None:
        self.service = service
        self._reader, self._watches = MessageReader(MAX_KEYLESS, largest, seconds), FairShare[str](MAX_WATCHES, times=1, least=1)
        self._budget = ByteBudget(MAX_KEYLESS * largest)  # not the service's budget: a server without free budget is still healthy

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers to register. Each reads its message itself."""
        methods = {"Check": self._check, "List": self._list, "Watch": self._watch}
        handlers = {name: grpc.stream_stream_rpc_method_handler(partial(self._answer, method)) for name, method in methods.items()}
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    async def _answer(self, method: Callable[[Any], Awaitable[None]], _: Any, context: Any) -> None:
        try:
            await method(context)
        except AttendError as refusal:
            await abort(context, refusal)

    async def _check(self, context: Any) -> None:
        """Sends the state of the named service. Aborts with NOT_FOUND for an unknown name."""
        name = await self._name(context)
        if name not in self.names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'no service "{name[:60]}"')
        await self._send(context, await self._status(name))

    async def _list(self, context: Any) -> None:
        """Sends the states of all services."""
        await self._name(context)
        reply = HEALTH_LIST()
        for name in self.names:
            reply.statuses[name].status = await self._status(name)
        await context.write(reply.SerializeToString())

    async def _watch(self, context: Any) -> None:
        """Sends the current state and every change of it, until the gate closes."""
        with self._watches.slot(address_of(context.peer()), "health watches"):
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
        """The name of the service in the request, "" if it names none. Raises MalformedBody, or as `MessageReader.read`."""
        with Lease(self._budget, address_of(context.peer())) as lease:
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
