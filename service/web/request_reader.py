"""One HTTP request: the record of its headers, which also collects the fields of its log line, and its body, read into a `RawRequest`.

The declared size is checked before the body is read.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from ipaddress import IPv6Network
from random import getrandbits
from typing import Any

from starlette.types import Receive, Scope

from service.errors import CallerGone, DeadlinePassed, InvalidRequest, MalformedBody, TooLarge
from service.serving.byte_budget import Lease
from service.serving.metrics import Phases
from service.serving.requests import NO_PARAMETERS, RawRequest
from service.serving.service import Service
from service.web.connections import Connection, connection_of
from service.wire.codec import CODECS, Codec
from service.wire.compression import coding_of_reply
from service.wire.negotiation import SAFETENSORS, media_type_of_body, media_type_of_reply

Limit = tuple[str, int]  # (name of the setting or "" without one, bytes)
UNCHECKED_BYTES = 64 * 1024  # a body of at most this many bytes is checked against the memory budget only as it is read
JOIN_IN_THREAD = 1 << 20  # a larger body, in bytes, is joined outside the event loop, which it would block for too long
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Outcome:
    """How an HTTP request or a gRPC call ended, for its log line, its span and the metrics."""

    request_id: str
    reason: str = ""  # of a refusal or failure
    detail: str = ""
    key: str = ""  # the name of the caller's API key
    phases: Phases | None = None
    log_fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Record(Outcome):
    """The headers of one HTTP request, and how far it has got. `web/middleware/access.py` creates it, and passes it to the endpoints that
    it calls itself. FastAPI's routes find it in their scope, as `scope["attend"]`."""

    headers: dict[bytes, bytes]  # names in lower case
    repeated: Sequence[tuple[bytes, bytes]]  # all headers in order, if one occurs twice; else empty
    method: str
    path: str  # below the root path
    address: str  # the caller's, "" on a Unix socket
    connection: Connection | None  # None under another ASGI server
    status: int = 0
    received: int = 0
    body_complete: bool = False  # whether the body has been read to its end
    sent: int = 0
    lease: Lease | None = None  # the request's share of the memory budget, once it has one

    def header(self, name: bytes) -> str:
        """The value of a header, "" if there is none."""
        return self.headers[name].decode("latin-1") if name in self.headers else ""


def record_of(scope: Scope) -> Record:
    """The record of a new request, from its scope."""
    pairs = scope["headers"]
    headers = dict(pairs)
    given = headers.get(b"x-request-id")
    return Record(
        request_id(None if given is None else given.decode("latin-1")),
        headers=headers,
        repeated=pairs if len(headers) != len(pairs) else (),
        method=scope["method"],
        path=scope["path"].removeprefix(scope.get("root_path", "")),
        address=scope["client"][0] if scope.get("client") else "",
        connection=connection_of(scope),
    )


def request_id(given: str | None) -> str:
    """The client's request id if it is valid, otherwise a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else f"{getrandbits(64):016x}"


async def read(
    record: Record,
    receive: Receive,
    service: Service,
    codecs: tuple[Codec, Codec] | None = None,
    parameters: Mapping[str, str] = NO_PARAMETERS,
    *,
    layer: bool = False,
    largest: int | None = None,
) -> RawRequest:
    """The request. `codecs` are those of body and reply; without them, Content-Type and Accept choose. With `layer`, safetensors may have
    `max_layer_bytes`; `largest` is a lower limit of the route, in bytes.

    Raises RequestError, Overloaded or DeadlinePassed; CallerGone if the client disconnects before the body is complete.
    """
    headers, limits = record.headers, service.wire_limits
    codec, reply_codec = codecs or _codecs(headers.get(b"content-type", b""), headers.get(b"accept", b""))
    limit = ("max_layer_bytes", limits.layer_bytes) if layer and codec is CODECS[SAFETENSORS] else ("max_body_bytes", limits.body_bytes)
    if largest is not None and largest < limit[1]:
        limit = ("", largest)
    deadline, lease = deadline_of(record, service), lease_of(record, service)
    pieces = _pieces(record, receive, limit, lease)
    if deadline is None:
        body = await pieces
    else:
        try:
            async with service.until(deadline):
                body = await pieces
        except TimeoutError:
            raise DeadlinePassed("the deadline (X-Request-Timeout or request_timeout) passed before the request's body arrived") from None
    record.received = sum(map(len, body))
    if len(body) == 1:
        joined = body[0]
    elif record.received <= JOIN_IN_THREAD:
        joined = b"".join(body)
    else:
        joined = await service.engine.codecs.run(partial(b"".join, body), 0, "")
    coding = record.header(b"content-encoding") if b"content-encoding" in headers else ""
    reply_coding = coding_of_reply(record.header(b"accept-encoding"), service.compress) if b"accept-encoding" in headers else ""
    connection = record.connection
    gone = _never if connection is None else lambda: connection.lost  # under another ASGI server, a disconnect is not visible
    return RawRequest(joined, codec, coding, reply_codec, reply_coding, parameters, deadline, gone, lease.caller, record.key, lease=lease)


@lru_cache(64)  # clients repeat these headers
def _codecs(content_type: bytes, accept: bytes) -> tuple[Codec, Codec]:
    """The codecs of body and reply. Raises UnsupportedMediaType or NotAcceptable."""
    body = media_type_of_body(content_type.decode("latin-1"))
    return CODECS[body], CODECS[media_type_of_reply(accept.decode("latin-1"))]


def lease_of(record: Record, service: Service) -> Lease:
    """The request's share of the memory budget. `web/middleware/access.py` releases it once the reply is sent."""
    if record.lease is None:
        record.lease = Lease(service.budget, record.key or network_of(record.address))
    return record.lease


@lru_cache(1024)
def network_of(address: str) -> str:
    """The address; for IPv6 its /64 network, since one caller may use all addresses of that network."""
    if ":" not in address:
        return address
    try:
        return str(IPv6Network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def deadline_of(record: Record, service: Service) -> float | None:
    """The deadline on the service's clock, from X-Request-Timeout or the settings; None without either. Raises InvalidRequest."""
    if b"x-request-timeout" not in record.headers:
        return None if service.timeout is None else service.clock() + service.timeout
    timeout = record.header(b"x-request-timeout")
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < 1e9):
        raise InvalidRequest.where("", "an X-Request-Timeout of a positive number of seconds, less than 1e9", f'"{timeout[:40]}"')
    return service.clock() + seconds


def _never() -> bool:
    return False


async def _pieces(record: Record, receive: Receive, limit: Limit, lease: Lease) -> list[bytes]:
    """The pieces of the body. The lease grows as bytes arrive, so bytes that are declared and never sent take no memory budget."""
    if (content_length := record.headers.get(b"content-length")) is not None:
        if not content_length.isdigit():
            raise MalformedBody.where("", "a Content-Length", "something else")
        if (declared := int(content_length)) > limit[1]:
            raise _too_large(limit, str(declared))
        if declared > UNCHECKED_BYTES:
            lease.check_room(declared)
    pieces, size = [], 0
    while not record.body_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        record.body_complete = not message.get("more_body", False)
        if piece := message.get("body", b""):
            size += len(piece)
            if size > limit[1]:
                raise _too_large(limit, f"more than {limit[1]}")
            lease.add(len(piece))
            pieces.append(piece)
    return pieces


def _too_large(limit: Limit, got: str) -> TooLarge:
    setting, size = limit
    return TooLarge.where("", f"a body of at most {size} bytes" + (f" ({setting})" if setting else ""), got)
