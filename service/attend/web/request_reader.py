"""Reads an HTTP request into a `RawRequest`: codecs, deadline, and the body, bounded in size, in time and by the byte budget."""

import math
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv6Network

from attend.errors import CallerGone, DeadlinePassed, InvalidRequest, MalformedBody, TooLarge
from attend.serving.byte_budget import Lease
from attend.serving.requests import NO_PARAMETERS, RawRequest
from attend.serving.service import Service
from attend.web.records import HttpRecord
from attend.wire.codec import Codec
from attend.wire.compression import coding_of_reply
from attend.wire.negotiation import CODECS, FILE_CODEC, media_type_of_body, media_type_of_reply

Limit = tuple[str, int]  # (name of the setting or "" without one, bytes)
UNIX_SOCKET = "unix socket"  # the caller without an address; "" is the process itself
UNCHECKED_BYTES = 64 * 1024  # a body of at most this many bytes is checked against the byte budget only as it is read


async def read_request(
    record: HttpRecord,
    service: Service,
    codec: Codec | None = None,
    parameters: Mapping[str, str] = NO_PARAMETERS,
    *,
    layer: bool = False,
    largest: int | None = None,
) -> RawRequest:
    """The request. `codec` is that of body and reply; without it, Content-Type and Accept choose one for each.

    A body has at most `max_body_bytes` bytes, with `layer` a file of tensors at most `max_layer_bytes`, and any body at most `largest`.

    Raises RequestError, Overloaded or DeadlinePassed; CallerGone if the client disconnects before the body is complete.
    """
    headers, limits = record.headers, service.wire_limits
    if codec is None:
        codec, reply_codec = _codecs(headers.get(b"content-type", b""), headers.get(b"accept", b""))
    else:
        reply_codec = codec
    limit = ("max_layer_bytes", limits.layer_bytes) if layer and codec is FILE_CODEC else ("max_body_bytes", limits.body_bytes)
    if largest is not None and largest < limit[1]:
        limit = ("", largest)
    timed = service.timeout is not None or b"x-request-timeout" in headers
    deadline, lease = deadline_of(record, service) if timed else None, lease_of(record, service)
    arriving = _pieces(record, limit, lease)
    if deadline is None:
        pieces = await arriving
    else:
        try:
            async with service.until(deadline):
                pieces = await arriving
        except TimeoutError:
            raise DeadlinePassed("the deadline (X-Request-Timeout or request_timeout) passed before the request's body arrived") from None
    record.received = sum(map(len, pieces))
    coding = record.header(b"content-encoding") if b"content-encoding" in headers else ""
    reply_coding = coding_of_reply(record.header(b"accept-encoding"), service.compress) if b"accept-encoding" in headers else ""
    body = pieces[0] if len(pieces) == 1 else pieces
    return RawRequest(
        body,
        codec=codec,
        coding=coding,
        reply_codec=reply_codec,
        reply_coding=reply_coding,
        parameters=parameters,
        deadline=deadline,
        gone=_never if record.connection is None else record.connection.is_lost,
        caller=lease.caller,
        api_key=record.api_key,
        lease=lease,
    )


def request_without_body(record: HttpRecord, service: Service) -> RawRequest:
    """The request, if it has no body: its caller, whether the caller is still there, its deadline and its lease."""
    lease, gone = lease_of(record, service), _never if record.connection is None else record.connection.is_lost
    return RawRequest(b"", deadline=deadline_of(record, service), gone=gone, caller=lease.caller, api_key=record.api_key, lease=lease)


def _never() -> bool:
    """Whether the client has disconnected, under a server that does not say so."""
    return False


@lru_cache(64)  # clients repeat these headers
def _codecs(content_type: bytes, accept: bytes) -> tuple[Codec, Codec]:
    """The codecs of body and reply. Raises UnsupportedMediaType or NotAcceptable."""
    body = media_type_of_body(content_type.decode("latin-1"))
    return CODECS[body], CODECS[media_type_of_reply(accept.decode("latin-1"))]


def lease_of(record: HttpRecord, service: Service) -> Lease:
    """The request's share of the byte budget. `web/replies.py` releases it once the reply is sent."""
    if record.lease is None:
        record.lease = Lease(service.budget, record.api_key or network_of(record.address))
    return record.lease


@lru_cache(1024)
def network_of(address: str) -> str:
    """The address; for IPv6 its /64 network, since one caller may use all its addresses. All callers on a Unix socket are one."""
    if ":" not in address:
        return address or UNIX_SOCKET
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


async def _pieces(record: HttpRecord, limit: Limit, lease: Lease) -> list[bytes]:
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
        message = await record.receive()
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
