"""Lets pages of other origins call: their preflight requests are answered, and replies say which origins may read them."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from attend.web.requests import Handler, HttpRequest

REQUEST_KEY = "attend.request"  # the key of the request in its ASGI scope
EXPOSED_HEADERS = ("X-Request-Id", "Server-Timing", "Retry-After")  # to pages of other origins


class Cors:
    """Middleware for pages of these origins. A preflight request needs no key, since a browser sends none with it."""

    def __init__(self, handle: Handler, origins: Sequence[str]) -> None:
        self.handle = handle
        self._app = CORSMiddleware(self._pass_on, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS)

    async def __call__(self, request: HttpRequest) -> None:
        request.scope[REQUEST_KEY] = request
        try:
            await self._app(request.scope, request.receive, request.send)
        finally:
            del request.scope[REQUEST_KEY]  # without this cycle of references, the request is freed at once

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that is no preflight request, with a `send` that adds headers."""
        request: HttpRequest = scope[REQUEST_KEY]
        request.send = send
        await self.handle(request)
