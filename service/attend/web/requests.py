"""An HTTP request, and the endpoint that answers it.

The request passes all middleware (`web/app.py`) and reaches the endpoint: what its head says, its body once it is read, its channels, and
what its log line, its span and the metrics will say about it. `web/grpc/methods.py` has that of a gRPC call.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attend.errors import AttendError
from attend.serving.requests import Request
from attend.serving.service import Service
from attend.web.connections import Connection
from attend.web.parameters import Parameters

OTHER = "other"  # label of all paths where nothing is served
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True, kw_only=True, eq=False)
class HttpRequest(Request):
    """An HTTP request: its headers, its channels, its endpoint, and how much of body and reply has been transferred.

    A comment beside a field that changes names the files that change it. Of `Request`, `request_reader.py` sets the body and how it is
    read, `guard.py` the key, and `error_replies.py` the reason and the detail.
    """

    app: Starlette  # whose state has what endpoints answer with, beside the service (`application.py`)
    service: Service
    scope: Scope
    receive: Receive
    send: Send  # changed in replies.py and cors.py
    headers: dict[bytes, bytes]  # names in lower case
    repeated: Sequence[tuple[bytes, bytes]]  # all headers in order, if one occurs twice; else empty
    method: str
    path: str  # below the root path
    endpoints: "Mapping[str, Endpoint]"  # those of the path, by method
    endpoint: "Endpoint | None"  # None: nothing is served there, or not by this method
    label: str  # of the path in metrics and traces: the path of its endpoints, such as /layers/{name}, or OTHER; so there are few
    path_parameters: Mapping[str, str]
    address: str  # the caller's, "" on a Unix socket
    connection: Connection | None  # None under another ASGI server
    status: int = 0  # of the reply, once it has begun; replies.py, access_log.py
    received: int = 0  # bytes of the body; request_reader.py
    body_complete: bool = False  # whether the body has been read to its end; request_reader.py
    reply_headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # added to the reply; access_log.py
    sent: int = 0  # bytes of the reply's body; replies.py

    def header(self, name: bytes) -> str:
        """The value of a header, "" if there is none."""
        return self.headers[name].decode("latin-1") if name in self.headers else ""


Handler = Callable[[HttpRequest], Awaitable[None]]  # answers a request: an endpoint, or middleware around it


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request in the OpenAPI document. `examples`: bodies in JSON and their summaries."""

    model: type | None  # the schema of JSON; None: no JSON
    examples: tuple[tuple[Any, str], ...] = ()
    binary: Sequence[str] = ()  # other media types
    required: bool = True


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table of endpoints (`web/endpoints.py`)."""

    method: str
    path: str  # such as /layers/{name}
    scopes: frozenset[str]  # a key needs one of them; empty: no key is needed
    function: Callable[..., Awaitable[Response]]  # takes the request, and the parameters by name
    parameters: Parameters  # of the path and the query, by their names
    description: Mapping[str, Any]  # in the OpenAPI document: arguments of FastAPI's decorators, such as `response_model`
    body: Body | None = None
    refusals: tuple[type[AttendError], ...] = ()  # in the document, beside those that a key, a body or the need of layers imply
    aliases: tuple[str, ...] = ()  # further paths
    grpc_methods: tuple[str, ...] = ()  # of GRPCInferenceService that do the same, and need the same key
    needs_layers: bool = False  # whether it refuses requests before the configured layers are loaded
    page: bool = False  # whether a client that prefers text/html needs no key
    any_query: bool = (
        False  # whether it ignores the query, to which load balancers and browsers add parameters; else unknown ones are refused
    )

    @property
    def documented(self) -> bool:
        """Whether the OpenAPI document has it."""
        documented: bool = self.description.get("include_in_schema", True)
        return documented


def is_v2(path: str) -> bool:
    """Whether a path is one of the Open Inference Protocol, which has its own form of refusals."""
    return path == "/v2" or path.startswith("/v2/")


def valid_request_id(given: str | None) -> str:
    """The client's request id if it is valid, otherwise a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else f"{getrandbits(64):016x}"
