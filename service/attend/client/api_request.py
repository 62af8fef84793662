"""One HTTP request of a client, and how its response is read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import httpx

from attend.client.arguments import USE_CLIENT_DEFAULT, Timeout
from attend.client.responses import raise_for_status
from attend.wire.negotiation import JSON, SAFETENSORS

T = TypeVar("T")
Repeat = Literal["always", "if_not_begun", "never"]


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[T]):
    """One HTTP request and the reader of its response.

    `repeat`: whether to repeat it after a failure: a computation "always", a change "if_not_begun", that is, if the server certainly
    did not begin it.
    `json_body` returns a JSON body in place of `body`, for servers and proxies that refuse safetensors. `check` returns the response, or
    raises its refusal. `on_unanswered` is called after each attempt that the server may have computed although there is no reply.
    `session` is the id of a session that the body names; a balancer reads it in the header X-Attend-Session.
    """

    method: str
    path: str
    body: bytes | None
    read: Callable[[httpx.Response], T]
    timeout: Timeout = USE_CLIENT_DEFAULT
    media_type: str = JSON
    accept: str = "*/*"
    repeat: Repeat = "always"
    json_body: Callable[[], bytes] | None = None
    check: Callable[[httpx.Response], httpx.Response] = raise_for_status
    on_unanswered: Callable[[], None] = lambda: None
    session: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Accept": self.accept}
        if self.body is not None:
            headers["Content-Type"] = self.media_type
        if self.session is not None:
            headers["X-Attend-Session"] = self.session
        return headers

    def result(self, response: httpx.Response) -> T:
        """The result that the response contains. Raises the refusal if it is no success."""
        return self.read(self.check(response))

    def as_json(self) -> "ApiRequest[T]":
        """The operation with a JSON body, and JSON in reply where the reply may be safetensors."""
        if self.json_body is None:
            return self
        accept = JSON if SAFETENSORS in self.accept else self.accept
        return replace(self, body=self.json_body(), media_type=JSON, accept=accept, json_body=None)
