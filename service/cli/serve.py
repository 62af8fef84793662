"""`attend serve`: settings -> a running server. Its flags are made from the fields of Settings, so that no list is kept twice."""

import os
import socket
from importlib.util import find_spec
from typing import Any

import typer

from service.cli.flags import Config, with_settings
from service.serving.threads import plan_threads, usable_cores
from service.settings import BadSettings, Settings, read_settings

EPILOG = "Every flag is also an environment variable: --max-body-bytes is ATTEND_MAX_BODY_BYTES. Example: attend serve --port 8000"


def install(app: typer.Typer) -> None:
    """Adds the command."""

    def serve(config: Config = None, **flags: Any) -> None:
        """Serve attention over HTTP until stopped."""
        try:
            settings = read_settings(flags, config)
        except BadSettings as error:
            typer.echo(f"attend serve: {error}", err=True)
            raise typer.Exit(2) from None
        run(settings)

    app.command(epilog=EPILOG)(with_settings(serve, Settings.model_fields))


def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM."""
    try:
        threads = plan_threads(settings.workers, settings.threads, usable_cores())
    except ValueError as error:
        typer.echo(f"attend serve: {error}", err=True)
        raise typer.Exit(2) from None
    if settings.grpc_port is not None and not all(map(find_spec, ("grpc", "grpc_health", "grpc_reflection"))):
        typer.echo("attend serve: --grpc-port needs more packages: pip install 'attend[serve,grpc]'", err=True)
        raise typer.Exit(2)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch makes its pool
    from service.cli.process import serve_processes

    try:
        listening = socket.create_server((settings.host, settings.port), family=_family(settings.host), backlog=2048)
    except OSError as error:
        typer.echo(f"attend serve: cannot listen on {settings.host}:{settings.port}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    serve_processes(settings, threads, listening)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
