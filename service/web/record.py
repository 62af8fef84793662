"""The state of one HTTP request that the modules of `web` share: its headers and the fields of its log line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from service.serving.admission import Lease
from service.serving.metrics import Phases
from service.web.connections import Connection


@dataclass(slots=True)
class Record:
    """`web/middleware/access.py` creates it, and passes it to the endpoints that it calls itself. FastAPI's routes find it in their scope,
    as `scope["attend"]`."""

    request_id: str
    headers: dict[bytes, bytes]  # names in lower case
    repeated: Sequence[tuple[bytes, bytes]] = ()  # all headers in order, if one occurs twice; else empty
    method: str = "GET"
    path: str = "/"  # below the root path
    address: str = ""  # the caller's, "" on a Unix socket
    connection: Connection | None = None  # None under another ASGI server
    status: int = 0
    received: int = 0
    whole: bool = False  # whether the body has been read to its end
    sent: int = 0
    reason: str = ""
    detail: str = ""
    key: str = ""  # the name of the caller's API key
    lease: Lease | None = None  # the request's share of the memory budget, once it has one
    phases: Phases | None = None
    log_fields: dict[str, Any] = field(default_factory=dict)

    def header(self, name: bytes) -> str:
        """The value of a header, "" if there is none."""
        return self.headers[name].decode("latin-1") if name in self.headers else ""
