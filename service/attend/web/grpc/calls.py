"""Handlers of GRPCInferenceService: check keys and limits, read messages, and log, count and trace every call.

The gRPC library delivers a message only when it is complete. Until a handler reads, the library buffers at most a window of the message
(`server.py`); while a handler reads, up to the largest message. So each handler reads its message itself, after it has checked the key, and
only a few read at the same time, each counted as the largest message (`serving/streams.py`). The progress of a message is not visible, so
the time limit is for all of it.
"""

import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from attend.errors import AttendError, CallerGone, MalformedBody, NotReady, Overloaded, TooLarge
from attend.serving.byte_budget import Lease
from attend.serving.fair_share import FairShare
from attend.serving.service import Service
from attend.serving.streams import PreviousSent, answer_stream, message_reader, without_frames
from attend.web.access_log import AccessLog
from attend.web.error_replies import recorded_error
from attend.web.errors import retry_after, row_of
from attend.web.grpc.codec import refusal_in_stream
from attend.web.grpc.descriptors import SERVICE
from attend.web.grpc.methods import REQUEST_ID_KEY, GrpcRequest, Method, Methods
from attend.web.guard import require_key
from attend.web.keys import Keyring
from attend.web.requests import valid_request_id
from attend.web.telemetry import OpenSpan

