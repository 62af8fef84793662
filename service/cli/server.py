"""The server of one process, which is uvicorn's with another shutdown, and the application that it serves."""

import asyncio
import ctypes
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import structlog
import torch
import uvicorn
from fastapi import FastAPI

from service.cli.logs import configure_logs
from service.cli.signals import exit_with_supervisor, handle_signals, ignore_hangup
from service.settings import Settings
from service.web.app import create_app
from service.web.connections import Connection
from service.web.slow_peers import SlowPeerTimer

log = structlog.get_logger("attend")
POLL = 0.1  # seconds
FIRST_REQUEST = 0.5  # seconds for connections to send their first request once the port is closed
EXIT_SECONDS = 5.0  # for a worker to exit after the time in which its calls should have been answered
SWITCH_SECONDS = 0.0005  # until a thread that decodes a large body releases the GIL; Python's 5 ms would delay small calls
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


class Server(uvicorn.Server):
    """uvicorn's server, with exit status 0 after SIGTERM: uvicorn would raise the signal again at the end.

    When the port closes, it still accepts the connections in the backlog, which closing the socket would reset, and waits FIRST_REQUEST
    seconds for the first request of connections that have sent none.
    """

    @property
    def failed(self) -> bool:
        """Whether the configured layers could not be loaded."""
        service = self.lifespan.state.get("service")
        return service is not None and service.failed

    async def on_tick(self, counter: int) -> bool:
        """Whether the server should exit."""
        return self.failed or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waiting = [connection for listening in sockets or () for connection in _accept_waiting(listening)]
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        loop = asyncio.get_running_loop()
        latest = loop.time() + FIRST_REQUEST
        joining = {loop.create_task(self._serve_accepted(connection)) for connection in waiting}
        await asyncio.sleep(0)
        while (not all(task.done() for task in joining) or self._awaits_requests()) and loop.time() < latest and not self.force_exit:
            await asyncio.sleep(POLL)
        await super().shutdown(sockets)

    async def _serve_accepted(self, connection: socket.socket) -> None:
        make = partial(Connection, self.config, self.server_state, self.lifespan.state)
        with suppress(OSError):  # the client has disconnected
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=self.config.ssl)

    def _awaits_requests(self) -> bool:
        return any(isinstance(connection, Connection) and connection.cycle is None for connection in self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._captured_signals = [captured for captured in self._captured_signals if captured != signal.SIGTERM]


def _accept_waiting(listening: socket.socket) -> Iterator[socket.socket]:
    listening.setblocking(False)
    with suppress(OSError):  # the backlog is empty, or there are no file descriptors left
        while True:
            yield listening.accept()[0]


def application(settings: Settings, threads: int) -> FastAPI:
    """Sets up this process (threads, memory, logs, signals) and returns its application."""
    exit_with_supervisor(exit_patience(settings))
    torch.set_num_threads(threads)
    sys.setswitchinterval(SWITCH_SECONDS)
    keep_memory()
    configure_logs(settings.log_format, settings.log_level)
    app = create_app(settings)
    service, inner = app.state.service, app.router.lifespan_context
    Connection.timer = SlowPeerTimer(
        settings.client_timeout,
        service.metrics.failed,
        settings.access_log,
        partial(service.metrics.answered, "other"),
        settings.min_client_rate,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        handle_signals(service, settings.drain_seconds, is_worker=settings.workers > 1)
        async with inner(app) as state:
            yield state or {}
        ignore_hangup()
        log.info("stopped")

    app.router.lifespan_context = lifespan
    return app


def exit_patience(settings: Settings) -> float:
    """Seconds after SIGTERM in which a worker should have exited."""
    return settings.drain_seconds + settings.shutdown_seconds + EXIT_SECONDS


def keep_memory() -> None:
    """Makes the C library reuse the memory of freed large arrays instead of returning it to the system.

    By default glibc maps new pages for each large block; for bodies of megabytes those page faults take a fifth of a request's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 512 << 20)):
        mallopt(parameter, value)
