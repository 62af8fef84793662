"""The processes of `attend serve`: one server, or a supervisor and several workers that share one listening socket.

A supervisor imports neither torch nor the server, which take two seconds and 200 MB: its workers do.
"""

import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

import structlog
import typer
import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from attend.cli.logs import configure_logs
from attend.cli.signals import SKIP_DRAIN, exit_timeout_of
from attend.cli.terminal import fail
from attend.serving.metrics import MULTIPROCESS
from attend.settings import Settings
from attend.web.keys import read_keys
from attend.wire.native import numbers

if TYPE_CHECKING:
    from starlette.applications import Starlette

log = structlog.get_logger("attend")
POLL = 0.1  # seconds
SHARED_MEMORY = "/dev/shm"
FOLDER_PREFIX = "attend-"  # of the folder that workers share
ANSWER_SECONDS = 60  # in which a worker must answer, or it is replaced: it may be importing torch, or encoding a long reply
LONGEST_PAUSE = 60.0  # seconds between two attempts to start a worker; 1 s after the second failure, then doubled
WITHOUT_EXTENSION = (
    "no compiled extension is installed: Python reads and writes numbers in JSON, which takes 3 to 20 times as long and more memory, "
    "and delays other requests meanwhile (install a C compiler, then attend again)"
)


def serve_processes(settings: Settings, threads: int, listening: socket.socket) -> None:
    """Serves on the socket until a signal ends it. Raises typer.Exit(1) if the layers cannot be loaded."""
    configure_logs(settings.log_format, settings.log_level)
    url = _url(settings, listening)
    log.info("listening", url=url, workers=settings.workers, threads=threads, json_numbers=numbers.variant())
    if numbers.variant() == numbers.PYTHON:
        log.warning(WITHOUT_EXTENSION)
    _warn_about_keys(settings)
    allow_many_connections()
    config = uvicorn.Config(
        partial(_application, settings, threads, _pages(url)),
        factory=True,
        workers=settings.workers,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        http="attend.web.connections:Connection",
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        root_path=settings.root_path,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_keep_alive=settings.keepalive_timeout,  # type: ignore[arg-type]  # uvicorn accepts fractions of seconds
        timeout_graceful_shutdown=settings.shutdown_seconds,
        timeout_worker_healthcheck=ANSWER_SECONDS,
    )
    if settings.workers == 1:
        from attend.cli.server import Server

        server = Server(config)
        server.run([listening])
        if server.failed:
            log.error("stopping", reason="the layers cannot be loaded; the lines before this one say why")
            raise typer.Exit(1)
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=shared_folder())  # for this user only
    except OSError:
        fail("serve", f"several workers need a folder that they share, and neither $TMPDIR, /tmp nor {SHARED_MEMORY} is writable")
    with folder as shared:
        os.environ[MULTIPROCESS] = shared
        supervisor = Supervisor(config, [listening], exit_timeout_of(settings))
        supervisor.run()
    if supervisor.failed:
        raise typer.Exit(1)
    if supervisor.interrupted:
        raise KeyboardInterrupt  # as uvicorn does in one process


def _application(settings: Settings, threads: int, pages: Mapping[str, str]) -> "Starlette":
    from attend.cli.server import application

    return application(settings, threads, pages)


def _warn_about_keys(settings: Settings) -> None:
    """Logs a warning if everyone may call, or nobody: both are allowed, but rarely intended."""
    if settings.keys_file is None and not settings.is_local:
        log.warning("no API keys configured", reason="keys_file is not set: any client can send requests")
    elif settings.keys_file is not None and not read_keys(settings.keys_file):
        log.warning("the keys file is empty", reason="every request that needs a key is refused", file=str(settings.keys_file))


def shared_folder() -> str:
    """A folder for files that workers share: the temporary folder, or /dev/shm if that is not writable. Raises OSError."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if os.access(SHARED_MEMORY, os.W_OK):
            return SHARED_MEMORY
        raise


def allow_many_connections() -> None:
    """Raises the limit of open files to the hard limit: each connection is an open file, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _url(settings: Settings, listening: socket.socket) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    scheme, (address, port) = "https" if settings.tls_cert else "http", listening.getsockname()[:2]
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def _pages(url: str) -> dict[str, str]:
    """The addresses of the pages for people, on a server that a browser can reach."""
    if url.startswith("unix:"):
        return {}
    url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # no browser opens the address of all interfaces
    return {"page": f"{url}/", "docs": f"{url}/docs"}


