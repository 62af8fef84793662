"""Starts the processes of `attend serve`: one server, or a supervisor with workers."""

import os
import resource
import socket
import tempfile
from functools import partial

import structlog
import typer
import uvicorn

from service.cli.logs import configure_logs
from service.cli.server import Server, application, exit_patience
from service.cli.supervisor import ANSWER_SECONDS, Supervisor
from service.cli.terminal import fail
from service.serving.metrics import MULTIPROCESS
from service.settings import Settings
from service.web.app import is_local
from service.web.connections import Connection
from service.web.keys import read_keys
from service.wire.native import numbers

log = structlog.get_logger("attend")
SHARED_MEMORY = "/dev/shm"
WITHOUT_EXTENSION = (
    "no compiled extension is installed: Python reads and writes numbers in JSON, which takes 3 to 20 times as long and more memory, "
    "and delays other requests meanwhile (install a C compiler, then attend again)"
)


def serve_processes(settings: Settings, threads: int, listening: socket.socket) -> None:
    """Serves on the socket until a signal ends it. Raises typer.Exit(1) if the layers cannot be loaded."""
    configure_logs(settings.log_format, settings.log_level)
    log.info("listening", url=_url(settings, listening), workers=settings.workers, threads=threads, json_numbers=numbers.variant())
    if numbers.variant() == numbers.PYTHON:
        log.warning(WITHOUT_EXTENSION)
    _warn_about_keys(settings)
    allow_many_connections()
    config = uvicorn.Config(
        partial(application, settings, threads),
        factory=True,
        workers=settings.workers,
        lifespan="on",
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
        timeout_keep_alive=settings.keepalive_timeout,  # type: ignore[arg-type]  # uvicorn accepts fractions of seconds
        timeout_graceful_shutdown=settings.shutdown_seconds,
        timeout_worker_healthcheck=ANSWER_SECONDS,
    )
    if settings.workers == 1:
        server = Server(config)
        server.run([listening])
        if server.failed:
            log.error("stopping", reason="the layers cannot be loaded; the lines before this one say why")
            raise typer.Exit(1)
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="attend-metrics-", dir=shared_folder())
    except OSError:
        fail("serve", f"several workers need a folder for their metrics, and neither $TMPDIR, /tmp nor {SHARED_MEMORY} is writable")
    with folder as shared:
        os.environ[MULTIPROCESS] = shared
        supervisor = Supervisor(config, [listening], exit_patience(settings))
        supervisor.run()
    if supervisor.failed:
        raise typer.Exit(1)


def _warn_about_keys(settings: Settings) -> None:
    """Logs a warning if everyone may call, or nobody: both are allowed, but rarely intended."""
    if settings.keys_file is None and not is_local(settings):
        log.warning("open to everyone", reason="there are no keys (keys_file): everyone who can connect may call")
    elif settings.keys_file is not None and not read_keys(settings.keys_file):
        log.warning("open to nobody", reason="the keys file (keys_file) has no keys", file=str(settings.keys_file))


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
