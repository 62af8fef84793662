"""The standard health service, for the whole server and for the one service: serving while a call would be answered.

The library's own, for asyncio, notifies only one of several watchers of the same name. Here every watcher is sent a change of readiness
within `INTERVAL`, and the closing of the gate at once; then the stream ends, so that watchers do not keep the server alive. No key is
needed, so messages and watchers are bounded.
"""

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from service.errors import AttendError, MalformedBody
from service.serving.admission import ByteBudget, CallLimit, ReceivingTurns
from service.serving.service import Service
from service.web.grpc.channel import KEYLESS, WATCHES, address_of
from service.web.grpc.codes import code_of

INTERVAL = 0.5  # seconds between two looks
STATE = health_pb2.HealthCheckResponse


class Health:
    """The health service. `names` are the services that it knows besides the whole server, which is ""."""

    def __init__(self, service: Service, names: frozenset[str], largest: int, seconds: float) -> None:
        self.service, self.names = service, names | {""}
        self._turns, self._watches = ReceivingTurns(KEYLESS, largest, seconds), CallLimit(WATCHES, "health watches")
        self._budget = ByteBudget(KEYLESS * largest)  # of its own: a server full of calls is a healthy one

    def handler(self) -> grpc.GenericRpcHandler:
        """For the server. Each method reads its message itself."""
        methods = {"Check": self.check, "Watch": self.watch}
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        )

    async def check(self, _: Any, context: Any) -> None:
        """NOT_FOUND for a name that is not served."""
        name = await self._name(context)
        if name not in self.names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'no service "{name[:60]}"')
        await self._send(context, await self._status(name))

    async def watch(self, _: Any, context: Any) -> None:
        """The state at the beginning, and every time it has changed, until the gate closes."""
        try:
            with self._watches.place(address_of(context.peer())):
                await self._watch(context)
        except AttendError as refusal:
            await context.abort(code_of(refusal), refusal.detail)

    async def _watch(self, context: Any) -> None:
        name, sent = await self._name(context), None
        while True:
            last = not self.service.gate.open  # before the state, which the gate's closing changes
            if (status := await self._status(name)) != sent:
                await self._send(context, status)
                sent = status
            if last:
                return
            await self.service.gate.closes_within(INTERVAL)

    async def _name(self, context: Any) -> str:
        """The name of the service in the request."""
        try:
            with self._budget.lease(address_of(context.peer())) as lease:
                message = await self._turns.receive(context.read, lease)
            return str(health_pb2.HealthCheckRequest.FromString(message).service)
        except DecodeError:
            refusal: AttendError = MalformedBody.where("", "a HealthCheckRequest", f"{len(message)} bytes of something else")
        except AttendError as error:
            refusal = error
        await context.abort(code_of(refusal), refusal.detail)
        raise AssertionError("ended by abort")

    async def _send(self, context: Any, status: int) -> None:
        await context.write(STATE(status=status).SerializeToString())

    async def _status(self, name: str) -> int:
        if name not in self.names:
            return int(STATE.SERVICE_UNKNOWN)
        return int(STATE.SERVING if await self.service.serves() else STATE.NOT_SERVING)
