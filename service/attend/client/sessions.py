"""`Session` and `AsyncSession`: a sequence whose keys and values the server keeps. Their methods are the operations of this file.

A session stores its length and sends it with every step as `expected_length`. So a step can be repeated after a lost connection: the server
refuses it if it was computed before, and the caller gets ReplyLost.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx
import numpy as np

from attend.client.api_request import ApiRequest
from attend.client.arguments import USE_CLIENT_DEFAULT, TensorLike, Timeout
from attend.client.fields import StepFields
from attend.client.methods import make_request, signed
from attend.client.operations import attend_at, request_fields
from attend.client.responses import AttendResult, raise_for_status, read_document
from attend.errors import AttendError, InvalidRequest, LengthMismatch, ReplyLost
from attend.wire.client_codec import encode_json_request
from attend.wire.negotiation import SAFETENSORS
from attend.wire.schemas.sessions import SessionAttendRequest, SessionInfo

SESSIONS = "/sessions"
T = TypeVar("T")
P = ParamSpec("P")
MakeSession = Callable[[SessionInfo, bool], T]  # from the server's description, and whether the session existed before


class SessionState:
    """The state of a session of either client. `length`: number of rows after the last reply or refusal.

    `resumed`: the session was not started by this object, which therefore does not delete it at the end of a `with` block.
    """

    def __init__(self, document: SessionInfo, resumed: bool) -> None:
        self.id, self.layer, self.length, self.resumed = document.id, document.layer, document.length, resumed
        self._unanswered: bytes | None = None  # body of the last step, if it may have been computed and had no reply

    @property
    def path(self) -> str:
        return session_path(self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}; layer {self.layer.name!r}, length {self.length})"


def session_path(id: str) -> str:
    return f"{SESSIONS}/{quote(id, safe='')}"


def start_or_resume(
    make_session: MakeSession[T], layer: str | None, id: str | None, capacity: int | None, idle_seconds: float | None, timeout: Timeout
) -> ApiRequest[T]:
    """Start a session, or find the one with that id. Raises InvalidRequest for an id together with properties of a new session."""
    properties = {"layer": layer, "capacity": capacity, "idle_seconds": idle_seconds}
    if id is None:
        return _create(SESSIONS, properties, make_session, timeout)
    if given := [name for name, value in properties.items() if value is not None]:
        raise InvalidRequest.where("/id", f"an id, or {', '.join(given)} of a new session", "both")
    return ApiRequest("GET", session_path(id), None, lambda response: make_session(_document(response), True), timeout)


def fork(make_session: MakeSession[T], session: SessionState, length: int | None, timeout: Timeout) -> ApiRequest[T]:
    """Start a session with the first rows of another one."""
    return _create(f"{session.path}/fork", {"length": length}, make_session, timeout)


def _create(path: str, fields: Mapping[str, Any], make_session: MakeSession[T], timeout: Timeout) -> ApiRequest[T]:
    body = encode_json_request(fields, {})
    return ApiRequest("POST", path, body, lambda response: make_session(_document(response), False), timeout, repeat="if_not_begun")


def _document(response: httpx.Response) -> SessionInfo:
    return read_document(SessionInfo, response)


def attend(
    session: SessionState,
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    *,
    timeout: Timeout = USE_CLIENT_DEFAULT,
    **more: Unpack[StepFields],
) -> ApiRequest[AttendResult]:
    """Append `key` and `value`, by default the query, and attend to all rows of the session. Tensors are those of `Client.attend`.

    Masks, biases and tokens cover all rows. `query_offset` is by default the length before the call, and so is `expected_length`.
    Raises ReplyLost if an earlier attempt was computed and its reply lost: the rows have been appended, and the same call with
    `append=False` and the old length as `query_offset` returns the reply. Raises LengthMismatch if the session has another length for
    another reason. After both, `length` is the true one.
    """
    given = {"expected_length": session.length, **{name: value for name, value in more.items() if value is not None}}
    fields = request_fields(SessionAttendRequest, query=query, key=key, value=value, **given)
    request = attend_at(f"{session.path}/attend", fields, timeout)

    def keep_body() -> None:
        session._unanswered = request.body

    def read(response: httpx.Response) -> AttendResult:
        result = request.read(response)
        session.length, session._unanswered = result.session_length or 0, None
        return result

    def check(response: httpx.Response) -> httpx.Response:
        try:
            return raise_for_status(response)
        except LengthMismatch as error:
            appended = 0 if fields.get("append") is False else _rows(query if key is None else key)
            computed = request.body == session._unanswered and error.length == fields["expected_length"] + appended
            session._unanswered = None
            if error.length is not None:
                session.length = error.length
            if not computed:
                raise
            detail = f"the session has {error.length} rows, as after this step: an earlier attempt was computed, and its reply lost"
            raise ReplyLost(detail, error.problems, error.length) from None

    return replace(request, read=read, check=check, on_unanswered=keep_body)


def _rows(tensor: Any) -> int:
    """The number of rows of a tensor [1, n, width] or [n, width] in any form."""
    shape = tensor["shape"] if isinstance(tensor, Mapping) else np.shape(tensor)
    return int(shape[-2])


def info(session: SessionState, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[SessionInfo]:
    """The session as the server describes it: its bytes, and when it ends without another call. Sets `length`."""
    return ApiRequest("GET", session.path, None, _updating(session, lambda document: document), timeout)


def truncate(session: SessionState, length: int, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[None]:
    """Keep the first `length` rows. Raises SessionConflict if the layer's window needs rows that have been freed."""
    return ApiRequest("PATCH", session.path, encode_json_request({"length": length}, {}), _updating(session, lambda _: None), timeout)