SERVER_FAULTS = {  # the codes that OpenTelemetry's conventions count as errors of the server
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
STREAM_METHOD = "ModelStreamInfer"
MAX_CALLS = 1024  # at the same time
MAX_STREAMS = 32  # of ModelStreamInfer, also idle ones; each may be receiving a message at any time
MAX_IN_FLIGHT = 16  # requests of one stream answered at the same time; the next is read later
MAX_KEYLESS = 4  # health messages read at the same time, and reflection streams: neither needs a key
MAX_PLAIN_MESSAGE = 1 << 20  # largest message without tensors, in bytes
MAX_DETAIL_BYTES = 4000  # largest error message, in bytes: it is sent in a header, and clients accept 8192 bytes of headers


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """Limits of messages and calls; encryption, logging, authentication and tracing."""

    largest: int  # bytes of a message
    seconds: float  # for a message to arrive
    grace: float  # seconds for running calls once the gate closes
    memory: int  # resident bytes of the process; above, it ends
    scopes: Mapping[str, frozenset[str]]  # method -> scopes of which a key needs one; empty: no key is needed
    access_log: AccessLog
    tls: tuple[Path, Path] | None = None  # files of certificate and key; None: plaintext
    keyring: Keyring | None = None  # clients send the key in the metadata, named as in HTTP


class CallHandlers:
    """The handlers of all methods."""

    def __init__(self, service: Service, methods: Methods, options: GrpcOptions) -> None:
        self.service, self.methods, self.options = service, methods, options
        self._reader = message_reader(service.budget, options.largest, options.seconds)
        self._calls, self._streams = FairShare[str](MAX_CALLS, times=1, least=1), FairShare[str](MAX_STREAMS, times=1, least=1)

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers to register. Unary methods are handled as streams of one message, which are the same on the wire."""
        handlers: dict[str, Any] = {STREAM_METHOD: self._stream}
        for name in SERVICE.methods_by_name:
            if name != STREAM_METHOD:
                handlers[name] = partial(self._unary, name, self._method(name))
        return grpc.method_handlers_generic_handler(
            SERVICE.full_name,
            {name: grpc.stream_stream_rpc_method_handler(partial(_handle, handler)) for name, handler in handlers.items()},
        )

    def _method(self, name: str) -> Method:
        """The method of that name; it takes and returns serialized messages."""
        method: Method = getattr(self.methods, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        message_class = GetMessageClass(SERVICE.methods_by_name[name].input_type)

        async def call(message: bytes, request: GrpcRequest) -> bytes:
            if len(message) > MAX_PLAIN_MESSAGE:
                raise TooLarge.where("", f"a message of at most {MAX_PLAIN_MESSAGE} bytes", str(len(message)))
            try:
                read = message_class.FromString(message)
            except DecodeError:
                raise MalformedBody.where("", f"a {message_class.DESCRIPTOR.name}", f"{len(message)} bytes of something else") from None
            return bytes((await method(read, request)).SerializeToString())

        return method if name == "ModelInfer" else call

    async def _unary(self, name: str, method: Method, _: Any, context: Any) -> None:
        """Handles any method but ModelStreamInfer. A request without fields is not read."""
        request = self._request_of(context)
        with self._observed(name, request):
            self._identify(name, request, context)
            with self._calls.slot(request.caller, "calls"), Lease(self.service.budget, request.caller) as lease:
                request.lease = lease
                has_message = bool(SERVICE.methods_by_name[name].input_type.fields)
                reply = await method(await self._reader.read(context.read, lease) if has_message else b"", request)
                context.set_trailing_metadata(tuple(request.trailing))
                await _send(context, reply)
        await _abort_failed(context, request)

    async def _stream(self, _: Any, context: Any) -> None:
        """ModelStreamInfer: replies to each request, in order. Each request counts as a call; a failed one does not end the stream.
        The stream itself is logged only if it is refused or fails."""
        request = self._request_of(context)
        try:
            self._identify(STREAM_METHOD, request, context)
            with self._streams.slot(request.caller, "streams"):
                await self._replies(request, context)
        except* AttendError as errors:
            with self._observed(STREAM_METHOD, request):
                raise errors.exceptions[0] from None
        await _abort_failed(context, request)

    async def _replies(self, stream: GrpcRequest, context: Any) -> None:
        """Answers a stream's requests until the client ends it or its connection is lost; an idle stream stays open, as in Triton."""

        async def reply(message: bytes, previous_sent: PreviousSent) -> None:
            request, written = self._request_of(context), b""
            request.caller, request.api_key = stream.caller, stream.api_key
            with Lease(self.service.budget, stream.caller) as request.lease:
                with self._observed(STREAM_METHOD, request):
                    request.lease.add(len(message))
                    written = await self.methods.model_infer(message, request, self.methods.stream_codec)
                if request.reason:
                    written = refusal_in_stream(message, request.detail)
                await previous_sent()
                await _send(context, written)

        await answer_stream(context.read, reply, self.service.gate, MAX_IN_FLIGHT)

    def _identify(self, name: str, request: GrpcRequest, context: Any) -> None:
        """Write the name of the caller's key, or the caller's address, into the request. Raises Unauthenticated or Forbidden."""
        if self.options.keyring is not None:
            request.api_key = require_key(self.options.keyring, request.metadata, self.options.scopes[name])
        request.caller = request.api_key or address_of(context.peer())

    def _request_of(self, context: Any) -> GrpcRequest:
        """The call of this context, whose deadline is the earlier one of the client's and the server's."""
        metadata = dict(context.invocation_metadata())
        request_id = valid_request_id(metadata.get(REQUEST_ID_KEY))
        timeouts = [seconds for seconds in (context.time_remaining(), self.service.timeout) if seconds is not None]
        deadline = self.service.clock() + min(timeouts) if timeouts else None
        return GrpcRequest(id=request_id, deadline=deadline, metadata=metadata, trailing=[(REQUEST_ID_KEY, request_id)])

    @contextmanager
    def _observed(self, name: str, request: GrpcRequest) -> Iterator[None]:
        """Counts, logs and traces the call that the `with` block answers. Writes an exception into the request and swallows it."""
        full_name, service, telemetry = f"{SERVICE.full_name}/{name}", self.service, self.options.access_log.telemetry
        started = service.clock()
        span = None if telemetry is None else telemetry.begin_call(full_name, request.metadata)
        if span is not None:
            request.trailing.append(("traceresponse", span.traceparent))
        request.code, request.reason = grpc.StatusCode.CANCELLED, "CallerGone"  # unless set below
        try:
            yield
            request.code, request.reason = grpc.StatusCode.OK, ""
        except Exception as raised:
            _write_error(recorded_error(raised, request, method=name), request)  # no variable: it would keep the tensors of the call
        finally:
            self._log_call(full_name, request, span, service.clock() - started)

    def _log_call(self, full_name: str, request: GrpcRequest, span: OpenSpan | None, seconds: float) -> None:
        metrics, access_log = self.service.metrics, self.options.access_log
        metrics.count_request(full_name, request.code.name)
        if request.reason:
            metrics.count_failure(request.reason)
        if access_log.telemetry is not None and span is not None:
            access_log.telemetry.end_call(span, full_name, request.code.name, request, request.code in SERVER_FAULTS, seconds)
        if access_log.log_requests:
            access_log.write(request, seconds, method=full_name, status=request.code.name)


async def _handle(handler: Callable[[Any, Any], Coroutine[Any, Any, None]], request: Any, context: Any) -> None:
    """Let a handler answer a call. The library cancels it if its client leaves."""
    await without_frames(handler(request, context))


def _write_error(error: AttendError, request: GrpcRequest) -> None:
    request.code, request.detail = grpc.StatusCode[row_of(type(error)).code], truncated_detail(error.detail)
    if isinstance(error, Overloaded | NotReady):
        request.trailing.append(("retry-after", retry_after(error)))


async def _abort_failed(context: Any, request: GrpcRequest) -> None:
    if request.reason:
        await context.abort(request.code, request.detail, tuple(request.trailing))


async def abort(context: Any, refusal: AttendError) -> None:
    """Ends a call of a standard service with the code and the detail of a refusal."""
    await context.abort(grpc.StatusCode[row_of(type(refusal)).code], refusal.detail)


async def _send(context: Any, reply: bytes) -> None:
    """Sends the reply. Raises CallerGone if the client has disconnected."""
    try:
        await context.write(reply)
    except (grpc.aio.UsageError, grpc.aio.InternalError):
        raise CallerGone from None


def address_of(peer: str) -> str:
    """The address without its port: `ipv4:127.0.0.1:5000` -> `127.0.0.1`, `ipv6:%5B::1%5D:5000` -> `::1`, `unix:` -> ``."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def truncated_detail(detail: str) -> str:
    """The message, cut to MAX_DETAIL_BYTES bytes as gRPC encodes it: each byte that is not printable ASCII becomes three
    (percent-encoding). Lone surrogates are escaped."""
    detail = detail.encode(errors="backslashreplace").decode()
    size = 0
    for i, character in enumerate(detail):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if size > MAX_DETAIL_BYTES:
            return detail[:i]
    return detail
