"""Forwards a ModelInferRequest to the worker that has its sequence, as `web/forwarding.py` does over HTTP."""

from pathlib import Path

import grpc

from service.errors import DeadlinePassed, WrongWorker
from service.serving.requests import TOO_LATE
from service.serving.service import Service
from service.serving.sessions.placement import GRPC
from service.web.grpc.messages import SERVICE
from service.web.records import CALLER, Record

CALLER_KEY = CALLER.decode()
REQUEST_ID_KEY = "x-request-id"  # in the metadata of each reply of a worker, also of refusals
NOT_FORWARDED = ("user-agent", REQUEST_ID_KEY, CALLER_KEY)


class GrpcForwarder:
    """Sends messages to other workers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._channels: dict[Path, grpc.aio.Channel] = {}

    async def forward(self, method: str, error: WrongWorker, record: Record, metadata: dict[str, str]) -> tuple[bytes, grpc.aio.Metadata]:
        """The reply of the worker that `error` names, and its metadata.

        Raises NotReady if that worker has ended, DeadlinePassed, or AioRpcError with that worker's refusal.
        """
        path, raw = error.socket.with_suffix(GRPC), error.raw
        if path not in self._channels:
            self._channels[path] = grpc.aio.insecure_channel(f"unix:{path}", [("grpc.max_receive_message_length", -1)])
        pairs = [(name, value) for name, value in metadata.items() if name not in NOT_FORWARDED]
        pairs += [(REQUEST_ID_KEY, record.request_id), (CALLER_KEY, raw.caller)]
        timeout = None if raw.deadline is None else max(0.0, raw.deadline - self.service.clock())
        call = self._channels[path].unary_unary(f"/{SERVICE.full_name}/{method}")(raw.body, metadata=pairs, timeout=timeout)
        try:
            reply = await call
        except grpc.aio.AioRpcError as refused:
            if REQUEST_ID_KEY in refused.trailing_metadata():
                raise
            if refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlinePassed(TOO_LATE) from None
            raise error.if_ended from refused
        return reply, await call.trailing_metadata()

    async def close(self) -> None:
        """Closes the connections to other workers."""
        for channel in self._channels.values():
            await channel.close()
