"""POST /v2/models/{name}/infer, with or without /versions/1: plain ASGI and called before any routing, as POST /attend is.

What the body is, the header Inference-Header-Content-Length says. Content-Type and Accept say nothing here: clients of this protocol send
none, or any.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from service.errors import LayerNotFound, MalformedBody, RequestError
from service.serving.engine import Engine
from service.serving.requests import RawRequest
from service.web.request_reader import read_as
from service.web.routes.attend import demand_started, send_answer
from service.wire.codec import Codec
from service.wire.negotiation import JSON
from service.wire.problems import shown
from service.wire.v2.error_paths import placed
from service.wire.v2.exchange import Exchange
from service.wire.v2.parameters import VERSION

PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer/?")
BYTES = "application/octet-stream"
LENGTH = b"inference-header-content-length"


class Infer:
    """The hot endpoint."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        demand_started(self.engine)
        found = PATH.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
        assert found is not None, "called for such paths alone"
        model = found[1]
        self.engine.registry.find(model, at="")
        demand_version(found[2])
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(model, _header_length(headers, scope))
        raw = await read_as(JSON, JSON, headers, scope, receive, self.engine)
        raw.own = Codec(JSON, self._timed(exchange, raw), exchange.encode)
        try:
            answer = await self.engine.attend(raw)
        except RequestError as refusal:
            raise placed(refusal, exchange.places) from None
        length = exchange.reply_header_length
        start = [(b"content-type", JSON.encode() if length is None else BYTES.encode())]
        if length is not None:
            start.append((LENGTH, str(length).encode()))
        await send_answer(answer, raw, start, scope, send)

    def _timed(self, exchange: Exchange, raw: RawRequest) -> Callable[..., dict[str, Any]]:
        """`exchange.parse`, which also sets the deadline that the body may hold. The earlier one counts."""
        arrived = self.engine.clock()

        def parse(*args: Any) -> dict[str, Any]:
            members = exchange.parse(*args)
            if exchange.timeout is not None:
                raw.deadline = min(raw.deadline or math.inf, arrived + exchange.timeout)
            return members

        return parse


def _header_length(headers: Mapping[bytes, str], scope: Scope) -> str:
    """What the header of that name says, "" without one. Raises MalformedBody where two of them differ: a proxy may have read the other."""
    length = headers.get(LENGTH, "")
    if LENGTH in headers and any(name == LENGTH and value.decode("latin-1") != length for name, value in scope["headers"]):
        raise MalformedBody.where("", "one Inference-Header-Content-Length", "several that differ")
    return length


def demand_version(version: str | None) -> None:
    """Raises LayerNotFound for any version but the one that every model has."""
    if version not in (None, VERSION):
        raise LayerNotFound.where("", f"version {VERSION}", shown(version))
