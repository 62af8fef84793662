"""What every HTTP request passes first: request ids, checks of headers, access log, counts, HEAD for every GET, replies to exceptions.

`Access` sees headers and sizes, never a payload. It reads the scope once, into an `HttpRecord`, which it passes to the endpoints that it
calls itself, and stores in the scope for FastAPI's routes.
"""

import time
from collections.abc import Callable
from functools import partial

import structlog
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import AttendError, CallerGone, TooLarge, WrongWorker
from service.serving.executor import is_out_of_memory
from service.serving.service import Service
from service.web.errors import V2_PREFIX, error_response, internal_error, out_of_memory, routing_error
from service.web.forwarding import Forwarder
from service.web.guard import Guard
from service.web.records import Endpoint, HttpRecord, record_of
from service.web.routes import attend, sessions
from service.web.telemetry import OpenSpan, Telemetry
from service.web.v2 import routes as v2

log = structlog.get_logger("attend")
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
MAX_UNSPLIT_REPLY = 64 * 1024  # bytes; larger replies are sent in pieces, and the request ends only when they have left the transport
MAX_QUERY_PARAMETERS = 64  # no endpoint has more than a few
MAX_DRAINED_BYTES = 64 << 20  # largest body of a refused request that is read and discarded


class Application(FastAPI):
    """FastAPI behind `access`, which calls the most frequent endpoints without FastAPI's routing."""

    access: ASGIApp

    def build_middleware_stack(self) -> ASGIApp:
        """Only the routes, without FastAPI's exception handlers: `Access` turns exceptions into responses."""
        return AsyncExitStackMiddleware(self.router)

    async def call_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the route of a path. Clients send paths under /v2 with and without a trailing slash, and with and without a version."""
        path = scope["attend"].path if "attend" in scope else ""
        if path.startswith(f"{V2_PREFIX}/"):
            scope = {**scope, "path": scope.get("root_path", "") + v2.plain_path(path)}
        elif path == "/openapi.json" and self.openapi_schema is None:
            await run_in_threadpool(self.openapi)  # building the document takes a few hundred milliseconds; FastAPI keeps it
        try:
            await super().__call__(scope, receive, send)
        except HTTPException as error:
            await routing_error(error, self.router.routes, scope)(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.access(scope, receive, send)


class Access:
    """The outermost layer of the application. `label(path)` is the path's label in metrics and spans."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        log_requests: bool,
        label: Callable[[str], str],
        forwarder: Forwarder,
        guard: Guard | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.app, self.service, self.log_requests, self.direct_endpoint = app, service, log_requests, _direct_endpoints(service)
        self.label, self.guard, self.telemetry, self.forwarder = label, guard, telemetry, forwarder
        self.log = log.bind()  # the logger that a call of `log.info` would look up each time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        record = scope["attend"] = record_of(scope)
        is_head, connection = record.method == "HEAD", record.connection
        if is_head:  # a copy: uvicorn needs the original method
            scope = {**scope, "method": "GET"}
        span = None if self.telemetry is None else self.telemetry.begin_request(scope, self.label(record.path))

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and not record.body_complete and message["status"] != 504:  # 504 must not wait for the body
                    await _drain_body(record, receive)
                record.status = message["status"]
                headers = message["headers"]
                if record.lease is not None:
                    record.lease.resize(int(dict(headers).get(b"content-length", 0)))
                if self.service.draining or self.service.retiring:  # so that clients do not reuse a connection that will be closed
                    headers.append((b"connection", b"close"))
                if not record.forwarded:  # the other worker's reply has the rest
                    if NO_SNIFFING not in headers:
                        headers.append(NO_SNIFFING)
                    headers.append((b"x-request-id", record.request_id.encode()))
                    if span is not None:
                        headers += span.reply_headers()
            else:
                if is_head:
                    message = {**message, "body": b""}
                record.sent += len(message.get("body", b""))
            if connection is None or record.sent <= MAX_UNSPLIT_REPLY:
                await send(message)
            else:
                await connection.send(send, message)

        try:
            await self._answer(scope, record, receive, observed_send)
            if not record.forwarded:
                self._log_request(scope, record, span, time.monotonic() - started)
            if connection is not None and record.sent > MAX_UNSPLIT_REPLY:
                await connection.wait_until_sent()
        finally:
            if record.lease is not None:
                record.lease.release()

    async def _answer(self, scope: Scope, record: HttpRecord, receive: Receive, send: Send) -> None:
        """Calls the endpoint; turns an exception into a response."""
        try:
            if scope["query_string"].count(b"&") >= MAX_QUERY_PARAMETERS:  # before the framework makes an object of each
                raise TooLarge.where("", f"at most {MAX_QUERY_PARAMETERS} query parameters", "more")
            if self.guard is not None:
                record.key = self.guard.check(record, scope["http_version"])
            try:
                if (endpoint := self.direct_endpoint(record.method, record.path)) is not None:
                    await endpoint(record, receive, send)
                else:
                    await self.app(scope, receive, send)
            except WrongWorker as error:
                if record.from_worker:  # never forwarded twice
                    raise
                await self.forwarder.forward(error, scope, record, receive, send)
        except CallerGone:
            record.reason = "CallerGone"
        except AttendError as error:
            await error_response(error, scope)(scope, receive, send)
        except Exception as error:
            if is_out_of_memory(error) and not record.status:
                await out_of_memory(error, scope)(scope, receive, send)
                return
            record.reason = "internal_error"
            log.exception("internal_error", request_id=record.request_id, path=scope["path"])
            if not record.status:
                await internal_error(scope)(scope, receive, send)

    def _log_request(self, scope: Scope, record: HttpRecord, span: OpenSpan | None, seconds: float) -> None:
        label = self.label(record.path)
        self.service.metrics.count_request(label, record.status, record.received, record.sent)
        if record.reason:
            self.service.metrics.count_failure(record.reason)
        if self.telemetry is not None and span is not None:
            self.telemetry.end_request(span, scope, label, record, seconds)
        if self.log_requests:
            phases = {} if record.phases is None else record.phases.milliseconds()
            refusal = {"reason": record.reason, "detail": record.detail[:200]} if record.reason else {}
            self.log.info(
                "request",
                request_id=record.request_id,
                method=scope["method"],
                path=record.path,
                client=record.address,
                key=record.key,
                status=record.status,
                ms=round(seconds * 1e3, 3),
                received=record.received,
                sent=record.sent,
                **record.log_fields,
                **phases,
                **refusal,
            )