def export(session: SessionState, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[bytes]:
    """The rows as a safetensors file, for `load`."""
    return ApiRequest("GET", f"{session.path}/cache", None, lambda response: response.content, timeout)


def load(session: SessionState, file: bytes | str | Path, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[None]:
    """Replace the rows by those of a file of `export`, a path or bytes. Raises SessionConflict for that of another layer."""
    body = file if isinstance(file, bytes) else Path(file).read_bytes()
    return ApiRequest("PUT", f"{session.path}/cache", body, _updating(session, lambda _: None), timeout, SAFETENSORS)


def delete(session: SessionState, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[None]:
    """End the session, and free its memory."""
    return ApiRequest("DELETE", session.path, None, lambda _: None, timeout, repeat="if_not_begun")


def _updating(session: SessionState, result: Callable[[SessionInfo], T]) -> Callable[[httpx.Response], T]:
    def read(response: httpx.Response) -> T:
        document = _document(response)
        session.length = document.length
        return result(document)

    return read


class Performer(Protocol):
    def perform(self, request: ApiRequest[T]) -> T: ...


class AsyncPerformer(Protocol):
    async def perform(self, request: ApiRequest[T]) -> T: ...


def _method(operation: Callable[Concatenate[SessionState, P], ApiRequest[T]]) -> Callable[Concatenate["Session", P], T]:
    """A method of `Session` with the arguments of the operation; it returns the result."""

    @wraps(operation)
    def method(self: "Session", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._client.perform(make_request(operation, self, *args, **kwargs))

    return signed(method)


def _async_method(
    operation: Callable[Concatenate[SessionState, P], ApiRequest[T]], in_thread: bool = False
) -> Callable[Concatenate["AsyncSession", P], Coroutine[Any, Any, T]]:
    """A method of `AsyncSession`, as from `_method`. `in_thread`: the operation reads a file, which would block the event loop."""

    @wraps(operation)
    async def method(self: "AsyncSession", /, *args: P.args, **kwargs: P.kwargs) -> T:
        make = partial(make_request, operation, self, *args, **kwargs)
        return await self._client.perform(await asyncio.to_thread(make) if in_thread else make())

    return signed(method)


class Session(SessionState):
    """A session of `Client`, for one caller at a time. A `with` block deletes it at its end, unless it was resumed by its id."""

    attend = _method(attend)
    info = _method(info)
    truncate = _method(truncate)
    export = _method(export)
    load = _method(load)
    delete = _method(delete)

    def __init__(self, client: Performer, document: SessionInfo, resumed: bool) -> None:
        super().__init__(document, resumed)
        self._client = client

    def fork(self, length: int | None = None, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> "Session":
        """A new session with the first `length` rows, or all. Both share memory until one of them writes to it."""
        return self._client.perform(fork(partial(Session, self._client), self, length, timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.resumed:
            with suppress(AttendError):  # it ends by itself when it is idle
                self.delete()


class AsyncSession(SessionState):
    """A session of `AsyncClient`: the methods of `Session` with `await`."""

    attend = _async_method(attend)
    info = _async_method(info)
    truncate = _async_method(truncate)
    export = _async_method(export)
    load = _async_method(load, in_thread=True)
    delete = _async_method(delete)

    def __init__(self, client: AsyncPerformer, document: SessionInfo, resumed: bool) -> None:
        super().__init__(document, resumed)
        self._client = client

    def fork(self, length: int | None = None, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> "StartingSession":
        """As `Session.fork`."""
        return StartingSession(self._client.perform(fork(partial(AsyncSession, self._client), self, length, timeout)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.resumed:
            with suppress(AttendError):
                await self.delete()


class StartingSession:
    """An `AsyncSession` that `await` or `async with` starts."""

    def __init__(self, starting: Coroutine[Any, Any, AsyncSession]) -> None:
        self._starting = starting

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._starting.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._starting
        return self._session

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.__aexit__(kind, error, trace)
