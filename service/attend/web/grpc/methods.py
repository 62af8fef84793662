"""The methods of GRPCInferenceService. The engine answers calls, as over HTTP; `web/v2` describes models.

ModelInfer takes and returns bytes: the engine decodes and encodes them, large ones outside the event loop.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from attend.errors import LayerNotFound, LayerUnloaded, NotReady
from attend.serving.binding import ATTEND
from attend.serving.byte_budget import Lease
from attend.serving.requests import RawRequest
from attend.serving.service import Service
from attend.web.grpc import messages
from attend.web.grpc.codec import GrpcCodec, values_of
from attend.web.records import Record
from attend.web.v2.description import ProtocolExtensions, config_of, index_of, metadata_of, statistics_of
from attend.web.v2.routes import MODEL_BYTES, STATISTICS_BYTES, load_layer
from attend.wire.codec import Codec
from attend.wire.negotiation import CODECS, JSON
from attend.wire.problems import validate
from attend.wire.v2.members import require_version
from attend.wire.v2.schemas import LoadParameters, UnloadParameters

REQUEST_ID_KEY = "x-request-id"  # in the metadata of each reply, also of refusals


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
        self.codec, self.stream_codec = GrpcCodec(largest), GrpcCodec(largest, stream=True)

    async def server_live(self, request: Any, record: GrpcRecord) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, record: GrpcRecord) -> Any:
        return messages.ServerReadyResponse(ready=await self.service.is_serving_layers())

    async def model_ready(self, request: Any, record: GrpcRecord) -> Any:
        """A missing or unloaded model is not ready; that is no error."""
        try:
            self._layer(request)
        except (LayerNotFound, LayerUnloaded, NotReady):
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
        workers = self.extensions.workers

        def statistics() -> Message:
            return _filled(messages.ModelStatisticsResponse(), statistics_of(self.service, layers, workers))

        return await self.service.engine.run(self._request(record), STATISTICS_BYTES * len(layers), statistics)  # in a thread, as over HTTP

    async def repository_index(self, request: Any, record: GrpcRecord) -> Any:
        layers = self.service.registry.with_unloaded()

        def index() -> Message:
            models = [entry.model_dump() for entry in index_of(layers, request.ready)]
            return messages.RepositoryIndexResponse(models=models)

        return await self.service.engine.run(self._request(record), MODEL_BYTES * len(layers), index)

    async def repository_model_load(self, request: Any, record: GrpcRecord) -> Any:
        self.service.require_started()
        self.extensions.require_writable()
        parameters = validate(LoadParameters, values_of(request.parameters), "/parameters")
        await load_layer(self.service, request.model_name, parameters, self._deadline(record))
        return messages.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any, record: GrpcRecord) -> Any:
        self.service.require_started()
        self.extensions.require_writable()
        validate(UnloadParameters, values_of(request.parameters), "/parameters")
        await self.service.loader.unload(request.model_name, self._deadline(record))
        return messages.RepositoryModelUnloadResponse()

    async def model_infer(self, body: bytes, record: GrpcRecord, codec: Codec | None = None) -> bytes:
        """If the caller cancels or disconnects, gRPC cancels this coroutine, and the scheduler drops the call."""
        self.service.require_started()
        raw = self._request(record, body, codec or self.codec)
        del body  # the engine frees it after decoding
        reply = await self.service.engine.answer(raw, ATTEND)
        record.phases, record.log_fields = reply.phases, reply.log_fields
        message = bytes(reply.pieces[0])
        record.lease.resize(len(message))
        return message

    def _request(self, record: GrpcRecord, body: bytes = b"", codec: Codec = CODECS[JSON]) -> RawRequest:
        """The request of a call, whose body is empty for the methods that have read their message."""
        lease = record.lease
        deadline = self._deadline(record)
        return RawRequest(body, codec=codec, reply_codec=codec, deadline=deadline, caller=lease.caller, api_key=record.api_key, lease=lease)

    def _deadline(self, record: GrpcRecord) -> float | None:
        """The deadline on the service's clock: the earlier one of the client's and the server's; None without either."""
        timeouts = [seconds for seconds in (record.seconds_left, self.service.timeout) if seconds is not None]
        return self.service.clock() + min(timeouts) if timeouts else None

    def _layer(self, request: Any) -> Any:
        self.service.require_started()
        require_version(request.version)
        return self.service.registry.find(request.name, at="/name")


def _filled(message: Message, reply: Any) -> Message:
    """Fills `message` from a Pydantic model with the same members. The message has no `response_stats`, which is always empty."""
    return ParseDict(reply.model_dump(exclude_none=True, exclude={"model_stats": {"__all__": {"response_stats"}}}), message)
