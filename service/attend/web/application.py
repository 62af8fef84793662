"""The ASGI application: every HTTP request becomes a record, which passes the middleware to its endpoint."""

from typing import Any

from fastapi import FastAPI
from starlette.types import Lifespan, Receive, Scope, Send

from attend.serving.service import Service
from attend.web import openapi
from attend.web.endpoints import EndpointTable
from attend.web.records import Handler


class Application(FastAPI):
    """FastAPI with these endpoints. Instead of its router and middleware, `handle` gets the requests."""

    def __init__(self, table: EndpointTable, handle: Handler, service: Service, lifespan: Lifespan[FastAPI]) -> None:
        routes = [endpoint.route for endpoint in table]
        super().__init__(routes=[*routes], lifespan=lifespan, openapi_url=None)
        self.table, self.handle = table, handle
        self.state.service = service

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi.describe(self.table)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        else:
            await self.handle(self.table.record(scope, receive, send))
