"""The record of one HTTP request or gRPC call: what its log line, its span and the metrics say about it.

`web/access.py` makes the record of an HTTP request, and passes it to the endpoints that it calls itself. FastAPI's routes find
it in their scope, as `scope["attend"]`. `web/grpc/methods.py` has the record of a gRPC call.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

from starlette.types import Receive, Scope, Send

from service.serving.byte_budget import Lease
from service.serving.metrics import Phases
from service.web.connections import Connection, connection_of

CALLER_HEADER = b"x-attend-caller"  # the caller's address, in a request that another worker forwards
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Record:
    """How an HTTP request or a gRPC call ended."""

    request_id: str
    reason: str = ""  # of a refusal or failure
    detail: str = ""
    key: str = ""  # the name of the caller's API key
    phases: Phases | None = None
    log_fields: Mapping[str, Any] = field(default_factory=dict)
    from_worker: bool = False  # whether another worker has forwarded it
    forwarded: bool = False  # whether the reply is that of another worker, which logs and counts it


@dataclass(slots=True, kw_only=True)
class HttpRecord(Record):
    """The headers of an HTTP request, and how much of its body and reply has been transferred."""

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
    lease: Lease | None = None  # the request's share of the byte budget, once it has one

    def header(self, name: bytes) -> str:
        """The value of a header, "" if there is none."""
        return self.headers[name].decode("latin-1") if name in self.headers else ""


Endpoint = Callable[[HttpRecord, Receive, Send], Awaitable[None]]  # one that `web/access.py` calls itself


def record_of(scope: Scope) -> HttpRecord:
    """The record of a new request, from its scope."""
    pairs = scope["headers"]
    headers = dict(pairs)
    given = headers.get(b"x-request-id")
    connection = connection_of(scope)
    from_worker = connection is not None and connection.from_worker
    address = headers.get(CALLER_HEADER, b"").decode("latin-1") if from_worker else scope["client"][0] if scope.get("client") else ""
    return HttpRecord(
        valid_request_id(None if given is None else given.decode("latin-1")),
        headers=headers,
        repeated=pairs if len(headers) != len(pairs) else (),
        method=scope["method"],
        path=scope["path"].removeprefix(scope.get("root_path", "")),
        address=address,
        connection=connection,
        from_worker=from_worker,
    )


def valid_request_id(given: str | None) -> str:
    """The client's request id if it is valid, otherwise a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else f"{getrandbits(64):016x}"
