"""Replies: `Replies` is the middleware that every reply passes; the responses of calls and of files."""

from collections.abc import Iterable, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from attend.serving.requests import EncodedReply
from attend.serving.service import Service
from attend.web.connections import RECORD_KEY
from attend.web.records import Handler, HttpRecord
from attend.web.request_reader import lease_of
from attend.wire.codec import Buffer
from attend.wire.negotiation import SAFETENSORS

NO_SNIFFING = (b"x-content-type-options", b"nosniff")
MAX_UNSPLIT_REPLY = 64 * 1024  # bytes; larger replies are sent in pieces, and the request ends only when they have left the transport
MAX_JOINED_BYTES = 64 * 1024  # replies up to this size, in bytes, are joined: copying costs less than several sends
MAX_DRAINED_BYTES = 64 << 20  # largest body of a refused request that is read and discarded


class Replies:
    """Middleware that adds the headers of every reply, sends long replies in pieces, and releases the lease once the reply is sent."""

    def __init__(self, handle: Handler, service: Service) -> None:
        self.handle, self.service = handle, service

    async def __call__(self, record: HttpRecord) -> None:
        send, connection, is_head = record.send, record.connection, record.method == "HEAD"

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(record, message)
            else:
                if is_head:
                    message = {**message, "body": b""}
                record.sent += len(message.get("body", b""))
                if record.status >= 400 and not record.body_complete and not message.get("more_body", False):
                    await send({**message, "more_body": True})
                    await _drain_body(record)
                    message = {"type": "http.response.body"}
            if connection is None or record.sent <= MAX_UNSPLIT_REPLY:
                await send(message)
            else:
                await connection.send(send, message)

        record.send = observed_send
        try:
            await self.handle(record)
            if connection is not None and record.sent > MAX_UNSPLIT_REPLY:
                await connection.wait_until_sent()
        finally:
            record.send = send  # without these two cycles of references, the record is freed at once, not at a garbage collection
            record.scope.pop(RECORD_KEY, None)
            if record.lease is not None:
                record.lease.release()

    def _begin(self, record: HttpRecord, message: Message) -> None:
        """Sets a large lease to the size of the reply, notes the status, and adds the headers of every reply.

        Raises Overloaded if there is no room for a reply that was not reserved; then another reply says so.
        """
        headers, status = message["headers"], message["status"]
        size = int(dict(headers).get(b"content-length", 0))
        if size > MAX_UNSPLIT_REPLY or (record.lease is not None and record.lease.held > MAX_UNSPLIT_REPLY):  # a small lease stays as it is
            lease = lease_of(record, self.service)
            lease.reserve(size) if status < 400 else lease.resize(size)
        record.status = status
        if self.service.draining or self.service.retiring:  # so that clients do not reuse a connection that will be closed
            headers.append((b"connection", b"close"))
        if NO_SNIFFING not in headers:
            headers.append(NO_SNIFFING)
        headers.append((b"x-request-id", record.request_id.encode()))
        headers += record.reply_headers


async def _drain_body(record: HttpRecord) -> None:
    """Drain the unread body of a request that is refused, up to a bound, before its reply ends: a server that closed the connection earlier
    would reset it before the client reads the reply. A client that waits for `100 Continue` has not sent its body, and will not."""
    if b"expect" in record.headers:
        return
    length = record.headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() else MAX_DRAINED_BYTES * (b"transfer-encoding" in record.headers)
    left = declared if declared <= MAX_DRAINED_BYTES else 0
    while left > 0:
        try:
            message = await record.receive()
        except MemoryError:
            return
        left = left - len(message.get("body", b"")) if message.get("more_body") else 0


class PiecesResponse(Response):
    """A response whose body is in pieces. Each is freed once it is sent: freeing all at once would block the event loop."""

    def __init__(self, pieces: Sequence[Buffer], size: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """`size`: the bytes of all pieces."""
        self.raw_headers = [*headers, (b"content-length", b"%d" % size)]
        self.unsent = list(pieces) if size > MAX_JOINED_BYTES else [b"".join(pieces)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        unsent = self.unsent
        unsent.reverse()
        while unsent:
            piece = unsent.pop()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(unsent)})


def response_of_call(reply: EncodedReply, record: HttpRecord, *headers: tuple[bytes, bytes]) -> Response:
    """The response with the reply of a call, whose phases and log fields the record gets."""
    record.phases, record.log_fields = reply.phases, reply.log_fields
    size = sum(map(len, reply.pieces))
    if record.lease is not None and size > record.lease.held:  # than was predicted: what is computed is answered
        record.lease.resize(size)
    timing = (b"server-timing", reply.phases.server_timing().encode())
    return PiecesResponse(reply.pieces, size, (*reply.headers, *headers, timing))


def response_of_file(pieces: Sequence[Buffer], name: str) -> Response:
    """The response with a safetensors file to save as `name`. The request's lease counts its bytes until they are sent, even if the layer
    or session is replaced meanwhile."""
    disposition = f'attachment; filename="{name}.safetensors"'.encode()
    headers = ((b"content-type", SAFETENSORS.encode()), (b"content-disposition", disposition))
    return PiecesResponse(pieces, sum(map(len, pieces)), headers)
