"""The server's processes: one, or a supervisor with workers behind the same socket; and what signals do to each.

SIGTERM: /health/ready turns 503 while work is still taken, so that load balancers look away; then the door closes, accepted work is
answered, and the process exits. SIGINT, or a second SIGTERM, skips the wait. SIGHUP is SIGTERM to a server of one process; a supervisor
restarts its workers one by one. A worker whose supervisor dies leaves as after SIGTERM. `docs/operations.md` is the table for operators.
"""

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import wait
from types import FrameType

import structlog
import torch
import typer
import uvicorn
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from service.cli.exits import complain
from service.cli.logs import configure_logs
from service.serving.metrics import MULTIPROCESS
from service.serving.service import Service
from service.settings import Settings
from service.web.app import create_app, is_local
from service.web.connections import Connection, Watch
from service.web.keys import read_keys

log = structlog.get_logger("attend")
SHARED_MEMORY = "/dev/shm"
SILENCE = 60  # seconds until a mute worker is replaced: it may be importing torch, or encoding a long reply
LOOK = 0.1  # seconds between two looks whether a signal has come
SWITCH_SECONDS = 0.0005  # after which a thread that decodes a large body lets the event loop run; Python's 5 ms would hold up light calls
FIRST_REQUEST = 0.5  # seconds that connections without a request have for it once the port is closed
LEAVING = 5.0  # seconds that a worker may take to end once all its work should be done

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def serve_processes(settings: Settings, threads: int, listening: socket.socket) -> None:
    """Serves on the socket until told to stop."""
    configure_logs(settings.log_format, settings.log_level)
    log.info("listening", url=_url(settings, listening), workers=settings.workers, threads=threads)
    _warn_of_open_doors(settings)
    allow_many_connections()
    config = uvicorn.Config(
        partial(_application, settings, threads),
        factory=True,
        workers=settings.workers,
        access_log=False,
        log_config=None,
        server_header=False,
        http=Connection,
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        root_path=settings.root_path,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_keep_alive=settings.keepalive_timeout,  # type: ignore[arg-type]  # any number of seconds will do
        timeout_graceful_shutdown=settings.shutdown_seconds,
        timeout_worker_healthcheck=SILENCE,
    )
    if settings.workers == 1:
        Server(config).run([listening])
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="attend-metrics-", dir=shared_folder())
    except OSError:
        complain("serve", f"several workers count together in a folder, and neither $TMPDIR, /tmp nor {SHARED_MEMORY} is writable")
        raise typer.Exit(1) from None
    with folder as shared:
        os.environ[MULTIPROCESS] = shared
        Supervisor(config, [listening], settings.drain_seconds + settings.shutdown_seconds + LEAVING).run()


def _warn_of_open_doors(settings: Settings) -> None:
    """Of what is allowed, and is rarely meant: doors that are open to everyone, or to nobody."""
    if settings.keys_file is None and not is_local(settings):
        log.warning("open to everyone", reason="there are no keys (keys_file), and whoever reaches the server may call it")
    elif settings.keys_file is not None and not read_keys(settings.keys_file):
        log.warning("open to nobody", reason="the file of keys (keys_file) holds none", file=str(settings.keys_file))


