"""The methods of GRPCInferenceService. The engine answers calls, as over HTTP; `web/v2` describes models.

ModelInfer takes and returns bytes: the engine decodes and encodes them, large ones outside the event loop.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from attend.errors import LayerNotFound, LayerUnloaded, NotReady
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.service import Service
from attend.web.grpc import messages
from attend.web.grpc.codec import grpc_codec, values_of
from attend.web.v2.description import ProtocolExtensions, config_of, index_of, metadata_of, statistics_of
from attend.web.v2.routes import MODEL_BYTES, STATISTICS_BYTES, load_layer
from attend.wire.codec import Codec
from attend.wire.problems import validate
from attend.wire.v2.members import require_version
from attend.wire.v2.schemas import LoadParameters, UnloadParameters

REQUEST_ID_KEY = "x-request-id"  # in the metadata of each reply, also of refusals


@dataclass(slots=True, kw_only=True, eq=False)
class GrpcRequest(Request):
    """A gRPC call: its metadata, and how it ended. `calls.py` changes the code, `reason` and `detail`."""

    metadata: Mapping[str, str]
    trailing: list[tuple[str, str]]  # metadata of the reply
    code: grpc.StatusCode = grpc.StatusCode.OK


Method = Callable[[Any, GrpcRequest], Awaitable[Any]]


class Methods:
    """The methods of one service, named as in the protocol, in snake case. Each takes a message and its call. Replies have
    at most `largest` bytes."""

    def __init__(self, service: Service, extensions: ProtocolExtensions, largest: int) -> None:
        self.service, self.extensions, self.largest = service, extensions, largest
        self.codec, self.stream_codec = grpc_codec(largest), grpc_codec(largest, stream=True)

    async def server_live(self, message: Any, request: GrpcRequest) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(self, message: Any, request: GrpcRequest) -> Any:
        return messages.ServerReadyResponse(ready=await self.service.is_serving_layers())

    async def model_ready(self, message: Any, request: GrpcRequest) -> Any:
        """A missing or unloaded model is not ready; that is no error."""
        try:
            self._layer(message)
        except (LayerNotFound, LayerUnloaded, NotReady):
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=await self.service.is_answering())

    async def server_metadata(self, message: Any, request: GrpcRequest) -> Any:
        return _filled(messages.ServerMetadataResponse(), self.extensions.metadata())

    async def model_metadata(self, message: Any, request: GrpcRequest) -> Any:
        return _filled(messages.ModelMetadataResponse(), metadata_of(self._layer(message)))

    async def model_config(self, message: Any, request: GrpcRequest) -> Any:
        config = config_of(self._layer(message), self.service, self.largest)
        return messages.ModelConfigResponse(config=_filled(messages.ModelConfig(), config))

    async def model_statistics(self, message: Any, request: GrpcRequest) -> Any:
        """Statistics of one model, or without a name of all models."""
        self.extensions.require_statistics()
        layers = [self._layer(message)] if message.name else self.service.registry.all()
        workers = self.extensions.workers

        def statistics() -> Message:
            return _filled(messages.ModelStatisticsResponse(), statistics_of(self.service, layers, workers))

        return await self.service.engine.run(request, STATISTICS_BYTES * len(layers), statistics)  # in a thread, as over HTTP

    async def repository_index(self, message: Any, request: GrpcRequest) -> Any:
        layers = self.service.registry.with_unloaded()

        def index() -> Message:
            models = [entry.model_dump() for entry in index_of(layers, message.ready)]
            return messages.RepositoryIndexResponse(models=models)

        return await self.service.engine.run(request, MODEL_BYTES * len(layers), index)

    async def repository_model_load(self, message: Any, request: GrpcRequest) -> Any:
        self.service.require_started()
        self.extensions.require_writable()
        parameters = validate(LoadParameters, values_of(message.parameters), "/parameters")
        await load_layer(self.service, message.model_name, parameters, request.deadline)
        return messages.RepositoryModelLoadResponse()

    async def repository_model_unload(self, message: Any, request: GrpcRequest) -> Any:
        self.service.require_started()
        self.extensions.require_writable()
        validate(UnloadParameters, values_of(message.parameters), "/parameters")
        await self.service.loader.unload(message.model_name, request.deadline)
        return messages.RepositoryModelUnloadResponse()

    async def model_infer(self, body: bytes, request: GrpcRequest, codec: Codec | None = None) -> bytes:
        """If the caller cancels or disconnects, gRPC cancels this coroutine, and the scheduler drops the call."""
        self.service.require_started()
        request.body, request.codec = body, codec or self.codec
        request.reply_codec = request.codec
        del body  # the engine frees it after decoding
        _, pieces = await self.service.engine.answer(request, ATTEND)
        message = bytes(pieces[0])
        if request.lease is not None:
            request.lease.resize(len(message))
        return message

    def _layer(self, message: Any) -> Any:
        self.service.require_started()
        require_version(message.version)
        return self.service.registry.find(message.name, at="/name")


def _filled(message: Message, reply: Any) -> Message:
    """Fills `message` from a Pydantic model with the same members. The message has no `response_stats`, which is always empty."""
    return ParseDict(reply.model_dump(exclude_none=True, exclude={"model_stats": {"__all__": {"response_stats"}}}), message)
