"""The ASGI application: every HTTP request becomes a request, which passes the middleware to its endpoint."""

from typing import Any

from starlette.applications import Starlette
from starlette.types import Lifespan, Receive, Scope, Send

from attend.serving.service import Service
from attend.web import openapi
from attend.web.endpoints import EndpointTable
from attend.web.requests import Handler


class Application(Starlette):
    """Starlette with a table of endpoints. Instead of its router and middleware, `handle` gets the requests."""

    def __init__(self, table: EndpointTable, handle: Handler, service: Service, lifespan: "Lifespan[Application]") -> None:
        super().__init__(lifespan=lifespan)
        self.table, self.handle = table, handle
        self.state.service = service

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi.describe(self.table)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        else:
            await self.handle(self.table.request(scope, receive, send))