def shared_folder() -> str:
    """Where workers may count together: the temporary folder, or shared memory where that is not writable. Raises OSError."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if os.access(SHARED_MEMORY, os.W_OK):
            return SHARED_MEMORY
        raise


def allow_many_connections() -> None:
    """Takes all the open files that the system grants: each connection is one, and the customary 1024 are soon used up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _url(settings: Settings, listening: socket.socket) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    scheme, (address, port) = "https" if settings.tls_cert else "http", listening.getsockname()[:2]
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, for which SIGTERM is a way to end well: it would otherwise raise it again at the end, for exit status 143.

    When the port closes, it answers the connections that wait to be accepted, and those that were accepted and have not sent a request yet.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        accepted = [connection for listening in sockets or () for connection in _accept_waiting(listening)]
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        loop = asyncio.get_running_loop()
        latest = loop.time() + FIRST_REQUEST
        joining = {loop.create_task(self._serve_accepted(connection)) for connection in accepted}
        await asyncio.sleep(0)
        while (not all(task.done() for task in joining) or self._awaits_requests()) and loop.time() < latest and not self.force_exit:
            await asyncio.sleep(LOOK)
        await super().shutdown(sockets)

    async def _serve_accepted(self, connection: socket.socket) -> None:
        make = partial(Connection, self.config, self.server_state, self.lifespan.state)
        with suppress(OSError):  # the other side has gone
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=self.config.ssl)

    def _awaits_requests(self) -> bool:
        return any(isinstance(connection, Connection) and connection.cycle is None for connection in self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._captured_signals = [captured for captured in self._captured_signals if captured != signal.SIGTERM]


class Supervisor(Multiprocess):
    """uvicorn's supervisor, which leaves the door to its workers once they are to leave: the last to close it closes it for all.

    Otherwise newcomers would wait at a socket that the supervisor holds open and nobody answers. The gauges of a worker that has gone are
    forgotten, its counters are kept. A worker that stands still holds up neither the others' leaving nor, beyond `patience` seconds,
    the supervisor's.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], patience: float) -> None:
        super().__init__(config, sockets)
        self.patience = patience
        self._replaced: list[Process] = []  # workers that were told to leave, and have not ended

    def init_processes(self) -> None:
        super().init_processes()
        self._ask_in_our_way()

    def _ask_in_our_way(self) -> None:
        for process in self.processes:
            process.ping = partial(answers, process, lambda: bool(self.signal_queue))  # type: ignore[method-assign]

    def keep_subprocess_alive(self) -> None:
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        self._ask_in_our_way()
        for pid in before - {process.pid for process in self.processes}:
            _forget_gauges(pid)
            log.warning("worker died", pid=pid)

    def restart_all(self) -> None:
        """Replace the workers one by one. An old worker is told to leave once the new one is ready, and the next one waits until it has
        left: no more than one worker is there twice. SIGTERM and SIGINT end this."""
        log.info("restarting workers")
        for index, old in enumerate(self.processes):
            new = Process(self.config, self.sockets)
            new.start()
            if not self._becomes_ready(new):
                new.kill()
                new.join()
                _forget_gauges(new.pid)
                if not self._is_called_away():
                    log.error("restart ended", reason="a new worker did not become ready; the old ones stay", pid=old.pid)
                return
            self.processes[index] = new
            self._ask_in_our_way()
            self._replaced.append(old)
            _send(old, signal.SIGHUP)
            self._wait_for_replaced()
            if self._is_called_away():
                return
            log.info("worker replaced", pid=old.pid, by=new.pid)

    def _becomes_ready(self, worker: Process) -> bool:
        latest = time.monotonic() + SILENCE
        while not self._is_called_away() and worker.exitcode is None and time.monotonic() < latest:
            if worker.wait_until_ready(LOOK):
                return True
        return False

    def _wait_for_replaced(self) -> None:
        """Return when the replaced workers have ended, or when this process is to leave; those that stand still are killed."""
        latest = time.monotonic() + self.patience
        while self._replaced and not self._is_called_away():
            process = self._replaced[0]
            process.process.join(LOOK)
            if process.exitcode is None and time.monotonic() > latest:
                self._kill(process)
            elif process.exitcode is not None:
                _forget_gauges(process.pid)
                self._replaced.remove(process)

    def _is_called_away(self) -> bool:
        return signal.SIGTERM in self.signal_queue or signal.SIGINT in self.signal_queue

    def terminate_all(self) -> None:
        super().terminate_all()
        for process in self._replaced:
            _send(process, signal.SIGTERM)
        for listening in self.sockets:
            listening.close()

    def join_all(self) -> None:
        latest = time.monotonic() + self.patience
        for process in (*self.processes, *self._replaced):
            process.process.join(max(0.0, latest - time.monotonic()))
            if process.exitcode is None:
                self._kill(process)
        super().join_all()

    def _kill(self, process: Process) -> None:
        log.warning("worker killed", pid=process.pid, reason=f"it had not ended after {self.patience:g} s")
        process.process.kill()
        process.process.join()


def _accept_waiting(listening: socket.socket) -> Iterator[socket.socket]:
    """The connections that wait to be accepted. Closing the socket would reset them."""
    listening.setblocking(False)
    with suppress(OSError):  # there are no more, or no more file descriptors
        while True:
            yield listening.accept()[0]


def _send(worker: Process, number: int) -> None:
    """Sends a signal to a worker that has not ended."""
    if worker.exitcode is None and worker.pid is not None:
        os.kill(worker.pid, number)


def _forget_gauges(pid: int | None) -> None:
    """Of a worker that has ended: what it held is held no more; what it counted stays."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # the library has no annotations


def answers(worker: Process, called_away: Callable[[], bool], timeout: float = 5) -> bool:
    """Whether the worker answers in time. One that dies over the question is noticed at once: uvicorn would wait for it all that time.
    Whoever is called away meanwhile takes the worker at its word."""
    raw = time.monotonic()
    try:
        worker.parent_conn.send(b"ping")
        while not (came := wait([worker.parent_conn, worker.process.sentinel], LOOK)):
            if called_away():
                return True
            if time.monotonic() > raw + timeout:
                return False
        if worker.parent_conn not in came:
            return False
        worker.parent_conn.recv()
    except (OSError, EOFError):
        return False
    return True


def _application(settings: Settings, threads: int) -> FastAPI:
    """The application of one process; made in that process."""
    leave_with_parent(settings.drain_seconds + settings.shutdown_seconds + LEAVING)
    torch.set_num_threads(threads)
    sys.setswitchinterval(SWITCH_SECONDS)
    keep_memory()
    configure_logs(settings.log_format, settings.log_level)
    app = create_app(settings)
    inner = app.router.lifespan_context
    metrics = app.state.service.metrics
    Connection.watch = Watch(
        settings.client_timeout, metrics.failed, settings.access_log, partial(metrics.answered, "other"), settings.min_client_rate
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        handle_signals(app.state.service, settings.drain_seconds, is_worker=settings.workers > 1)
        async with inner(app):
            yield
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the event loop is about to end
        log.info("stopped")

    app.router.lifespan_context = lifespan
    return app


def leave_with_parent(patience: float) -> None:
    """Makes a worker leave, as after SIGTERM, when its supervisor has died without a word; by force after `patience` seconds."""
    parent = parent_process()
    if parent is None:  # this is the only process
        return

    def wait_for_parent() -> None:
        parent.join()
        log.error("supervisor died", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
        os._exit(1)

    threading.Thread(target=wait_for_parent, name="parent", daemon=True).start()


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


def handle_signals(service: Service, seconds: float, is_worker: bool) -> None:
    """Puts the drain between SIGTERM and what the server would do at once, and has other doors close with the server's. To be called on the
    server's loop.

    SIGHUP is SIGTERM to the only process, unless it was started with SIGHUP ignored (nohup). To a worker it says that another takes over:
    it ends its connections as in a drain, but stays ready, since a load balancer must not look away from the others.
    """
    close, interrupt, loop = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), asyncio.get_running_loop()
    if not callable(close) or not callable(interrupt):
        return

    def stop(frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(partial(log.info, "stopping"))
        loop.call_soon_threadsafe(service.stop_admitting)
        close(signal.SIGTERM, frame)

    def drain(number: int, frame: FrameType | None) -> None:
        if service.draining or not seconds:
            stop(frame)
            return
        service.draining = True
        loop.call_soon_threadsafe(partial(log.info, "draining", seconds=seconds))
        loop.call_soon_threadsafe(loop.call_later, seconds, stop, frame)

    def hang_up(number: int, frame: FrameType | None) -> None:
        if service.draining or service.retiring:  # a terminal that closes may say it twice
            return
        if not is_worker:
            drain(number, frame)
            return
        service.retiring = True
        loop.call_soon_threadsafe(partial(log.info, "retiring", seconds=seconds))
        loop.call_soon_threadsafe(loop.call_later, seconds, retire, frame)

    def retire(frame: FrameType | None) -> None:
        if not service.draining:
            stop(frame)

    def leave(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(service.stop_admitting)
        interrupt(number, frame)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)
