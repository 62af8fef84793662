"""The server of one process: the application that it serves, and its shutdown.

A worker whose supervisor dies exits as after SIGTERM. What runs in a thread when the time for answers is over is left behind.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing import parent_process
from types import FrameType
from typing import Any

import structlog
import torch
import uvicorn
from starlette.applications import Starlette

from attend.cli.logs import configure_logs
from attend.cli.signals import SignalHandlers, exit_timeout_of
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.connections import OPTIONS_KEY, Connection

log = structlog.get_logger("attend")
POLL = 0.1  # seconds
FIRST_REQUEST = 1.0  # seconds for connections to send their first request once the port is closed
LEAVE_SECONDS = 2.0  # after the time in which calls are answered: for the rest of the shutdown
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

    @property
    def exit_status(self) -> int:
        """The status with which the process exits once it has stopped serving."""
        return 1 if self.failed else 128 + signal.SIGINT if signal.SIGINT in self._captured_signals else 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves on these sockets. uvicorn would leave a TLS handshake asyncio's minute."""
        await super().startup([])
        for listening in sockets or ():
            make, options = self._protocol()
            self.servers.append(
                await asyncio.get_running_loop().create_server(make, sock=listening, backlog=self.config.backlog, **options)
            )

    def _protocol(self) -> tuple[Callable[[], Connection], dict[str, Any]]:
        """What makes a connection, and how it is encrypted: its TLS handshake may take as long as the headers of a request."""
        make = partial(Connection, self.config, self.server_state, self.lifespan.state)
        if self.config.ssl is None:
            return make, {}
        return make, {"ssl": self.config.ssl, "ssl_handshake_timeout": self.lifespan.state[OPTIONS_KEY].timer.timeout}

    async def on_tick(self, counter: int) -> bool:
        """Whether the server should exit."""
        return self.failed or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        exit_within((self.config.timeout_graceful_shutdown or 0) + LEAVE_SECONDS, lambda: self.exit_status)
        still_open = [listening.dup() for listening in sockets or ()]
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        waiting = [connection for listening in still_open for connection in _accept_waiting(listening)]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_REQUEST
        joining = {loop.create_task(self._serve_accepted(connection)) for connection in waiting}
        await asyncio.sleep(0)
        while (not all(task.done() for task in joining) or self._awaits_requests()) and loop.time() < deadline and not self.force_exit:
            await asyncio.sleep(POLL)
        await super().shutdown(sockets)

    async def _serve_accepted(self, connection: socket.socket) -> None:
        make, options = self._protocol()
        with suppress(OSError):  # the client has disconnected
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, **options)

    def _awaits_requests(self) -> bool:
        return any(isinstance(connection, Connection) and connection.cycle is None for connection in self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:
            exit_within(LEAVE_SECONDS, lambda: self.exit_status)
        self._captured_signals = [captured for captured in self._captured_signals if captured != signal.SIGTERM]


def _accept_waiting(listening: socket.socket) -> Iterator[socket.socket]:
    """The connections of the backlog. The socket is closed as soon as there is none: one that comes in between would be reset."""
    listening.setblocking(False)
    with listening, suppress(OSError):  # the backlog is empty, or there are no file descriptors left
        while True:
            yield listening.accept()[0]


def exit_with_supervisor(exit_timeout: float) -> None:
    """Makes this worker exit when its supervisor dies: as after SIGTERM, and by force after `exit_timeout` seconds."""
    supervisor = parent_process()
    if supervisor is None:  # this is the only process
        return

    def wait() -> None:
        supervisor.join()
        log.error("supervisor died", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
        exit_within(exit_timeout, lambda: 1)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()


def exit_within(seconds: float, status: Callable[[], int]) -> None:
    """Makes this process exit after `seconds`, if it still exists then, with `status()`.

    A thread cannot be stopped, and Python waits at its end for all threads of pools: for a computation of minutes, say, that nobody needs.
    """

    def wait() -> None:
        time.sleep(seconds)
        names = sorted(thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread())
        log.warning("threads left behind", threads=names, pid=os.getpid())
        os._exit(status())

    threading.Thread(target=wait, name="exit", daemon=True).start()


def application(settings: Settings, threads: int, pages: Mapping[str, str]) -> Starlette:
    """Sets up this process (threads, memory, logs, signals) and returns its application. Once it is ready, it logs the `pages`."""
    exit_with_supervisor(exit_timeout_of(settings))
    torch.set_num_threads(threads)
    sys.setswitchinterval(SWITCH_SECONDS)
    keep_memory()
    configure_logs(settings.log_format, settings.log_level)
    app = create_app(settings, pages)
    service, inner = app.state.service, app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        SignalHandlers(service, settings.drain_seconds, is_worker=settings.workers > 1).install()
        async with inner(app) as state:
            yield state or {}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its handler uses the event loop, which is about to end
        log.info("stopped")

    app.router.lifespan_context = lifespan
    return app


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
