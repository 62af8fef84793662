"""Headers and body of a request -> what the engine is asked. Sizes are checked from the headers, before a byte is read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope

from service.errors import CallerGone, InvalidRequest, MalformedBody, TooLarge
from service.serving.admission import Lease
from service.serving.engine import Engine
from service.serving.exchange import Asked
from service.wire.compression import coding_of_reply
from service.wire.negotiation import SAFETENSORS, form_of_body, form_of_reply

Limit = tuple[str, int]  # a setting's name and value


async def read(
    scope: Scope,
    receive: Receive,
    engine: Engine,
    lease: Lease,
    *,
    layer: bool = False,
    form_of_reply: Callable[[str], str] = form_of_reply,
) -> Asked:
    """The request as the engine takes it; one that brings a `layer` may be larger.

    Raises what its headers or its size deserve; CallerGone if it never comes whole.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    form = form_of_body(headers.get(b"content-type", ""))
    reply_form = form_of_reply(headers.get(b"accept", ""))
    return await read_as(form, reply_form, headers, scope, receive, engine, lease, layer)


async def read_as(
    form: str,
    reply_form: str,
    headers: Mapping[bytes, str],
    scope: Scope,
    receive: Receive,
    engine: Engine,
    lease: Lease,
    layer: bool = False,
) -> Asked:
    """The same, where the forms are settled."""
    deadline = deadline_of(scope, engine)
    limits = engine.wire_limits
    limit = ("max_layer_bytes", limits.layer_bytes) if layer and form == SAFETENSORS else ("max_body_bytes", limits.body_bytes)
    body = await _body(headers.get(b"content-length"), receive, limit, lease)
    scope["attend"].received, scope["attend"].whole = len(body), True
    coding, reply_coding = headers.get(b"content-encoding", ""), headers.get(b"accept-encoding", "")
    return Asked(body, form, coding, reply_form, coding_of_reply(reply_coding, engine.compress), deadline, _hung_up(receive), lease.caller)


def caller_of(scope: Scope) -> str:
    """The name of the API key, or else the address, that a request came from."""
    return scope["attend"].key or (scope["client"][0] if scope.get("client") else "")


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
        raise InvalidRequest.where("", "an X-Request-Timeout in seconds", f'"{timeout[:40]}"')
    return engine.clock() + seconds


def _hung_up(receive: Any) -> Callable[[], bool]:
    """Asks whether the caller has gone. uvicorn's `receive` belongs to an object that knows; elsewhere nobody is taken for gone."""
    cycle = getattr(receive, "__self__", None)
    return lambda: bool(getattr(cycle, "disconnected", False))


async def _body(content_length: str | None, receive: Receive, limit: Limit, lease: Lease) -> bytes:
    if content_length is not None:
        if not content_length.isdigit():
            raise MalformedBody.where("", "a Content-Length", "something else")
        if int(content_length) > limit[1]:
            raise _too_large(limit, content_length)
        lease.add(int(content_length))
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        if piece := message.get("body", b""):
            size += len(piece)
            if size > limit[1]:
                raise _too_large(limit, f"more than {limit[1]}")
            if content_length is None:
                lease.add(len(piece))
            pieces.append(piece)
        more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(limit: Limit, got: str) -> TooLarge:
    setting, size = limit
    return TooLarge.where("", f"a body of at most {size} bytes ({setting})", got)
