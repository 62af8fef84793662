"""Replies: the middleware that every reply passes; the responses with calls and with files."""

from contextlib import suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from attend.serving.requests import Cancelled
from attend.web.request_reader import lease_of
from attend.web.requests import Handler, HttpRequest
from attend.wire.codec import Buffer, Encoded
from attend.wire.negotiation import SAFETENSORS

CHANGES = ("PUT", "DELETE")  # methods
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
MAX_UNSPLIT_REPLY = 64 * 1024  # bytes; smaller replies are sent at once; the request of a larger one ends when it has left the transport
MAX_DRAINED_BYTES = 64 << 20  # largest body of a refused request that is read and discarded


def around(handle: Handler) -> Handler:
    """Middleware that adds the headers of every reply, sends long replies in pieces, and releases the lease once the reply is sent."""

    async def replied(request: HttpRequest) -> None:
        send, connection, is_head = request.send, request.connection, request.method == "HEAD"

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                _begin(request, message)
            else:
                if is_head:
                    message = {**message, "body": b""}
                request.sent += len(message.get("body", b""))
                if request.status >= 400 and not request.body_complete and not message.get("more_body", False):
                    await send({**message, "more_body": True})
                    await _drain_body(request)
                    message = {"type": "http.response.body"}
            if connection is None or request.sent <= MAX_UNSPLIT_REPLY:
                await send(message)
            else:
                await connection.send(send, message)

        request.send = observed_send
        try:
            await handle(request)
            if connection is not None and request.sent > MAX_UNSPLIT_REPLY:
                with suppress(Cancelled):  # the server stops: the reply stays without its end
                    await connection.wait_until_sent()
        finally:
            request.send = send  # without this cycle of references, the request is freed at once, not at a garbage collection
            if request.lease is not None:
                request.lease.resize(0)

    return replied


def _begin(request: HttpRequest, message: Message) -> None:
    """Sets a large lease to the size of the reply, notes the status, and adds the headers of every reply.

    Raises Overloaded if there is no room for a reply that was not reserved; then another reply says so. What is computed is answered,
    and what has changed something, since a refusal would say that nothing was changed.
    """
    headers, status, phases = message["headers"], message["status"], request.phases
    size, held = int(dict(headers).get(b"content-length", 0)), 0 if request.lease is None else request.lease.held
    if max(size, held) > MAX_UNSPLIT_REPLY or (size > held and phases is not None):  # a small lease stays as it is, if it is enough
        is_needed = status >= 400 or phases is not None or request.method in CHANGES
        lease_of(request).resize(size, bounded=not is_needed)
    request.status = status
    if request.service.draining or request.service.retiring:  # so that clients do not reuse a connection that will be closed
        headers.append((b"connection", b"close"))
    if NO_SNIFFING not in headers:
        headers.append(NO_SNIFFING)
    headers.append((b"x-request-id", request.id.encode()))
    if phases is not None:
        headers.append((b"server-timing", phases.server_timing().encode()))
    headers += request.reply_headers


async def _drain_body(request: HttpRequest) -> None:
    """Drain the unread body of a request that is refused, up to a bound, before its reply ends: a server that closed the connection earlier
    would reset it before the client reads the reply. A client that waits for `100 Continue` has not sent its body, and will not."""
    if b"expect" in request.headers:
        return
    length = request.headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() else MAX_DRAINED_BYTES * (b"transfer-encoding" in request.headers)
    left = declared if declared <= MAX_DRAINED_BYTES else 0
    while left > 0:
        try:
            message = await request.receive()
        except MemoryError:
            return
        left = left - len(message.get("body", b"")) if message.get("more_body") else 0


class PiecesResponse(Response):
    """A response with an encoded reply. Each piece is freed once it is sent: freeing all at once would block the event loop."""

    def __init__(self, reply: Encoded, *more: tuple[bytes, bytes]) -> None:
        """`more`: headers beside those that describe the reply."""
        (headers, pieces), size = reply, sum(map(len, reply[1]))
        self.raw_headers = [*headers, *more, (b"content-length", b"%d" % size)]
        self.unsent = list(pieces) if size > MAX_UNSPLIT_REPLY else [b"".join(pieces)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        unsent = self.unsent
        unsent.reverse()
        while unsent:
            piece = unsent.pop()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(unsent)})


def response_of_file(pieces: list[Buffer], name: str) -> Response:
    """The response with a safetensors file to save as `name`. The request's lease counts its bytes until they are sent, even if the layer
    or session is replaced meanwhile."""
    disposition = f'attachment; filename="{name}.safetensors"'.encode()
    headers = ((b"content-type", SAFETENSORS.encode()), (b"content-disposition", disposition))
    return PiecesResponse((headers, pieces))
