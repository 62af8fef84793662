"""`attend serve`: checks the settings, opens the socket and runs the server. Its flags are generated from the fields of Settings."""

import errno
import os
import socket
import ssl
import stat
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer

from attend.cli.terminal import Config, fail, report_errors, with_settings
from attend.serving.threads import plan_threads, prepare_torch, usable_cores
from attend.settings import Settings, injected_variables, read_settings

EPILOG = """Every flag is also an environment variable: --max-body-bytes is ATTEND_MAX_BODY_BYTES.

\b
Example:
  attend serve --port 8000"""
RAY_SETTINGS = ("replicas", "replica_cpus", "replica_gpus", "shards")


@with_settings(*Settings.model_fields)
def serve(config: Config = None, **flags: Any) -> None:
    """Serve attention over HTTP until stopped."""
    for name in RAY_SETTINGS:
        if flags[name] is not None:
            flag, variable = f"--{name.replace('_', '-')}", f"ATTEND_{name.upper()}"
            fail("serve", f"{flag} has an effect only under Ray Serve: `{variable}=… serve run attend.deploy.ray:app`", code=2)
    with report_errors("serve"):
        settings = read_settings(flags, config)
    if injected := injected_variables():
        typer.echo(f"attend serve: ignored variables that Kubernetes derives from a Service: {', '.join(injected)}", err=True)
    try:
        threads = plan_threads(settings.workers, settings.threads, usable_cores())
    except ValueError as error:
        fail("serve", f"{error}; reduce --workers or --threads", code=2)
    _check_files(settings)
    prepare_torch(threads)
    from attend.cli.processes import serve_processes

    if settings.device.startswith("cuda"):
        from attend.serving.service import find_device  # imports torch

        try:
            find_device(settings.device)
        except ValueError as error:
            fail("serve", str(error), code=2)
    where = f"{settings.host}:{settings.grpc_port}, for gRPC"
    try:
        settings = _with_free_grpc_port(settings)
        where = str(settings.uds or f"{settings.host}:{settings.port}")
        listening = _listen(settings)
        socket_file = None if settings.uds is None else settings.uds.lstat()
    except OSError as error:
        fail("serve", f"cannot listen on {where}: {error.strerror or error}")
    try:
        serve_processes(settings, threads, listening)
    finally:
        if settings.uds is not None and socket_file is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(settings.uds.lstat(), socket_file):  # unless another file has replaced it
                    settings.uds.unlink()


def _check_files(settings: Settings) -> None:
    """Raises typer.Exit if a file or an extra that the server needs is missing or invalid."""
    from attend.web.keys import BadKeys, read_keys

    subject = f"--layers-dir {settings.layers_dir}"
    try:
        if settings.keys_file is not None:
            read_keys(settings.keys_file)
        if settings.layers_dir is not None:
            settings.layers_dir.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=settings.layers_dir).close()
        if settings.tls_cert is not None and settings.tls_key is not None:
            for flag, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
                subject = f"{flag} {path}"
                path.open("rb").close()
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except BadKeys as error:
        fail("serve", str(error), code=2)
    except ssl.SSLError as error:
        fail("serve", f"--tls-cert and --tls-key: not a certificate and its key ({error.reason or error})", code=2)
    except OSError as error:
        fail("serve", f"cannot use {subject}: {error.strerror}", code=2)
    if settings.telemetry and find_spec("opentelemetry") is None:
        fail("serve", "--telemetry needs more packages: pip install 'attend-service[serve,otel]'", code=2)
    if settings.grpc_port is not None and not all(map(find_spec, ("grpc", "grpc_health", "grpc_reflection"))):
        fail("serve", "--grpc-port needs more packages: pip install 'attend-service[serve,grpc]'", code=2)


def _listen(settings: Settings) -> socket.socket:
    """The listening socket. Raises OSError."""
    if settings.uds is None:
        return socket.create_server((settings.host, settings.port), family=_family(settings.host), backlog=2048)
    _remove_unused_socket(settings.uds)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(settings.uds))
        settings.uds.chmod(0o666)  # like a port, open to all users of this machine
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


def _remove_unused_socket(path: Path) -> None:
    """Removes a Unix socket on which no process listens. Raises OSError for anything else at that path."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise OSError(errno.EEXIST, "the file is not a socket")
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        status = client.connect_ex(str(path))
    if status in (0, errno.EAGAIN):  # a process listens; EAGAIN: its queue of waiting connections is full
        status = errno.EADDRINUSE
    if status != errno.ECONNREFUSED:
        raise OSError(status, os.strerror(status))
    path.unlink()


def _with_free_grpc_port(settings: Settings) -> Settings:
    """The settings with a gRPC port that all workers can share. Raises OSError if it is taken: gRPC itself would share the port
    with another server of this user."""
    if settings.grpc_port is None:
        return settings
    with socket.create_server((settings.host, settings.grpc_port), family=_family(settings.host)) as reserved:
        return settings if settings.workers == 1 else settings.model_copy(update={"grpc_port": reserved.getsockname()[1]})


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
