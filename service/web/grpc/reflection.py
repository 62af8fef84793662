"""The standard reflection service, whose streams end when the door closes: who asks what there is must not keep the server from leaving."""

from collections.abc import AsyncIterator
from typing import Any

from grpc_reflection.v1alpha import reflection

from service.serving.door import Door

NAME = reflection.SERVICE_NAME


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the library has no annotations
    """The library's own, beside a door."""

    def __init__(self, door: Door, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.door = door

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """An answer to each question, until there are no more, or the door closes."""
        async for reply in super().ServerReflectionInfo(self.door.until_closed(request_iterator), context):
            yield reply
