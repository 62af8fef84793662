"""POST /v2/models/{name}/infer, with or without /versions/1; it bypasses FastAPI's routing, as POST /attend does.

The header Inference-Header-Content-Length decides how the body is read. Content-Type and Accept are ignored: clients send arbitrary ones.
"""

import re

from starlette.types import Receive, Send

from service.errors import LayerNotFound, MalformedBody
from service.serving.service import Service
from service.web.record import Record
from service.web.request_reader import read_as
from service.web.routes.attend import require_started, send_reply
from service.wire.problems import describe_value
from service.wire.v2.codec import HEADER_LENGTH, V2Codec
from service.wire.v2.parameters import VERSION

MODELS = "/v2/models/"
PATH = re.compile(rf"{MODELS}([^/]+)(?:/versions/([^/]+))?/infer/?")
CODEC = V2Codec()


class Infer:
    """An endpoint that bypasses FastAPI."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, record: Record, receive: Receive, send: Send) -> None:
        require_started(self.service)
        found = PATH.fullmatch(record.path)
        assert found is not None, "called for such paths alone"
        self.service.registry.find(found[1], at="")
        require_version(found[2])
        parameters = {"model": found[1], "header_length": _header_length(record)}
        raw = await read_as(CODEC, CODEC, parameters, record, receive, self.service)
        await send_reply(await self.service.engine.attend(raw), record, send)


def _header_length(record: Record) -> str:
    """Inference-Header-Content-Length, "" if there is none. Raises MalformedBody if several differ: a proxy may have used another one."""
    if len(record.repeated) and len({value for name, value in record.repeated if name == HEADER_LENGTH}) > 1:
        raise MalformedBody.where("", "one Inference-Header-Content-Length", "several that differ")
    return record.header(HEADER_LENGTH)


def require_version(version: str | None) -> None:
    """Raises LayerNotFound unless `version` is None or VERSION, the only version of every model."""
    if version not in (None, VERSION):
        raise LayerNotFound.where("", f"version {VERSION}", describe_value(version))