def _direct_endpoints(service: Service) -> Callable[[str, str], Endpoint | None]:
    """The endpoint of a method and a path, if it is one of those that are called without FastAPI, whose routing and middleware would take a
    sixth of the time of a small request; None for all others."""
    by_path = attend.endpoints(service)

    def endpoint(method: str, path: str) -> Endpoint | None:
        if method != "POST":
            return None
        if (direct := by_path.get(path)) is not None:
            return direct
        if (found := v2.INFER_PATH.fullmatch(path)) is not None:
            return partial(v2.answer_infer, service, found[1], found[2])
        if (found := sessions.ATTEND_PATH.fullmatch(path)) is not None:
            return partial(sessions.attend_step, service, found[1])
        return None

    return endpoint


async def _drain_body(record: HttpRecord, receive: Receive) -> None:
    """Drain the unread body of a refused request, up to a bound: closing early would reset the connection before the client reads the
    reply. A client that waits for `100 Continue` has not sent its body, and reading it would make the server ask for it."""
    if b"expect" in record.headers:
        return
    length = record.headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() else MAX_DRAINED_BYTES * (b"transfer-encoding" in record.headers)
    left = declared if declared <= MAX_DRAINED_BYTES else 0
    while left > 0:
        try:
            message = await receive()
        except MemoryError:
            return
        left = left - len(message.get("body", b"")) if message.get("more_body") else 0
