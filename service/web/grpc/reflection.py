"""The standard reflection service. It needs no key, so only a few streams may be open; they end when idle or when the gate closes."""

from collections.abc import AsyncIterator
from typing import Any

from grpc_reflection.v1alpha import reflection

from service.errors import AttendError
from service.serving.admission import CallLimit
from service.serving.lifecycle import ShutdownGate
from service.serving.streams import in_time
from service.web.grpc.channel import KEYLESS, address_of
from service.web.grpc.codes import code_of

NAME = reflection.SERVICE_NAME


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the library has no annotations
    """The library's service; a stream ends when `gate` closes; it is aborted if no request arrives within `seconds`."""

    def __init__(self, gate: ShutdownGate, names: tuple[str, ...], seconds: float) -> None:
        super().__init__(names)
        self.gate, self.seconds, self._streams = gate, seconds, CallLimit(KEYLESS, "reflection streams")

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers each request, until the client ends the stream or the gate closes."""
        try:
            with self._streams.place(address_of(context.peer())):
                questions = self.gate.until_closed(in_time(request_iterator, self.seconds))
                async for reply in super().ServerReflectionInfo(questions, context):
                    yield reply
        except AttendError as refusal:
            await context.abort(code_of(refusal), refusal.detail)
