"""The table of endpoints, one row each: method, path, the scopes of keys, function and schemas.

Everything that depends on an endpoint reads the table: the guard (scopes), the dispatch of requests, the labels of metrics and traces,
gRPC (scopes), the OpenAPI document, and the refusals of unknown paths and methods. Each file of `web/routes/`, and `web/v2/routes.py`,
has the rows of one noun, which the table of the application includes. A row is a function, as starlette has them, from a request, and its
parameters, to a response; it finds what it answers with at the request, as `request.service`, or in `request.app.state`:

    @endpoints.add("GET", "/layers/{name}", READ, refusals=LAYER, tags=["layers"], response_model=LayerInfo)
    async def get_layer(request: HttpRequest, name: str) -> Response: ...

It reads the body by `request_reader.py`, and makes the response by a function of `replies.py`. FastAPI makes the OpenAPI document of the
rows (`openapi.py`), and takes no part in requests.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attend.errors import (
    DeadlinePassed,
    InvalidRequest,
    LayerNotFound,
    LayerUnloaded,
    SessionEnded,
    SessionNotFound,
    TooLarge,
    WrongReplica,
)
from attend.serving.requests import never
from attend.serving.service import Service
from attend.web.connections import CONNECTION_KEY
from attend.web.error_replies import no_endpoint
from attend.web.parameters import Parameters
from attend.web.requests import OTHER, Endpoint, HttpRequest, valid_request_id

PUBLIC = frozenset[str]()  # no key is needed
READ = frozenset({"infer", "admin", "metrics"})  # any key
INFER = frozenset({"infer"})
ADMIN = frozenset({"admin"})
METRICS = frozenset({"metrics"})
LAYER = (LayerNotFound, LayerUnloaded)  # refusals of an endpoint that finds a layer
SESSION = (SessionNotFound, SessionEnded, WrongReplica)  # of one that finds a session
TIMED = (InvalidRequest, DeadlinePassed)  # of one without a body that has a deadline
MAX_QUERY_PARAMETERS = 64  # no endpoint has more than a few
F = TypeVar("F", bound=Callable[..., Awaitable[Response]])


class EndpointTable:
    """The endpoints of one noun, or of an application."""

    def __init__(self) -> None:
        self._endpoints: list[Endpoint] = []
        self._exact: dict[str, dict[str, Endpoint]] = {}  # path without parameters -> method -> endpoint
        self._patterns: dict[int, dict[re.Pattern[str], dict[str, Endpoint]]] = {}  # number of slashes -> path -> method -> endpoint

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints)

    def add(self, method: str, path: str, scopes: frozenset[str], **fields: Any) -> Callable[[F], F]:
        """Adds the decorated function as an endpoint. `fields`: those of `Endpoint`; the others are its `description`."""
        row = {name: fields.pop(name) for name in Endpoint.__dataclass_fields__ if name in fields}

        def added(function: F) -> F:
            self.include([Endpoint(method, path, scopes, function, Parameters(path, function), fields, **row)])
            return function

        return added

    def include(self, endpoints: Iterable[Endpoint]) -> None:
        """Adds these endpoints."""
        for endpoint in endpoints:
            self._endpoints.append(endpoint)
            for template in (endpoint.path, *endpoint.aliases):
                self._by_method(template)[endpoint.method] = endpoint

    def _by_method(self, template: str) -> dict[str, Endpoint]:
        if "{" not in template:
            return self._exact.setdefault(template, {})
        pattern = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(template)))
        return self._patterns.setdefault(template.count("/"), {}).setdefault(pattern, {})

    def find(self, path: str) -> tuple[Mapping[str, Endpoint], Mapping[str, str]]:
        """The endpoints of a path by method, and the values of the path's parameters."""
        if path.startswith("/v2/"):  # below it, a path may end in a slash
            path = path.rstrip("/")
        if (found := self._exact.get(path)) is not None:
            return found, {}
        for pattern, endpoints in self._patterns.get(path.count("/"), {}).items():
            if (match := pattern.fullmatch(path)) is not None:
                return endpoints, match.groupdict()
        return {}, {}

    def grpc_scopes(self) -> dict[str, frozenset[str]]:
        """The scopes of which a key needs one, by the name of the gRPC method."""
        return {method: endpoint.scopes for endpoint in self for method in endpoint.grpc_methods}

    def request(self, app: Starlette, service: Service, scope: Scope, receive: Receive, send: Send) -> HttpRequest:
        """The new request with this scope to an application."""
        pairs, method = scope["headers"], scope["method"]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = dict(pairs)
        endpoints, parameters = (exact, {}) if (exact := self._exact.get(path)) is not None else self.find(path)
        endpoint = endpoints.get("GET" if method == "HEAD" else method)
        label = endpoint.path if endpoint is not None else next(iter(endpoints.values())).path if endpoints else OTHER
        connection = scope["state"].get(CONNECTION_KEY) if "state" in scope else None
        return HttpRequest(
            app=app,
            service=service,
            id=valid_request_id(headers[b"x-request-id"].decode("latin-1") if b"x-request-id" in headers else None),
            scope=scope,
            receive=receive,
            send=send,
            headers=headers,
            repeated=pairs if len(headers) != len(pairs) else (),
            method=method,
            path=path,
            endpoints=endpoints,
            endpoint=endpoint,
            label=label,
            path_parameters=parameters,
            address=scope["client"][0] if scope.get("client") else "",
            connection=connection,
            gone=never if connection is None else connection.is_lost,
        )

    async def call(self, request: HttpRequest) -> None:
        """Sends the response of the endpoint of a request; without one, 404, 405 or 501.

        Raises NotReady if the endpoint needs layers and they are not loaded yet.
        """
        query = request.scope["query_string"]
        if query.count(b"&") >= MAX_QUERY_PARAMETERS:  # before anything makes an object of each
            raise TooLarge.where("", f"at most {MAX_QUERY_PARAMETERS} query parameters", "more")
        if (endpoint := request.endpoint) is None:
            response = no_endpoint(request, [endpoint.path for endpoint in self if endpoint.documented])
        else:
            if endpoint.needs_layers and not request.service.started:
                request.service.require_started()
            query, parameters = b"" if endpoint.any_query else query, endpoint.parameters
            values = parameters.values(request.path_parameters, query) if parameters.names or query else {}
            response = await endpoint.function(request, **values)
        await response(request.scope, request.receive, request.send)
