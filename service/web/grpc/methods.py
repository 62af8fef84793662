"""The methods of GRPCInferenceService. The engine answers calls, as over HTTP; `web/v2` describes models.

ModelInfer takes and returns bytes: the engine decodes and encodes them, large ones outside the event loop. If another worker has the
session of a call, `GrpcForwarder` sends the message to that worker, as `web/forwarding.py` does over HTTP.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from service.errors import DeadlinePassed, LayerNotFound, LayerUnloaded, WrongWorker
from service.serving.byte_budget import Lease
from service.serving.engine import ATTEND
from service.serving.requests import TOO_LATE, RawRequest
from service.serving.service import Service
from service.serving.sessions.placement import GRPC
from service.web.grpc import messages
from service.web.grpc.codec import GrpcCodec, values_of
from service.web.grpc.messages import SERVICE
from service.web.records import CALLER_HEADER, Record
from service.web.v2.description import ProtocolExtensions, config_of, index_of, metadata_of, statistics_of
from service.web.v2.routes import load_layer, unload_layer
from service.wire.codec import Codec
from service.wire.problems import validate
from service.wire.v2.members import require_version
from service.wire.v2.schemas import LoadParameters, UnloadParameters

CALLER_KEY = CALLER_HEADER.decode()
REQUEST_ID_KEY = "x-request-id"  # in the metadata of each reply of a worker, also of refusals
NOT_FORWARDED = ("user-agent", REQUEST_ID_KEY, CALLER_KEY)
LAST_REPLY_SECONDS = 1.0  # until a connection to a worker that has ended is closed while replies of that worker are being read


@dataclass(slots=True, kw_only=True)
class GrpcRecord(Record):
    """The metadata of a gRPC call, and how the call ended."""

    metadata: Mapping[str, str]
    seconds_left: float | None  # until the client's deadline; None: no deadline
    trailing: list[tuple[str, str]]  # metadata of the reply
    lease: Lease = field(init=False)  # bytes in memory; set once the caller is known
    code: grpc.StatusCode = grpc.StatusCode.OK


Method = Callable[[Any, GrpcRecord], Awaitable[Any]]


class Methods:
    """The methods of one service, named as in the protocol, in snake case. Each takes a request and the record of the call. Replies have
    at most `largest` bytes."""

    def __init__(self, service: Service, extensions: ProtocolExtensions, largest: int) -> None:
        self.service, self.extensions, self.largest = service, extensions, largest
        self.forwarder = GrpcForwarder(service)
        self.codec, self.stream_codec = GrpcCodec(largest), GrpcCodec(largest, stream=True)

    async def server_live(self, request: Any, record: GrpcRecord) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, record: GrpcRecord) -> Any:
        return messages.ServerReadyResponse(ready=await self.service.is_serving_layers())

    async def model_ready(self, request: Any, record: GrpcRecord) -> Any:
        """A missing or unloaded model is not ready; that is no error."""
        try:
            self._layer(request)
        except (LayerNotFound, LayerUnloaded):
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=await self.service.is_answering())

    async def server_metadata(self, request: Any, record: GrpcRecord) -> Any:
        return _filled(messages.ServerMetadataResponse(), self.extensions.metadata())

    async def model_metadata(self, request: Any, record: GrpcRecord) -> Any:
        return _filled(messages.ModelMetadataResponse(), metadata_of(self._layer(request)))

    async def model_config(self, request: Any, record: GrpcRecord) -> Any:
        config = config_of(self._layer(request), self.service, self.largest)
        return messages.ModelConfigResponse(config=_filled(messages.ModelConfig(), config))

    async def model_statistics(self, request: Any, record: GrpcRecord) -> Any:
        """Statistics of one model, or without a name of all models."""
        self.extensions.require_statistics()
        layers = [self._layer(request)] if request.name else self.service.registry.all()
        return _filled(messages.ModelStatisticsResponse(), statistics_of(self.service, layers, self.extensions.workers))

    async def repository_index(self, request: Any, record: GrpcRecord) -> Any:
        models = [entry.model_dump() for entry in index_of(self.service.registry.documents(), request.ready)]
        return messages.RepositoryIndexResponse(models=models)

    async def repository_model_load(self, request: Any, record: GrpcRecord) -> Any:
        self.extensions.require_writable()
        await load_layer(self.service, request.model_name, validate(LoadParameters, values_of(request.parameters), "/parameters"))
        return messages.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any, record: GrpcRecord) -> Any:
        self.extensions.require_writable()
        validate(UnloadParameters, values_of(request.parameters), "/parameters")
        await unload_layer(self.service, request.model_name)
        return messages.RepositoryModelUnloadResponse()

    async def model_infer(self, body: bytes, record: GrpcRecord, codec: Codec | None = None) -> bytes:
        """If the caller cancels or disconnects, gRPC cancels this coroutine, and the scheduler drops the call."""
        self.service.require_started()
        codec = codec or self.codec
        timeouts = [seconds for seconds in (record.seconds_left, self.service.timeout) if seconds is not None]
        deadline = self.service.clock() + min(timeouts) if timeouts else None
        raw = RawRequest(body, codec, reply_codec=codec, deadline=deadline, caller=record.lease.caller, key=record.key, lease=record.lease)
        del body  # the engine frees it after decoding
        try:
            reply = await self.service.engine.answer(raw, ATTEND)
        except WrongWorker as error:
            if record.from_worker:  # never forwarded twice
                raise
            method = "ModelStreamInfer" if codec is self.stream_codec else "ModelInfer"
            message, trailing = await self.forwarder.forward(method, error, record, dict(record.metadata))
            record.forwarded, record.trailing = True, list(trailing)
            return message
        record.phases, record.log_fields = reply.phases, reply.log_fields
        message = bytes(reply.pieces[0])
        record.lease.resize(len(message))
        return message

    def _layer(self, request: Any) -> Any:
        require_version(request.version)
        return self.service.registry.find(request.name, at="/name")


def _filled(message: Message, document: Any) -> Message:
    """Fills `message` from a Pydantic model with the same members. The message has no `response_stats`, which is always empty."""
    return ParseDict(document.model_dump(exclude_none=True, exclude={"model_stats": {"__all__": {"response_stats"}}}), message)


class GrpcForwarder:
    """Sends messages to other workers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._channels: dict[Path, grpc.aio.Channel] = {}

    async def forward(self, method: str, error: WrongWorker, record: Record, metadata: dict[str, str]) -> tuple[bytes, grpc.aio.Metadata]:
        """The reply of the worker that `error` names, and its metadata.

        Raises NotReady if that worker has ended, DeadlinePassed, or AioRpcError with that worker's refusal.
        """
        socket, raw = error.socket, error.raw
        if socket not in self._channels:
            await self._close_ended()
        if socket not in self._channels:  # no other request has opened it meanwhile
            path = socket.with_suffix(GRPC)
            self._channels[socket] = grpc.aio.insecure_channel(f"unix:{path}", [("grpc.max_receive_message_length", -1)])
        pairs = [(name, value) for name, value in metadata.items() if name not in NOT_FORWARDED]
        pairs += [(REQUEST_ID_KEY, record.request_id), (CALLER_KEY, raw.caller)]
        timeout = None if raw.deadline is None else max(0.0, raw.deadline - self.service.clock())
        call = self._channels[socket].unary_unary(f"/{SERVICE.full_name}/{method}")(raw.body, metadata=pairs, timeout=timeout)
        try:
            reply = await call
        except grpc.aio.AioRpcError as refused:
            if REQUEST_ID_KEY in refused.trailing_metadata():
                raise
            if refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlinePassed(TOO_LATE) from None
            raise error.if_ended from refused
        return reply, await call.trailing_metadata()

    async def _close_ended(self) -> None:
        """Closes the connections to workers that have ended."""
        for ended in [socket for socket in self._channels if not socket.exists()]:
            await self._channels.pop(ended).close(LAST_REPLY_SECONDS)

    async def close(self) -> None:
        """Closes the connections to other workers."""
        for channel in self._channels.values():
            await channel.close()
