"""The synchronous and the asynchronous client.

A method such as `client.attend(…)` makes the `ApiRequest` of the function of its name in `operations.py`: an HTTP request, and the reader
of its response (`responses.py`). `perform` sends the request and repeats it as `connection.py` decides.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from attend.client import operations
from attend.client.api_request import ApiRequest
from attend.client.arguments import USE_CLIENT_DEFAULT, Timeout
from attend.client.connection import API_KEY, SECRET, Attempts, Connections, Outcome, connection_error
from attend.client.methods import make_request, signed
from attend.client.sessions import AsyncSession, Session, StartingSession, start_or_resume
from attend.errors import CapacityError, NotAcceptable, Unreachable, UnsupportedMediaType

T = TypeVar("T")
P = ParamSpec("P")


def _method(operation: Callable[P, ApiRequest[T]]) -> Callable[Concatenate["Client", P], T]:
    """A method of `Client` with the arguments of the operation; it returns the result."""

    @wraps(operation)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.perform(make_request(operation, *args, **kwargs))

    return signed(method)


def _async_method(
    operation: Callable[P, ApiRequest[T]], in_thread: bool = False
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """A method of `AsyncClient`, as from `_method`. `in_thread`: the operation reads a file, which would block the event loop."""

    @wraps(operation)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        make = partial(make_request, operation, *args, **kwargs)
        return await self.perform(await asyncio.to_thread(make) if in_thread else make())

    return signed(method)


class Client(Connections[httpx.BaseTransport]):
    """One server, over connections that stay open. Threads and forked processes may share a client.

    A pickle has no API key: an unpickled client takes it from ATTEND_API_KEY. A deep copy is the client itself.

    Every method raises a refusal as the same exception of `attend.errors` as in the server, with its problems (`at`, `expected`, `got`);
    `Unreachable` or its subclasses `TimedOut` and `Untrusted` if there was no response. Requests that fail in transit or find a full queue
    are repeated according to `retries`; changes of layers, and starts and ends of sessions, only if the server certainly did not begin
    them.
    """

    attend = _method(operations.attend)
    analysis = _method(operations.analysis)
    plan = _method(operations.plan)
    figure = _method(operations.figure)
    words = _method(operations.words)
    vocabulary = _method(operations.vocabulary)
    tokens = _method(operations.tokens)
    layers = _method(operations.layers)
    layer = _method(operations.layer)
    put_layer = _method(operations.put_layer)
    put_layer_file = _method(operations.put_layer_file)
    put_layer_from = _method(operations.put_layer_from)
    layer_file = _method(operations.layer_file)
    layer_weights = _method(operations.layer_weights)
    circuits = _method(operations.circuits)
    delete_layer = _method(operations.delete_layer)
    sessions = _method(operations.sessions)
    about = _method(operations.about)
    metrics = _method(operations.metrics)

    def _open(self) -> None:
        self._opened, self._process = httpx.Client(**self._httpx_options()), os.getpid()

    @property
    def http(self) -> httpx.Client:
        """The httpx client of this process, for example to add `event_hooks`; it is a new one in a forked process.

        A forked process must not use its parent's connections: each could read the other's replies.
        """
        if self._process != os.getpid():
            self._open()
        return self._opened

    def live(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """Whether the server responds."""
        return self._succeeds(operations.live(timeout=timeout))

    def started(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """Whether the server responds and its start is over."""
        return self._succeeds(operations.started(timeout=timeout))

    def ready(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """Whether the server responds and has loaded its layers."""
        return self._succeeds(operations.ready(timeout=timeout))

    def _succeeds(self, request: ApiRequest[bool]) -> bool:
        try:
            return self.perform(request)
        except (Unreachable, CapacityError):
            return False

    def session(
        self,
        layer: str | None = None,
        *,
        id: str | None = None,
        capacity: int | None = None,
        idle_seconds: float | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Session:
        """Start a session: a sequence whose keys and values the server keeps. `with client.session() as session:` deletes it at the end.

        `layer` is by default `default`; `capacity` is the most rows; a session ends after `idle_seconds`, by default 300, without a call.
        With `id` alone, resume the session of that id, which the end of a `with` block does not delete.
        """
        return self.perform(start_or_resume(partial(Session, self), layer, id, capacity, idle_seconds, timeout))

    def perform(self, request: ApiRequest[T]) -> T:
        """The result of a request; with a JSON body once a server or proxy has refused safetensors."""
        if request.json_body is not None and self._binary:
            try:
                return request.result(self._exchange(request))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return request.result(self._exchange(request.as_json()))

    def _exchange(self, request: ApiRequest[Any]) -> httpx.Response:
        """The last response. Raises Unreachable or one of its subclasses if there is none."""
        attempts = Attempts(self.retries, request, self.timeout)
        while (delay := attempts.next_delay(outcome := self._once(request, attempts.left))) is not None:
            time.sleep(delay)
        if isinstance(outcome, Exception):
            raise connection_error(outcome, self.base_url) from outcome
        return outcome

    def _once(self, request: ApiRequest[Any], seconds: float | None) -> Outcome:
        send, headers = self.http.request, request.headers
        try:
            return send(request.method, request.path, content=request.body, headers=headers, timeout=seconds)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._transport is not None:
            raise TypeError("a client with a transport cannot be pickled")
        if isinstance(self._verify, ssl.SSLContext):
            raise TypeError("a client with an SSLContext cannot be pickled; pass the path of the certificates as verify")
        headers = {name: text for name, text in self._headers.items() if name.lower() not in SECRET}
        had_key = self._api_key is not None or len(headers) < len(self._headers)
        arguments = {"timeout": self.timeout, "headers": headers, "retries": self.retries, "verify": self._verify}
        return _unpickle, (self.base_url, arguments, had_key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _unpickle(base_url: str, arguments: dict[str, Any], had_key: bool) -> Client:
    return Client(base_url, api_key=os.environ.get(API_KEY) if had_key else None, **arguments)


class AsyncClient(Connections[httpx.AsyncBaseTransport]):
    """The methods of `Client` with `await`, for one event loop. Raises and retries as `Client` does.

    Arrays are encoded and decoded on the event loop: copying megabytes takes less time than a switch of threads.
    """

    attend = _async_method(operations.attend)
    analysis = _async_method(operations.analysis)
    plan = _async_method(operations.plan)
    figure = _async_method(operations.figure)
    words = _async_method(operations.words)
    vocabulary = _async_method(operations.vocabulary)
    tokens = _async_method(operations.tokens)
    layers = _async_method(operations.layers)
    layer = _async_method(operations.layer)
    put_layer = _async_method(operations.put_layer)
    put_layer_file = _async_method(operations.put_layer_file, in_thread=True)
    put_layer_from = _async_method(operations.put_layer_from, in_thread=True)
    layer_file = _async_method(operations.layer_file)
    layer_weights = _async_method(operations.layer_weights)
    circuits = _async_method(operations.circuits)
    delete_layer = _async_method(operations.delete_layer)
    sessions = _async_method(operations.sessions)
    about = _async_method(operations.about)
    metrics = _async_method(operations.metrics)

    def _open(self) -> None:
        self.http = httpx.AsyncClient(**self._httpx_options())

    async def live(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """As `Client.live`."""
        return await self._succeeds(operations.live(timeout=timeout))

    async def started(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """As `Client.started`."""
        return await self._succeeds(operations.started(timeout=timeout))

    async def ready(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """As `Client.ready`."""
        return await self._succeeds(operations.ready(timeout=timeout))

    async def _succeeds(self, request: ApiRequest[bool]) -> bool:
        try:
            return await self.perform(request)
        except (Unreachable, CapacityError):
            return False

    def session(
        self,
        layer: str | None = None,
        *,
        id: str | None = None,
        capacity: int | None = None,
        idle_seconds: float | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> StartingSession:
        """As `Client.session`, in `async with client.session() as session:` or after `await`."""
        return StartingSession(self.perform(start_or_resume(partial(AsyncSession, self), layer, id, capacity, idle_seconds, timeout)))

    async def perform(self, request: ApiRequest[T]) -> T:
        """As `Client.perform`."""
        if request.json_body is not None and self._binary:
            try:
                return request.result(await self._exchange(request))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return request.result(await self._exchange(request.as_json()))

    async def _exchange(self, request: ApiRequest[Any]) -> httpx.Response:
        attempts = Attempts(self.retries, request, self.timeout)
        while (delay := attempts.next_delay(outcome := await self._once(request, attempts.left))) is not None:
            await asyncio.sleep(delay)
        if isinstance(outcome, Exception):
            raise connection_error(outcome, self.base_url) from outcome
        return outcome

    async def _once(self, request: ApiRequest[Any], seconds: float | None) -> Outcome:
        send, headers = self.http.request, request.headers
        try:
            return await send(request.method, request.path, content=request.body, headers=headers, timeout=seconds)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
