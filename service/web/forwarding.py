"""Forwards a request to the worker that has its session, and sends back that worker's reply.

Workers reach each other on private Unix sockets (`serving/sessions/placement.py`), on which they serve the same application. So the
other worker checks key, size and deadline of the request, and it alone logs and counts it. Bodies and replies are streamed.
`GrpcForwarder` in `web/grpc/methods.py` does the same for gRPC.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import structlog
from starlette.types import Receive, Scope, Send

from service.errors import CallerGone, NotReady, SessionEnded, WrongWorker
from service.serving.service import Service
from service.web.records import CALLER_HEADER, HttpRecord
from service.web.request_reader import deadline_of

TIMEOUT_HEADER = b"x-request-timeout"
NOT_FORWARDED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", TIMEOUT_HEADER, CALLER_HEADER))
NOT_RETURNED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"date"))  # this process sends its own
GRACE_SECONDS = 1.0  # after a deadline: until then the other worker may say whether it computed the call in time
IDLE_SECONDS = 5.0  # until an idle connection to another worker is closed
ENDED = "the process that has the session ended before it replied"
log = structlog.get_logger("attend")


class Forwarder:
    """Sends requests to other workers. They close connections that are idle for `keepalive_timeout` seconds."""

    def __init__(self, service: Service, keepalive_timeout: float) -> None:
        self.service = service
        self._limits = httpx.Limits(keepalive_expiry=min(IDLE_SECONDS, keepalive_timeout / 2))
        self._transports: dict[Path, httpx.AsyncHTTPTransport] = {}
        self._in_use: Counter[Path] = Counter()  # socket -> requests whose reply is not complete

    async def forward(self, error: WrongWorker, scope: Scope, record: HttpRecord, receive: Receive, send: Send) -> None:
        """Answers a request with the reply of the worker that `error` names.

        Raises SessionEnded or NotReady if that worker has ended, DeadlinePassed or CallerGone.
        """
        content: AsyncIterator[bytes] | bytes | None = None
        if error.raw is not None:
            content, deadline = error.raw.body, error.raw.deadline
        else:
            deadline = deadline_of(record, self.service)
            if b"content-length" in record.headers or b"transfer-encoding" in record.headers:
                content = _body(record, receive)
        async with self._response(error, scope, record, content, deadline) as response:
            record.forwarded = True
            headers = [(name, value) for name, value in response.headers.raw if name.lower() not in NOT_RETURNED]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            try:
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    if record.connection is not None and record.connection.lost:
                        raise CallerGone
            except httpx.TransportError:  # uvicorn closes the caller's connection, since the reply has no end
                log.warning("forwarded reply is incomplete", request_id=record.request_id, path=record.path)
            else:
                await send({"type": "http.response.body", "body": b""})

    async def replies_of_others(self, scope: Scope, record: HttpRecord) -> list[bytes]:
        """The bodies with which the other workers answer a request without a body. Workers that have ended are left out.

        Raises NotReady, DeadlinePassed or CallerGone.
        """
        workers, deadline = self.service.engine.require_sessions().workers, deadline_of(record, self.service)
        replies: list[bytes] = []
        if workers is None or record.from_worker:
            return replies
        for other in workers.others():
            try:
                async with self._response(other, scope, record, None, deadline) as response:
                    replies.append(await response.aread())
            except SessionEnded:
                continue
            except httpx.TransportError as broken:
                raise NotReady(ENDED) from broken
        return replies

    @asynccontextmanager
    async def _response(
        self, error: WrongWorker, scope: Scope, record: HttpRecord, content: AsyncIterator[bytes] | bytes | None, deadline: float | None
    ) -> AsyncIterator[httpx.Response]:
        """The reply of another worker, whose body is not read yet."""
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_FORWARDED]
        headers.append((CALLER_HEADER, record.address.encode()))
        if deadline is not None:
            headers.append((TIMEOUT_HEADER, b"%.6f" % max(1e-6, deadline - self.service.clock())))
        query = scope["query_string"]
        target = scope["raw_path"].removeprefix(scope.get("root_path", "").encode()) + (b"?" + query if query else b"")
        request = httpx.Request(scope["method"], "http://localhost", headers=headers, content=content, extensions={"target": target})
        latest = None if deadline is None else deadline + GRACE_SECONDS
        disconnected = None if record.connection is None else record.connection.disconnected
        self._in_use[error.socket] += 1
        try:
            transport = await self._transport(error.socket)
            try:
                response = await self.service.in_time(transport.handle_async_request(request), latest, disconnected)
            except httpx.TransportError as broken:
                if isinstance(broken, httpx.ConnectError) and _refused(broken):
                    raise error.if_ended from None
                raise NotReady(ENDED) from broken
            async with aclosing(response):
                yield response
        finally:
            self._in_use[error.socket] -= 1

    async def _transport(self, socket: Path) -> httpx.AsyncHTTPTransport:
        """The connections to a worker. If the worker is new, closes those to workers that have ended and are sending no reply."""
        if socket not in self._transports:
            self._transports[socket] = httpx.AsyncHTTPTransport(uds=str(socket), limits=self._limits)
            for ended in [known for known in self._transports if not self._in_use[known] and not known.exists()]:
                del self._in_use[ended]
                await self._transports.pop(ended).aclose()
        return self._transports[socket]

    async def close(self) -> None:
        """Closes the connections to other workers."""
        for transport in self._transports.values():
            await transport.aclose()


async def _body(record: HttpRecord, receive: Receive) -> AsyncIterator[bytes]:
    """The body of the request as it arrives. Raises CallerGone."""
    while not record.body_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        record.body_complete = not message.get("more_body", False)
        yield message.get("body", b"")


def _refused(error: BaseException | None) -> bool:
    """Whether no process listens on the socket any more: connecting may fail for other reasons, such as too many open files."""
    while error is not None and not isinstance(error, ConnectionRefusedError | FileNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None
