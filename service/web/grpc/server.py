"""The gRPC server: its port, its methods' wrapping, health and reflection. On the event loop of the HTTP server, with the same engine."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from service.errors import AttendError, Overloaded
from service.serving.engine import Engine
from service.web.access import milliseconds, request_id
from service.web.grpc import reflection
from service.web.grpc.codes import code_of
from service.web.grpc.health import Health
from service.web.grpc.inference_pb2 import DESCRIPTOR
from service.web.grpc.methods import Heard, Method, Methods
from service.web.guard import ADMIN, ANY, demand_key
from service.web.keys import Keyring
from service.web.telemetry import Telemetry, Told
from service.web.v2.description import Offer

SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"]
SCOPES = {  # of the keys that open a method, where not any does
    "ServerLive": frozenset[str](),
    "ServerReady": frozenset[str](),
    "ModelInfer": frozenset({"infer"}),
    "RepositoryModelLoad": ADMIN,
    "RepositoryModelUnload": ADMIN,
}
OUR_FAULT = {  # as OpenTelemetry's conventions count on a server's side
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
DETAIL = 4000  # bytes of a refusal: they travel in a header, of which clients take 8192
log = structlog.get_logger("attend")


@asynccontextmanager
async def serving(
    engine: Engine,
    offer: Offer,
    address: str,
    largest: int,
    grace: float,
    log_requests: bool,
    keyring: Keyring | None = None,
    tls: tuple[Path, Path] | None = None,
    traces: Telemetry | None = None,
) -> AsyncIterator[None]:
    """Listens until the engine's door closes, or the block ends; then takes no more calls, and gives those it has taken `grace` seconds.

    Messages may have `largest` bytes. With a `keyring` a call brings its key as over HTTP, in the metadata;
    with `tls`, a certificate's file and its key's, only TLS is spoken.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", largest), ("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE.full_name, _handlers(engine, Methods(engine, offer), log_requests, keyring, traces)),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(Health(engine, frozenset({SERVICE.full_name})), server)
    names = (SERVICE.full_name, health.SERVICE_NAME, reflection.NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.Reflection(engine.door, names), server)
    if tls is None:
        port = server.add_insecure_port(address)
    else:
        certificate, key = (path.read_bytes() for path in tls)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    log.info("listening for gRPC", address=re.sub(r"\d+$", str(port), address))
    engine.door.add(partial(server.stop, grace))  # with HTTP's, so that what one has in hand is not waited for after what the other has
    try:
        yield
    finally:
        engine.close_door()
        await engine.door.closed()


def fitting(detail: str) -> str:
    """As much of a refusal as fits. In a header what is no printable ASCII takes three bytes for each of its own; half a surrogate pair
    is escaped."""
    detail = detail.encode(errors="backslashreplace").decode()
    size = 0
    for i, character in enumerate(detail):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if size > DETAIL:
            return detail[:i]
    return detail


def _handlers(engine: Engine, methods: Methods, log_requests: bool, keyring: Keyring | None, traces: Telemetry | None) -> dict[str, Any]:
    """Method name -> gRPC's handler. ModelInfer's messages stay bytes here."""
    handlers = {}
    for name, method in SERVICE.methods_by_name.items():
        words = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        raw = name == "ModelInfer"
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            _answered(engine, name, getattr(methods, words), log_requests, keyring, traces),
            request_deserializer=None if raw else GetMessageClass(method.input_type).FromString,
            response_serializer=None if raw else GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


def _answered(engine: Engine, name: str, method: Method, log_requests: bool, keyring: Keyring | None, traces: Telemetry | None) -> Method:
    """The method with what surrounds every call: its key, its count, its span, its log line, its code, and the net under unforeseen
    exceptions."""
    full_name = f"{SERVICE.full_name}/{name}"

    async def answer(request: Any, context: Any) -> Any:
        started, metadata = engine.clock(), dict(context.invocation_metadata())
        heard = Heard(context.time_remaining(), request_id(metadata.get("x-request-id")))
        trailing = [("x-request-id", heard.request_id)]
        span = None if traces is None else traces.begin_call(full_name, metadata)
        if span is not None:
            trailing.append(("traceresponse", span.in_words))
        context.set_trailing_metadata(tuple(trailing))
        code, detail, reason = grpc.StatusCode.CANCELLED, "", "CallerGone"  # until it is known better
        try:
            if keyring is not None:
                heard.key = demand_key(keyring, metadata, SCOPES.get(name, ANY))
            reply = await method(request, heard)
            code, reason = grpc.StatusCode.OK, ""
            return reply
        except AttendError as error:
            code, detail, reason = code_of(error), fitting(error.detail), type(error).__name__
            if isinstance(error, Overloaded):
                trailing.append(("retry-after", str(error.retry_after)))
            if code is grpc.StatusCode.INTERNAL:
                log.error("failed", method=name, request_id=heard.request_id, exc_info=error.__cause__ or error)
        except Exception:
            code, detail, reason = grpc.StatusCode.INTERNAL, "the request failed for a reason that is ours to mend", "unforeseen"
            log.exception("unforeseen", method=name, request_id=heard.request_id)
        finally:
            seconds = engine.clock() - started
            engine.metrics.answered(full_name, code.name)
            if reason:
                engine.metrics.failed(reason)
            if traces is not None and span is not None:
                told = Told(heard.request_id, reason, code in OUR_FAULT, heard.phases, heard.about)
                traces.end_call(span, full_name, code.name, told, seconds)
            if log_requests:
                log.info(
                    "request",
                    request_id=heard.request_id,
                    method=full_name,
                    key=heard.key,
                    status=code.name,
                    ms=round(seconds * 1e3, 3),
                    **heard.about,
                    **({} if heard.phases is None else milliseconds(heard.phases)),
                    **({"detail": detail[:200]} if detail else {}),
                )
        return await context.abort(code, detail, tuple(trailing))

    return answer
