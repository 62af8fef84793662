"""The server's processes: one, or a supervisor with workers behind the same socket; and what SIGTERM does to each.

SIGTERM: /health/ready turns 503 while work is still taken, so that load balancers look away; then the door closes, accepted work is
answered, and the process exits. SIGINT, or a second SIGTERM, skips the wait.
"""

import asyncio
import ctypes
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType

import structlog
import torch
import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from service.cli.logs import configure_logs
from service.serving.engine import Engine
from service.serving.metrics import MULTIPROCESS
from service.settings import Settings
from service.web.app import create_app

SILENCE = 60  # seconds until a mute worker is replaced: it may be importing torch, or encoding a long reply

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def serve_processes(settings: Settings, threads: int, listening: socket.socket) -> None:
    """Serves on the socket until told to stop."""
    configure_logs(settings.log_format, settings.log_level)
    address, port = listening.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    structlog.get_logger("attend").info("listening", url=url, workers=settings.workers, threads=threads)
    config = uvicorn.Config(
        partial(_application, settings, threads),
        factory=True,
        workers=settings.workers,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        timeout_worker_healthcheck=SILENCE,
    )
    if settings.workers == 1:
        uvicorn.Server(config).run([listening])
        return
    with tempfile.TemporaryDirectory(prefix="attend-metrics-") as shared:
        os.environ[MULTIPROCESS] = shared
        Supervisor(config, [listening]).run()


class Supervisor(Multiprocess):
    """uvicorn's supervisor, which leaves the door to its workers once they are to leave: the last to close it closes it for all.

    Otherwise newcomers would wait at a socket that the supervisor holds open and nobody answers.
    """

    def terminate_all(self) -> None:
        super().terminate_all()
        for listening in self.sockets:
            listening.close()


def _application(settings: Settings, threads: int) -> FastAPI:
    """The application of one process; made in that process."""
    torch.set_num_threads(threads)
    keep_memory()
    configure_logs(settings.log_format, settings.log_level)
    app = create_app(settings)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        drain_on_sigterm(app.state.engine, settings.drain_seconds)
        async with inner(app):
            yield

    app.router.lifespan_context = lifespan
    return app


def keep_memory() -> None:
    """Has the C library keep what large arrays leave, for the next ones, instead of giving every page back and being handed it anew.

    glibc maps each block above its threshold afresh; for bodies of megabytes those page faults are a fifth of a request's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 512 << 20)):
        mallopt(parameter, value)


def drain_on_sigterm(engine: Engine, seconds: float) -> None:
    """Puts the drain between SIGTERM and what the server would do at once. To be called on the server's loop."""
    close, loop = signal.getsignal(signal.SIGTERM), asyncio.get_running_loop()
    if not callable(close) or not seconds:
        return

    def drain(number: int, frame: FrameType | None) -> None:
        if engine.draining:
            close(number, frame)
            return
        engine.draining = True
        loop.call_soon_threadsafe(loop.call_later, seconds, close, number, frame)

    signal.signal(signal.SIGTERM, drain)
