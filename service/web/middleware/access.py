"""What surrounds every request: its id, its log line, its count, HEAD for every GET, and the net under unforeseen exceptions.

Plain ASGI: it sees headers and sizes, never a payload. A request's record travels in the scope, and the rooms behind leave in it
what the log should say.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from random import getrandbits
from typing import Any, Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import AttendError, CallerGone, TooLarge
from service.serving.admission import Lease
from service.serving.engine import Engine
from service.serving.executor import is_out_of_memory
from service.serving.metrics import Phases
from service.web.connections import connection_of
from service.web.errors import apology, out_of_memory, respond
from service.web.middleware.guard import Guard

log = structlog.get_logger("attend")
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
SMALL = 32 * 1024  # bytes of a reply up to which it is handed over at once, and not followed until it is sent
QUERY_PARAMETERS = 64  # no endpoint has more than a few
DRAINED_BYTES = 64 << 20  # bytes of a refused body that are read, and thrown away
OTHER = "other"  # paths where nothing is served
ENDPOINTS = re.compile(r"/(attend(/(plan|analysis|figure))?|layers|words|health/(live|ready|startup)|metrics|docs|openapi\.json)?")
V2_ENDPOINTS = re.compile(r"/v2(/health/(live|ready)|/models/stats|/repository/index)?/?")
V2_MODELS = re.compile(r"(/v2(?:/repository)?/models/)[^/]+(?:/versions/[^/]+)?(|/infer|/ready|/config|/stats|/load|/unload)/?")


@dataclass(slots=True)
class Record:
    """One request, as the log will tell it."""

    request_id: str
    status: int = 0
    received: int = 0
    whole: bool = False  # whether the body has been read to its end
    sent: int = 0
    reason: str = ""
    detail: str = ""
    key: str = ""  # the name of the caller's
    lease: Lease | None = None  # the bytes that it holds, once it may hold any
    phases: Phases | None = None
    about: dict[str, Any] = field(default_factory=dict)


class Traces(Protocol):
    """What follows requests beyond this process: see `web/middleware/telemetry.py`."""

    def begin(self, scope: Scope, path: str) -> None: ...
    def reply_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]: ...
    def end(self, scope: Scope, path: str, record: Record, seconds: float) -> None: ...


class Access:
    """The outermost layer of the application.

    `hot` finds, by method and path, endpoints that are called from here: the framework's routing and its layers would cost a small
    request a sixth of its time, and have nothing to add to it.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        log_requests: bool,
        hot: Callable[[str, str], ASGIApp | None],
        guard: Guard | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.app, self.engine, self.log_requests, self.hot, self.guard, self.traces = app, engine, log_requests, hot, guard, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        record = scope["attend"] = Record(request_id(_given_id(scope)))
        head, connection = scope["method"] == "HEAD", connection_of(scope)
        if head:  # a copy: the server below must go on knowing what was asked
            scope = {**scope, "method": "GET"}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and not record.whole and message["status"] != 504:  # which comes in time, if nothing else does
                    await _drain_body(scope, receive)
                record.status = message["status"]
                headers = message["headers"]
                if record.lease is not None:
                    record.lease.resize(_length(headers))
                if NO_SNIFFING not in headers:
                    headers.append(NO_SNIFFING)
                if self.engine.draining or self.engine.retiring:  # so that nobody sends a request on a connection about to be closed
                    headers.append((b"connection", b"close"))
                headers.append((b"x-request-id", record.request_id.encode()))
                if self.traces is not None:
                    headers += self.traces.reply_headers(scope)
            else:
                record.sent += len(message.get("body", b""))
                if head:
                    message = {**message, "body": b"", "more_body": False} if not message.get("more_body") else message
            if connection is None or record.sent <= SMALL:
                await send(message)
            else:
                await connection.send(send, message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.traces is not None:
            self.traces.begin(scope, path)
        try:
            await self._answer(scope, path, record, receive, answer)
            self._log_request(scope, path, record, time.monotonic() - started)
            if connection is not None and record.sent > SMALL:
                await connection.sent()
        finally:
            if record.lease is not None:
                record.lease.release()

    async def _answer(self, scope: Scope, path: str, record: Record, receive: Receive, answer: Send) -> None:
        """Has the request answered, whatever becomes of it."""
        try:
            if scope["query_string"].count(b"&") >= QUERY_PARAMETERS:  # before the framework makes an object of each
                raise TooLarge.where("", f"at most {QUERY_PARAMETERS} query parameters", "more")
            if self.guard is not None:
                record.key = self.guard.check(scope, path)
            await (self.hot(scope["method"], path) or self.app)(scope, receive, answer)
        except CallerGone:
            record.reason = "CallerGone"
        except AttendError as error:
            await respond(error, scope)(scope, receive, answer)
        except Exception as error:
            if is_out_of_memory(error) and not record.status:
                await out_of_memory(error, scope)(scope, receive, answer)
                return
            record.reason = "unforeseen"
            log.exception("unforeseen", request_id=record.request_id, path=scope["path"])
            if not record.status:
                await apology(scope)(scope, receive, answer)

    def _log_request(self, scope: Scope, path: str, record: Record, seconds: float) -> None:
        self.engine.metrics.answered(endpoint(path), record.status, record.received, record.sent)
        if record.reason:
            self.engine.metrics.failed(record.reason)
        if self.traces is not None:
            self.traces.end(scope, path, record, seconds)
        if self.log_requests:
            phases = {} if record.phases is None else milliseconds(record.phases)
            refusal = {"reason": record.reason, "detail": record.detail[:200]} if record.reason else {}
            log.info(
                "request",
                request_id=record.request_id,
                method=scope["method"],
                path=path,
                client=scope["client"][0] if scope.get("client") else "",
                key=record.key,
                status=record.status,
                ms=round(seconds * 1e3, 3),
                received=record.received,
                sent=record.sent,
                **record.about,
                **phases,
                **refusal,
            )


async def _drain_body(scope: Scope, receive: Receive) -> None:
    """Reads on what a refused caller is still sending, up to a bound: one who is cut off in mid-sentence never sees the refusal."""
    left = next((int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()), 0)
    if left > DRAINED_BYTES:
        return
    while left > 0:
        try:
            message = await receive()
        except MemoryError:
            return
        left = left - len(message.get("body", b"")) if message.get("more_body") else 0


def milliseconds(phases: Phases) -> dict[str, float]:
    """The phases as a log line tells them."""
    return {f"{name}_ms": round(getattr(phases, name) * 1e3, 3) for name in ("decode", "queue", "compute", "encode")}


def request_id(given: str | None) -> str:
    """The caller's where it can be one, or a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else f"{getrandbits(64):016x}"


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value, "latin-1")
    return None


@lru_cache(256)  # a server is asked for few paths, again and again
def endpoint(path: str) -> str:
    """The path with names left out, so that metrics stay few."""
    if ENDPOINTS.fullmatch(path):
        return path
    if V2_ENDPOINTS.fullmatch(path):
        return path.rstrip("/")
    if found := V2_MODELS.fullmatch(path):
        return f"{found[1]}{{name}}{found[2]}"
    return next((f"{start}{{name}}" for start in ("/layers/", "/page/") if path.startswith(start)), OTHER)


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of the reply that has these headers, 0 where they do not say."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)