class Worker(Process):
    """uvicorn's worker process, which runs `Server`. `has_served`: whether it has reported to the supervisor that it is serving."""

    has_served = False
    ended = False  # the process has ended; a new one replaces it at the time `replace_at`
    replace_at = 0.0

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves, in the process of the worker. uvicorn's thread that answers pings must find the server made."""
        from attend.cli.server import Server

        self._server = Server(self.config)
        super().target(sockets)

    def ping(self, timeout: float = 5, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Whether the worker answers within `timeout` seconds. Returns False as soon as it has died (uvicorn would wait for the timeout),
        and True as soon as the supervisor is `interrupted`."""
        deadline = time.monotonic() + timeout
        try:
            self.parent_conn.send(b"ping")
            while not (readable := wait([self.parent_conn, self.process.sentinel], POLL)):
                if interrupted():
                    return True
                if time.monotonic() > deadline:
                    return False
            if self.parent_conn not in readable:
                return False
            self.has_served |= self.parent_conn.recv()
        except (OSError, EOFError):
            return False
        return True

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the worker has ended."""
        if self.exitcode is None and self.pid is not None:
            os.kill(self.pid, number)


class Supervisor(Multiprocess):
    """uvicorn's supervisor, with these differences.

    It closes its copy of the socket before the workers close theirs. So the port closes with the last worker, and clients cannot connect to
    a port that no process serves. A worker that hangs does not delay the exit of the others, and delays that of the supervisor by at most
    `exit_timeout` seconds.

    If a worker cannot start before any worker has served, the server ends, and `failed` is True. Later, such a worker is started again
    after growing pauses, while the others serve.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], exit_timeout: float) -> None:
        super().__init__(config, sockets)
        self.exit_timeout, self.failed, self.interrupted = exit_timeout, False, False
        self.processes: list[Worker] = []  # type: ignore[assignment]  # uvicorn's list has its own class of workers
        self._replaced: list[Worker] = []  # workers that got SIGHUP and have not exited yet
        self._serves = False  # whether any worker has ever served
        self._failures = 0  # failed starts since a worker last began to serve

    def init_processes(self) -> None:
        self.processes += [self._start_worker() for _ in range(self.processes_num)]

    def _start_worker(self) -> Worker:
        worker = Worker(self.config, self.sockets)
        worker.start()
        return worker

    def keep_subprocess_alive(self) -> None:
        """Replaces workers that have ended or do not answer."""
        for index, worker in enumerate(self.processes):
            if self.should_exit.is_set():
                return
            had_served = worker.has_served
            if not worker.ended and not (worker.process.is_alive() and worker.ping(ANSWER_SECONDS, lambda: bool(self.signal_queue))):
                self._end_worker(worker)
            elif worker.has_served and not had_served:
                self._serves, self._failures = True, 0
            if worker.ended and time.monotonic() >= worker.replace_at and not self.should_exit.is_set():
                self.processes[index] = self._start_worker()

    def _end_worker(self, worker: Worker) -> None:
        """Ends a dead or hanging worker, and sets the time at which it is replaced; or ends the server."""
        worker.kill()
        worker.join()
        worker.ended = True
        _clean_up(worker)
        log.warning("worker died", pid=worker.pid, exit_status=worker.exitcode)
        if worker.has_served:
            return
        if not self._serves and (worker.exitcode or 0) > 0:  # not killed by a signal
            log.error("stopping", reason="a worker cannot start; the lines before this one say why")
            self.failed = True
            self.should_exit.set()
            return
        pause = min(2.0 ** (self._failures - 1), LONGEST_PAUSE) if self._failures else 0.0
        self._failures += 1
        worker.replace_at = time.monotonic() + pause
        log.error("worker cannot start", pid=worker.pid, next_attempt_seconds=pause)

    def restart_all(self) -> None:
        """Replaces the workers one by one. Once the new worker is ready, the old one gets SIGHUP; the next one is started after the old one
        has exited, so there is at most one extra worker at a time. SIGTERM and SIGINT end the replacement."""
        log.info("restarting workers")
        for index, old in enumerate(self.processes):
            new = self._start_worker()
            if not self._becomes_ready(new):
                new.kill()
                new.join()
                _clean_up(new)
                if not self._must_stop():
                    log.error("restart ended", reason="a new worker did not become ready; the old ones stay", pid=old.pid)
                return
            self.processes[index] = new
            self._replaced.append(old)
            old.send_signal(signal.SIGHUP)
            self._wait_for_replaced()
            if self._must_stop():
                return
            log.info("worker replaced", pid=old.pid, by=new.pid)

    def _becomes_ready(self, worker: Worker) -> bool:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._must_stop() and worker.exitcode is None and time.monotonic() < deadline:
            if worker.wait_until_ready(POLL):
                return True
        return False

    def _wait_for_replaced(self) -> None:
        """Waits until the replaced workers have exited, or this process has to stop. Kills a worker that hangs."""
        deadline = time.monotonic() + self.exit_timeout
        while self._replaced and not self._must_stop():
            worker = self._replaced[0]
            worker.process.join(POLL)
            if worker.exitcode is None and time.monotonic() > deadline:
                self._kill(worker)
            elif worker.exitcode is not None:
                _clean_up(worker)
                self._replaced.remove(worker)

    def _must_stop(self) -> bool:
        return signal.SIGTERM in self.signal_queue or signal.SIGINT in self.signal_queue

    def handle_int(self) -> None:
        self.interrupted = True
        super().handle_int()

    def terminate_all(self) -> None:
        super().terminate_all()
        for worker in self._replaced:
            worker.send_signal(signal.SIGTERM)
        for worker in (*self.processes, *self._replaced) if self.interrupted else ():
            worker.send_signal(SKIP_DRAIN)
        for listening in self.sockets:
            listening.close()

    def join_all(self) -> None:
        deadline = time.monotonic() + self.exit_timeout
        for worker in (*self.processes, *self._replaced):
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.exitcode is None:
                self._kill(worker)
        super().join_all()

    def handle_ttin(self) -> None:
        """Ignores SIGTTIN and SIGTTOU: the number of workers determines the threads of each, so it cannot change."""

    handle_ttou = handle_ttin

    def _kill(self, worker: Worker) -> None:
        log.warning("worker killed", pid=worker.pid, reason=f"it had not exited after {self.exit_timeout:g} s")
        worker.process.kill()
        worker.process.join()


def _clean_up(worker: Worker) -> None:
    """Removes the gauges of a worker that has ended from /metrics; its counters stay."""
    mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]  # the library has no annotations
