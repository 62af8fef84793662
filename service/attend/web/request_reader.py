"""Reads the body of an HTTP request, bounded in size, in time and by the byte budget; its codecs, deadline and lease."""

import math
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv6Network

from attend.errors import CallerGone, DeadlinePassed, InvalidRequest, MalformedBody, TooLarge
from attend.serving.byte_budget import Lease
from attend.web.requests import HttpRequest
from attend.wire.codec import Codec
from attend.wire.compression import coding_of_reply
from attend.wire.negotiation import CODECS, FILE_CODEC, media_type_of_body, media_type_of_reply

NO_PARAMETERS: Mapping[str, str] = {}
UNIX_SOCKET = "unix socket"  # the caller without an address; "" is the process itself
UNCHECKED_BYTES = 64 * 1024  # a body of at most this many bytes is checked against the byte budget only as it is read


async def receive_body(
    request: HttpRequest,
    codec: Codec | None = None,
    parameters: Mapping[str, str] = NO_PARAMETERS,
    *,
    layer: bool = False,
    largest: int | None = None,
) -> None:
    """Read the body into the request. `codec` is that of body and reply; without it, Content-Type and Accept choose one for each.

    A body has at most `max_body_bytes` bytes, with `layer` a file of tensors at most `max_layer_bytes`, and any body at most `largest`.

    Raises RequestError, Overloaded or DeadlinePassed; CallerGone if the client disconnects before the body is complete.
    """
    headers, service = request.headers, request.service
    limits = service.wire_limits
    if codec is None:
        codec, reply_codec = _codecs(headers.get(b"content-type", b""), headers.get(b"accept", b""))
    else:
        reply_codec = codec
    limit = ("max_layer_bytes", limits.max_layer_bytes) if layer and codec is FILE_CODEC else ("max_body_bytes", limits.max_body_bytes)
    if largest is not None and largest < limit[1]:
        limit = ("", largest)
    request.codec, request.reply_codec, request.codec_parameters = codec, reply_codec, parameters
    timed = service.timeout is not None or b"x-request-timeout" in headers
    request.deadline, lease = deadline_of(request) if timed else None, lease_of(request)
    arriving = _pieces(request, limit, lease)
    if request.deadline is None:
        pieces = await arriving
    else:
        try:
            async with service.until(request.deadline):
                pieces = await arriving
        except TimeoutError:
            raise DeadlinePassed("the deadline (X-Request-Timeout or request_timeout) passed before the request's body arrived") from None
    request.received = sum(map(len, pieces))
    if b"content-encoding" in headers:
        request.coding = request.header(b"content-encoding")
    if b"accept-encoding" in headers:
        request.reply_coding = coding_of_reply(request.header(b"accept-encoding"), service.compress)
    request.body = pieces[0] if len(pieces) == 1 else pieces


def begin_without_body(request: HttpRequest) -> None:
    """Set the deadline and the lease of a request that has no body. Raises InvalidRequest for an invalid X-Request-Timeout."""
    request.deadline = deadline_of(request)
    lease_of(request)


@lru_cache(64)  # clients repeat these headers
def _codecs(content_type: bytes, accept: bytes) -> tuple[Codec, Codec]:
    """The codecs of body and reply. Raises UnsupportedMediaType or NotAcceptable."""
    body = media_type_of_body(content_type.decode("latin-1"))
    return CODECS[body], CODECS[media_type_of_reply(accept.decode("latin-1"))]


def lease_of(request: HttpRequest) -> Lease:
    """The request's share of the byte budget. `web/replies.py` releases it once the reply is sent."""
    if request.lease is None:
        request.caller = request.api_key or network_of(request.address)
        request.lease = Lease(request.service.budget, request.caller)
    return request.lease


@lru_cache(1024)
def network_of(address: str) -> str:
    """The address; for IPv6 its /64 network, since one caller may use all its addresses. All callers on a Unix socket are one."""
    if ":" not in address:
        return address or UNIX_SOCKET
    try:
        return str(IPv6Network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def deadline_of(request: HttpRequest) -> float | None:
    """The deadline on the service's clock, from X-Request-Timeout or the settings; None without either. Raises InvalidRequest."""
    service = request.service
    if b"x-request-timeout" not in request.headers:
        return None if service.timeout is None else service.clock() + service.timeout
    timeout = request.header(b"x-request-timeout")
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < 1e9):
        raise InvalidRequest.where("", "an X-Request-Timeout of a positive number of seconds, less than 1e9", f'"{timeout[:40]}"')
    return service.clock() + seconds


async def _pieces(request: HttpRequest, limit: tuple[str, int], lease: Lease) -> list[bytes]:
    """The pieces of the body. The lease grows as bytes arrive, so bytes that are declared and never sent do not count. `limit`: the name of
    the setting, "" without one, and its bytes."""
    if (content_length := request.headers.get(b"content-length")) is not None:
        if not content_length.isdigit():
            raise MalformedBody.where("", "a Content-Length", "something else")
        if (declared := int(content_length)) > limit[1]:
            raise _too_large(limit, str(declared))
        if declared > UNCHECKED_BYTES:
            lease.check_room(declared)
    pieces, size = [], 0
    while not request.body_complete:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        request.body_complete = not message.get("more_body", False)
        if piece := message.get("body", b""):
            size += len(piece)
            if size > limit[1]:
                raise _too_large(limit, f"more than {limit[1]}")
            lease.resize(lease.held + len(piece), bounded=True)
            pieces.append(piece)
    return pieces


def _too_large(limit: tuple[str, int], got: str) -> TooLarge:
    setting, size = limit
    return TooLarge.where("", f"a body of at most {size} bytes" + (f" ({setting})" if setting else ""), got)
