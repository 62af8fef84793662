"""Headers and body of a request -> what the engine is asked. Sizes are checked from the headers, before a byte is read."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from ipaddress import IPv6Network

from starlette.types import Receive, Scope

from service.errors import CallerGone, DeadlinePassed, InvalidRequest, MalformedBody, TooLarge
from service.serving.admission import Lease
from service.serving.engine import Engine
from service.serving.requests import RawRequest
from service.web.connections import connection_of
from service.wire.compression import coding_of_reply
from service.wire.negotiation import SAFETENSORS, form_of_body, form_of_reply

Limit = tuple[str, int]  # the name of a setting, "" where no setting changes the value; the value
JOINED_ASIDE = 1 << 20  # bytes of a body from which joining its pieces would hold up the event loop for long


async def read(
    scope: Scope,
    receive: Receive,
    engine: Engine,
    *,
    layer: bool = False,
    largest: int | None = None,
    form_of_reply: Callable[[str], str] = form_of_reply,
) -> RawRequest:
    """The request as the engine takes it; one that brings a `layer` may be larger, and `largest` is the limit of a route with small bodies.

    Raises what its headers or its size deserve; CallerGone if it never comes whole.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    form = form_of_body(headers.get(b"content-type", ""))
    reply_form = form_of_reply(headers.get(b"accept", ""))
    return await read_as(form, reply_form, headers, scope, receive, engine, layer, largest)


async def read_as(
    form: str,
    reply_form: str,
    headers: Mapping[bytes, str],
    scope: Scope,
    receive: Receive,
    engine: Engine,
    layer: bool = False,
    largest: int | None = None,
) -> RawRequest:
    """The same, where the forms are settled; `largest` is the limit of a route whose bodies are small."""
    deadline, lease = deadline_of(scope, engine), lease_of(scope, engine)
    limits = engine.wire_limits
    limit = ("max_layer_bytes", limits.layer_bytes) if layer and form == SAFETENSORS else ("max_body_bytes", limits.body_bytes)
    if largest is not None and largest < limit[1]:
        limit = ("", largest)
    try:
        async with engine.until(deadline):
            pieces = await _pieces(headers.get(b"content-length"), receive, limit, lease)
    except TimeoutError:
        raise DeadlinePassed("the deadline of X-Request-Timeout passed before the body of the request had come") from None
    body = await engine.join(pieces) if lease.held > JOINED_ASIDE else b"".join(pieces)
    scope["attend"].received, scope["attend"].whole = len(body), True
    coding, reply_coding = headers.get(b"content-encoding", ""), headers.get(b"accept-encoding", "")
    reply_coding = coding_of_reply(reply_coding, engine.compress)
    return RawRequest(body, form, coding, reply_form, reply_coding, deadline, _hung_up(scope), lease.caller, lease)


def lease_of(scope: Scope, engine: Engine) -> Lease:
    """The bytes that the request of this scope holds. They are given back once its reply is sent: see `web/middleware/access.py`."""
    record = scope["attend"]
    if record.lease is None:
        record.lease = engine.budget.lease(record.key or (network_of(scope["client"][0]) if scope.get("client") else ""))
    lease: Lease = record.lease
    return lease


@lru_cache(1024)
def network_of(address: str) -> str:
    """The address, or of IPv6 the /64 network, any address of which one caller may use."""
    if ":" not in address:
        return address
    try:
        return str(IPv6Network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def deadline_of(scope: Scope, engine: Engine) -> float | None:
    """When, on the engine's clock, the caller or the settings want an answer at the latest."""
    timeout = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-timeout"), None)
    if timeout is None:
        return None if engine.timeout is None else engine.clock() + engine.timeout
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < 1e9):
        raise InvalidRequest.where("", "an X-Request-Timeout of a positive number of seconds, less than 1e9", f'"{timeout[:40]}"')
    return engine.clock() + seconds


def _hung_up(scope: Scope) -> Callable[[], bool]:
    """Asks whether the caller has gone. Where the server is another than ours nobody is taken for gone."""
    connection = connection_of(scope)
    return (lambda: False) if connection is None else (lambda: connection.lost)


async def _pieces(content_length: str | None, receive: Receive, limit: Limit, lease: Lease) -> list[bytes]:
    """The body as it comes, counted as it comes: what is declared, and never sent, takes room from nobody."""
    if content_length is not None:
        if not content_length.isdigit():
            raise MalformedBody.where("", "a Content-Length", "something else")
        if int(content_length) > limit[1]:
            raise _too_large(limit, content_length)
        lease.demand(int(content_length))
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        if piece := message.get("body", b""):
            size += len(piece)
            if size > limit[1]:
                raise _too_large(limit, f"more than {limit[1]}")
            lease.add(len(piece))
            pieces.append(piece)
        more = message.get("more_body", False)
    return pieces


def _too_large(limit: Limit, got: str) -> TooLarge:
    setting, size = limit
    return TooLarge.where("", f"a body of at most {size} bytes" + (f" ({setting})" if setting else ""), got)
