"""The standard health service, for the whole server and for the one service: serving while a call would be answered.

The library's own, for asyncio, tells only one of those who watch the same name. Who watches is told within `INTERVAL` that readiness fell
or rose, and at once that the door closes; then the stream ends, so that nobody who only watches keeps the server from leaving.
"""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.serving.engine import Engine

INTERVAL = 0.5  # seconds between two looks
STATE = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no annotations
    """One engine's. `names` are those that may be asked for besides the whole server."""

    def __init__(self, engine: Engine, names: frozenset[str]) -> None:
        self.engine, self.names = engine, names | {""}

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # the protocol's name
        """NOT_FOUND for a name that is not served."""
        if request.service not in self.names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'no service "{request.service[:60]}"')
        return STATE(status=await self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """The state at the beginning, and every time it has changed, until the door closes."""
        told = None
        while True:
            last = not self.engine.door.open  # before the state, which the door's closing changes
            if (status := await self._status(request.service)) != told:
                await context.write(STATE(status=status))
                told = status
            if last:
                return
            await self.engine.door.closes_within(INTERVAL)

    async def _status(self, name: str) -> int:
        if name not in self.names:
            return int(STATE.SERVICE_UNKNOWN)
        return int(STATE.SERVING if await self.engine.serves() else STATE.NOT_SERVING)
