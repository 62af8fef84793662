"""The application in this process: on a real socket, or without one."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from attend.limits import BatchLimits
from attend.serving.service import Service
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.connections import Connection
from support.scheduler import Attention, heavy_call
from support.waiting import PATIENCE, until


@contextmanager
def serve_here(settings: Settings) -> Iterator[str]:
    """The URL of a server in a thread of this process, once it is ready. It starts in a tenth of the time of `start_server`."""
    with _serve(create_app(settings)) as url:
        yield url


@contextmanager
def serve_service(settings: Settings) -> Iterator[tuple[str, Service]]:
    """The URL of a server in a thread of this process, once it is ready, and its service."""
    app = create_app(settings)
    with _serve(app) as url:
        yield url, app.state.service


@contextmanager
def collecting_server(batch_calls: int, **settings: Any) -> Iterator[tuple[str, Callable[[int], AbstractContextManager[None]]]]:
    """The URL of a server in this process, and `collect`: calls sent in `with collect(n)` are computed once there are n of them, in batches
    of at most `batch_calls`. One more call, which is a batch of its own, holds the device until then.
    """
    app = create_app(Settings(**{"access_log": False, "batch_delay": 0.001, **settings}))  # with a delay, small calls wait, too
    scheduler, inner = app.state.service.scheduler, app.router.lifespan_context
    scheduler.batch_limits = BatchLimits(batch_calls)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.loop = asyncio.get_running_loop()
        async with inner(app):
            yield

    @contextmanager
    def collect(calls: int) -> Iterator[None]:
        attention = Attention()
        attention.gate.clear()
        holding = scheduler.submit(heavy_call(attention))
        asyncio.run_coroutine_threadsafe(holding, app.state.loop)
        assert attention.entered.acquire(timeout=PATIENCE)
        try:
            yield
            until(lambda: scheduler.load[0] == calls, f"{calls} calls that wait")
        finally:
            attention.gate.set()

    app.router.lifespan_context = lifespan
    with _serve(app) as url:
        yield url, collect


@contextmanager
def _serve(app: FastAPI) -> Iterator[str]:
    config = uvicorn.Config(app, http=Connection, log_config=None, server_header=False, timeout_graceful_shutdown=20)
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, "ready")
        yield url
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def answers(settings: Settings, *requests: dict[str, Any]) -> list[httpx.Response]:
    """The replies of an application with these settings, without a socket, so that `host` may be any address. The default is POST."""

    async def ask() -> list[httpx.Response]:
        async with application(settings) as client:
            return [await client.request(**{"method": "POST", **request}) for request in requests]

    return asyncio.run(ask())


@asynccontextmanager
async def application(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this event loop, which is ready."""
    app = create_app(settings)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    async with app.router.lifespan_context(app), client, asyncio.timeout(PATIENCE):
        while (await client.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.001)
        yield client
