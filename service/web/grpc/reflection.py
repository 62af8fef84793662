"""The standard reflection service, which wants no key: few streams at once, which end when they are idle, and when the gate closes."""

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
    """The library's own, beside a gate. `seconds` is how long a question may take to come."""

    def __init__(self, gate: ShutdownGate, names: tuple[str, ...], seconds: float) -> None:
        super().__init__(names)
        self.gate, self.seconds, self._streams = gate, seconds, CallLimit(KEYLESS, "reflection streams")

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """An answer to each question, until there are no more, or the gate closes."""
        try:
            with self._streams.place(address_of(context.peer())):
                questions = self.gate.until_closed(in_time(request_iterator, self.seconds))
                async for reply in super().ServerReflectionInfo(questions, context):
                    yield reply
        except AttendError as refusal:
            await context.abort(code_of(refusal), refusal.detail)
