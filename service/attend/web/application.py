"""The ASGI application: every HTTP request becomes a request, which passes the middleware to its endpoint."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.types import Lifespan, Receive, Scope, Send

from attend.serving.service import Service
from attend.serving.words.encoder import TextEncoder
from attend.serving.words.tokens import Tokenizers
from attend.web import openapi
from attend.web.endpoints import EndpointTable
from attend.web.requests import Handler
from attend.web.routes import attend, health, layers, page, sessions, words
from attend.web.v2 import routes as v2
from attend.web.v2.description import ProtocolExtensions


class Application(Starlette):
    """Starlette with a table of endpoints. Instead of its router and middleware, `handle` gets the requests.

    Its state has what endpoints answer with.
    """

    def __init__(
        self,
        service: Service,
        extensions: ProtocolExtensions,
        index_members: Mapping[str, Any],
        middleware: Callable[[Handler], Handler],
        lifespan: "Lifespan[Application]",
    ) -> None:
        """`index_members`: members of the JSON index that depend on the settings; `middleware` returns a handler around another."""
        super().__init__(lifespan=lifespan)
        self.service = self.state.service = service
        self.state.extensions, self.state.index_members, self.state.openapi = extensions, index_members, self.openapi
        one_worker = extensions.workers == 1  # a layer loaded on demand would exist in one worker only
        self.state.encoder, self.state.tokenizers = TextEncoder(service, one_worker), Tokenizers(service)
        self.table = EndpointTable()
        for module in (attend, layers, sessions, words, v2, page, health, openapi):
            self.table.include(module.endpoints)
        self.handle = middleware(self.table.call)
        self._document: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self._document is None:
            self._document = openapi.describe(self.table)
        return self._document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        else:
            await self.handle(self.table.request(self, self.service, scope, receive, send))
