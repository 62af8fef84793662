"""Sends replies: `Replies` is the middleware that every reply passes, `send_reply` sends the reply of a call."""

from starlette.types import Message

from attend.serving.requests import EncodedReply
from attend.serving.service import Service
from attend.web.connections import RECORD_KEY
from attend.web.records import Handler, HttpRecord
from attend.web.request_reader import lease_of

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


async def send_reply(reply: EncodedReply, record: HttpRecord, *headers: tuple[bytes, bytes]) -> None:
    """Sends a reply, a large one in pieces. Each piece is freed once it is sent: freeing all at once would block the event loop."""
    record.phases, record.log_fields = reply.phases, reply.log_fields
    size = sum(map(len, reply.pieces))
    if record.lease is not None and size > record.lease.held:  # than was predicted: what is computed is answered
        record.lease.resize(size)
    pieces = reply.pieces if size > MAX_JOINED_BYTES else [b"".join(reply.pieces)]
    pieces.reverse()
    timing = (b"server-timing", reply.phases.server_timing().encode())
    whole = [*reply.headers, *headers, (b"content-length", b"%d" % size), timing]
    await record.send({"type": "http.response.start", "status": 200, "headers": whole})
    while pieces:
        piece = pieces.pop()
        await record.send({"type": "http.response.body", "body": piece, "more_body": bool(pieces)})
