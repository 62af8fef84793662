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
from attend.serving.fair_share import FairShare
from attend.serving.service import Service
from attend.serving.streams import PreviousSent, answer_stream, message_reader, without_frames
from attend.web.access_log import AccessLog, recorded_error
from attend.web.errors import retry_after, row_of
from attend.web.grpc.codec import refusal_in_stream
from attend.web.grpc.descriptors import SERVICE
from attend.web.grpc.methods import REQUEST_ID_KEY, GrpcRecord, Method, Methods
from attend.web.guard import require_key
from attend.web.keys import Keyring
from attend.web.records import valid_request_id
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

        async def call(message: bytes, record: GrpcRecord) -> bytes:
            if len(message) > MAX_PLAIN_MESSAGE:
                raise TooLarge.where("", f"a message of at most {MAX_PLAIN_MESSAGE} bytes", str(len(message)))
            try:
                request = message_class.FromString(message)
            except DecodeError:
                raise MalformedBody.where("", f"a {message_class.DESCRIPTOR.name}", f"{len(message)} bytes of something else") from None
            return bytes((await method(request, record)).SerializeToString())

        return method if name == "ModelInfer" else call

    async def _unary(self, name: str, method: Method, _: Any, context: Any) -> None:
        """Handles any method but ModelStreamInfer. A request without fields is not read."""
        record = _record_of(context)
        with self._observed(name, record):
            caller = self._caller(name, record, context)
            with self._calls.slot(caller, "calls"), self.service.budget.lease(caller) as record.lease:
                has_message = bool(SERVICE.methods_by_name[name].input_type.fields)
                reply = await method(await self._reader.read(context.read, record.lease) if has_message else b"", record)
                context.set_trailing_metadata(tuple(record.trailing))
                await _send(context, reply)
        await _abort_failed(context, record)

    async def _stream(self, _: Any, context: Any) -> None:
        """ModelStreamInfer: replies to each request, in order. Each request counts as a call; a failed one does not end the stream.
        The stream itself is logged only if it is refused or fails."""
        record = _record_of(context)
        try:
            caller = self._caller(STREAM_METHOD, record, context)
            with self._streams.slot(caller, "streams"):
                await self._replies(caller, record.api_key, context)
        except* AttendError as errors:
            with self._observed(STREAM_METHOD, record):
                raise errors.exceptions[0] from None
        await _abort_failed(context, record)

    async def _replies(self, caller: str, key: str, context: Any) -> None:
        """Answers a stream's requests until the client ends it or its connection is lost; an idle stream stays open, as in Triton."""

        async def reply(message: bytes, previous_sent: PreviousSent) -> None:
            record, written = _record_of(context, key), b""
            with self.service.budget.lease(caller) as record.lease:
                with self._observed(STREAM_METHOD, record):
                    record.lease.add(len(message))
                    written = await self.methods.model_infer(message, record, self.methods.stream_codec)
                if record.reason:
                    written = refusal_in_stream(message, record.detail)
                await previous_sent()
                await _send(context, written)

        await answer_stream(context.read, reply, self.service.gate, MAX_IN_FLIGHT)

    def _caller(self, name: str, record: GrpcRecord, context: Any) -> str:
        """The name of the caller's key, or the caller's address. Raises Unauthenticated or Forbidden."""
        if self.options.keyring is not None:
            record.api_key = require_key(self.options.keyring, record.metadata, self.options.scopes[name])
        return record.api_key or address_of(context.peer())

    @contextmanager
    def _observed(self, name: str, record: GrpcRecord) -> Iterator[None]:
        """Counts, logs and traces the call that the `with` block answers. Writes an exception into the record and swallows it."""
        full_name, service, telemetry = f"{SERVICE.full_name}/{name}", self.service, self.options.access_log.telemetry
        started = service.clock()
        span = None if telemetry is None else telemetry.begin_call(full_name, record.metadata)
        if span is not None:
            record.trailing.append(("traceresponse", span.traceparent))
        record.code, record.reason = grpc.StatusCode.CANCELLED, "CallerGone"  # unless set below
        try:
            yield
            record.code, record.reason = grpc.StatusCode.OK, ""
        except Exception as raised:
            _write_error(recorded_error(raised, record, method=name), record)  # no variable: it would keep the tensors of the call
        finally:
            self._log_call(full_name, record, span, service.clock() - started)

    def _log_call(self, full_name: str, record: GrpcRecord, span: OpenSpan | None, seconds: float) -> None:
        metrics, access_log = self.service.metrics, self.options.access_log
        metrics.count_request(full_name, record.code.name)
        if record.reason:
            metrics.count_failure(record.reason)
        if access_log.telemetry is not None and span is not None:
            access_log.telemetry.end_call(span, full_name, record.code.name, record, record.code in SERVER_FAULTS, seconds)
        if access_log.log_requests:
            access_log.write(record, seconds, method=full_name, status=record.code.name)


async def _handle(handler: Callable[[Any, Any], Coroutine[Any, Any, None]], request: Any, context: Any) -> None:
    """Let a handler answer a call. The library cancels it if its client leaves."""
    await without_frames(handler(request, context))


def _record_of(context: Any, key: str = "") -> GrpcRecord:
    metadata = dict(context.invocation_metadata())
    request_id = valid_request_id(metadata.get(REQUEST_ID_KEY))
    trailing = [(REQUEST_ID_KEY, request_id)]
    return GrpcRecord(request_id, api_key=key, metadata=metadata, seconds_left=context.time_remaining(), trailing=trailing)


def _write_error(error: AttendError, record: GrpcRecord) -> None:
    record.code, record.detail = grpc.StatusCode[row_of(type(error)).code], truncated_detail(error.detail)
    if isinstance(error, Overloaded | NotReady):
        record.trailing.append(("retry-after", retry_after(error)))


async def _abort_failed(context: Any, record: GrpcRecord) -> None:
    if record.reason:
        await context.abort(record.code, record.detail, tuple(record.trailing))


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
