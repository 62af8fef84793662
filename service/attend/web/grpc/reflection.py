"""The standard reflection service, in the versions `v1` and `v1alpha`, which differ in their names only. It needs no key."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

from attend.errors import AttendError
from attend.serving.fair_share import FairShare
from attend.serving.service import ShutdownGate
from attend.serving.streams import with_time_limit
from attend.web.grpc.calls import MAX_KEYLESS, abort, address_of
from attend.web.grpc.descriptors import POOL, REFLECTION_V1, SERVICE

NAMES = (REFLECTION_V1, reflection.SERVICE_NAME)


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the library has no annotations
    """The library's servicer. A stream ends when `gate` closes, and is aborted if no request arrives within `seconds`."""

    def __init__(self, gate: ShutdownGate, seconds: float) -> None:
        super().__init__((SERVICE.full_name, health.SERVICE_NAME, *NAMES), POOL)
        self.gate, self.seconds, self._streams = gate, seconds, FairShare[str](MAX_KEYLESS, times=1, least=1)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The handlers to register, one for each version."""
        request, reply = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
        method = grpc.stream_stream_rpc_method_handler(self.ServerReflectionInfo, request.FromString, reply.SerializeToString)
        return [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in NAMES]

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers each request, until the client ends the stream or the gate closes."""
        try:
            with self._streams.slot(address_of(context.peer()), "reflection streams"):
                requests = self.gate.until_closed(with_time_limit(request_iterator, self.seconds))
                async for reply in super().ServerReflectionInfo(requests, context):
                    yield reply
        except AttendError as refusal:
            await abort(context, refusal)
