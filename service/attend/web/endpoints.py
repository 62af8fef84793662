"""The table of endpoints, one row each: method, path, the scopes of keys, handler and schemas.

Everything that depends on an endpoint reads the table: the guard (scopes), the dispatch of requests, the labels of metrics and traces,
gRPC (scopes), the OpenAPI document, and the refusals of unknown paths and methods. Each file of `web/routes/` and `web/v2/routes.py` add
the rows of one noun, as functions that FastAPI could call:

    @table.add("GET", "/layers/{name}", READ, refusals=LAYER, tags=["layers"], response_model=LayerInfo)
    async def get_layer(name: str) -> LayerInfo: ...

FastAPI calls them and writes their replies, except for the most frequent ones, which are `direct`: they read the body and send the reply
themselves. FastAPI would take a sixth of the time of a small request.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from attend.errors import (
    AttendError,
    DeadlinePassed,
    InvalidRequest,
    LayerNotFound,
    LayerUnloaded,
    SessionEnded,
    SessionNotFound,
    TooLarge,
    WrongReplica,
)
from attend.serving.service import Service
from attend.web.connections import CONNECTION_KEY, RECORD_KEY, STATUS_KEY
from attend.web.error_replies import no_endpoint
from attend.web.records import OTHER, Body, Endpoint, Handler, HttpRecord, is_v2, valid_request_id

PUBLIC = frozenset[str]()  # no key is needed
READ = frozenset({"infer", "admin", "metrics"})  # any key
INFER = frozenset({"infer"})
ADMIN = frozenset({"admin"})
METRICS = frozenset({"metrics"})
LAYER = (LayerNotFound, LayerUnloaded)  # refusals of an endpoint that finds a layer
SESSION = (SessionNotFound, SessionEnded, WrongReplica)  # of one that finds a session
TIMED = (InvalidRequest, DeadlinePassed)  # of one without a body that has a deadline
MAX_QUERY_PARAMETERS = 64  # no endpoint has more than a few
NO_PARAMETERS: Mapping[str, str] = {}
NO_ENDPOINTS: Mapping[str, Endpoint] = {}
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


class EndpointTable:
    """The endpoints of one application, which answers with `service`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._endpoints: list[Endpoint] = []
        self._exact: dict[str, dict[str, Endpoint]] = {}  # path without parameters -> method -> endpoint
        self._patterns: dict[int, dict[re.Pattern[str], dict[str, Endpoint]]] = {}  # number of slashes -> path -> method -> endpoint

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints)

    def add(
        self,
        method: str,
        path: str,
        scopes: frozenset[str],
        *,
        body: Body | None = None,
        refusals: tuple[type[AttendError], ...] = (),
        direct: bool = False,
        aliases: tuple[str, ...] = (),
        grpc_methods: tuple[str, ...] = (),
        needs_layers: bool = False,
        page: bool = False,
        **description: Any,
    ) -> Callable[[F], F]:
        """Adds the decorated function as an endpoint. `description` has the arguments of FastAPI's decorators, such as `response_model`.

        A `direct` function takes the path's parameters and the record of the request, and sends the reply itself.
        """

        def added(function: F) -> F:
            route = APIRoute(path, function, methods=[method], generate_unique_id_function=operation_id, **description)
            handler = _direct(function, path) if direct else _through_fastapi(route)
            endpoint = Endpoint(method, path, scopes, handler, route, body, refusals, aliases, grpc_methods, needs_layers, page)
            self._endpoints.append(endpoint)
            for template in (path, *aliases):
                self._by_method(template)[method] = endpoint
            return function

        return added

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
            return found, NO_PARAMETERS
        for pattern, endpoints in self._patterns.get(path.count("/"), {}).items():
            if (match := pattern.fullmatch(path)) is not None:
                return endpoints, match.groupdict()
        return NO_ENDPOINTS, NO_PARAMETERS

    def grpc_scopes(self) -> dict[str, frozenset[str]]:
        """The scopes of which a key needs one, by the name of the gRPC method."""
        return {method: endpoint.scopes for endpoint in self for method in endpoint.grpc_methods}

    def record(self, scope: Scope, receive: Receive, send: Send) -> HttpRecord:
        """The record of a new request."""
        pairs, method = scope["headers"], scope["method"]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = dict(pairs)
        endpoints, parameters = self.find(path)
        endpoint = endpoints.get("GET" if method == "HEAD" else method)
        label = endpoint.path if endpoint is not None else next(iter(endpoints.values())).path if endpoints else OTHER
        record = scope[RECORD_KEY] = HttpRecord(
            valid_request_id(headers[b"x-request-id"].decode("latin-1") if b"x-request-id" in headers else None),
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
            connection=scope["state"].get(CONNECTION_KEY) if "state" in scope else None,
            status=scope.get(STATUS_KEY, 0),
        )
        return record

    def call(self, record: HttpRecord) -> Awaitable[None]:
        """Calls the endpoint of a request; without one, replies 404, 405 or 501.

        Raises NotReady if the endpoint needs layers and they are not loaded yet.
        """
        if record.scope["query_string"].count(b"&") >= MAX_QUERY_PARAMETERS:  # before the framework makes an object of each
            raise TooLarge.where("", f"at most {MAX_QUERY_PARAMETERS} query parameters", "more")
        if (endpoint := record.endpoint) is None:
            return no_endpoint(record, [endpoint.path for endpoint in self if endpoint.route.include_in_schema])
        if endpoint.needs_layers:
            self.service.require_started()
        return endpoint.handler(record)


def _direct(function: Callable[..., Awaitable[None]], path: str) -> Handler:
    """The handler that calls a direct function with the parameters of its path."""
    names = re.findall(r"\{(\w+)\}", path)
    return (lambda record: function(*(record.path_parameters[name] for name in names), record)) if names else function


def _through_fastapi(route: APIRoute) -> Handler:
    """The handler that lets FastAPI read the parameters of a route's function, call it, and write its reply."""
    app = AsyncExitStackMiddleware(route.app)

    async def handle(record: HttpRecord) -> None:
        record.scope["path_params"] = record.path_parameters
        await app(record.scope, record.receive, record.send)

    return handle


def operation_id(route: APIRoute) -> str:
    """The id of an operation, from which generated clients name its method: the name of the route's function, under /v2 after `v2_`."""
    return f"v2_{route.name}" if is_v2(route.path) else route.name
