"""Reads an HTTP request into a `RawRequest`: codecs, deadline, and the body, bounded in size, in time and by the byte budget."""

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from ipaddress import IPv6Network

from starlette.types import Receive

from service.errors import CallerGone, DeadlinePassed, InvalidRequest, MalformedBody, TooLarge
from service.serving.byte_budget import Lease
from service.serving.requests import NO_PARAMETERS, RawRequest
from service.serving.service import Service
from service.web.records import HttpRecord
from service.wire.codec import Codec
from service.wire.compression import coding_of_reply
from service.wire.negotiation import CODECS, SAFETENSORS, media_type_of_body, media_type_of_reply

Limit = tuple[str, int]  # (name of the setting or "" without one, bytes)
UNCHECKED_BYTES = 64 * 1024  # a body of at most this many bytes is checked against the byte budget only as it is read
JOIN_IN_THREAD = 1 << 20  # a larger body, in bytes, is joined outside the event loop, which it would block for too long


async def read_request(
    record: HttpRecord,
    receive: Receive,
    service: Service,
    codec: Codec | None = None,
    parameters: Mapping[str, str] = NO_PARAMETERS,
    *,
    layer: bool = False,
    largest: int | None = None,
) -> RawRequest:
    """The request. `codec` is that of body and reply; without it, Content-Type and Accept choose one for each.

    A body has at most `max_body_bytes` bytes, with `layer` a safetensors body at most `max_layer_bytes`, and any body at most `largest`.

    Raises RequestError, Overloaded or DeadlinePassed; CallerGone if the client disconnects before the body is complete.
    """
    headers, limits = record.headers, service.wire_limits
    if codec is None:
        codec, reply_codec = _codecs(headers.get(b"content-type", b""), headers.get(b"accept", b""))
    else:
        reply_codec = codec
    limit = ("max_layer_bytes", limits.layer_bytes) if layer and codec is CODECS[SAFETENSORS] else ("max_body_bytes", limits.body_bytes)
    if largest is not None and largest < limit[1]:
        limit = ("", largest)
    deadline, lease = deadline_of(record, service), lease_of(record, service)
    arriving = _pieces(record, receive, limit, lease)
    if deadline is None:
        pieces = await arriving
    else:
        try:
            async with service.until(deadline):
                pieces = await arriving
        except TimeoutError:
            raise DeadlinePassed("the deadline (X-Request-Timeout or request_timeout) passed before the request's body arrived") from None
    record.received = sum(map(len, pieces))
    if len(pieces) == 1:
        body = pieces[0]
    elif record.received <= JOIN_IN_THREAD:
        body = b"".join(pieces)
    else:
        body = await service.engine.codecs.run(partial(b"".join, pieces), 0, "")
    coding = record.header(b"content-encoding") if b"content-encoding" in headers else ""
    reply_coding = coding_of_reply(record.header(b"accept-encoding"), service.compress) if b"accept-encoding" in headers else ""
    connection = record.connection
    gone = (lambda: False) if connection is None else lambda: connection.lost  # under another ASGI server, a disconnect is not visible
    return RawRequest(body, codec, coding, reply_codec, reply_coding, parameters, deadline, gone, lease.caller, record.key, lease=lease)


@lru_cache(64)  # clients repeat these headers
def _codecs(content_type: bytes, accept: bytes) -> tuple[Codec, Codec]:
    """The codecs of body and reply. Raises UnsupportedMediaType or NotAcceptable."""
    body = media_type_of_body(content_type.decode("latin-1"))
    return CODECS[body], CODECS[media_type_of_reply(accept.decode("latin-1"))]


def lease_of(record: HttpRecord, service: Service) -> Lease:
    """The request's share of the byte budget. `web/access.py` releases it once the reply is sent."""
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


def deadline_of(record: HttpRecord, service: Service) -> float | None:
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


async def _pieces(record: HttpRecord, receive: Receive, limit: Limit, lease: Lease) -> list[bytes]:
    """The pieces of the body. The lease grows as bytes arrive, so bytes that are declared and never sent do not count."""
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
