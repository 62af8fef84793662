"""`attend serve`: settings -> a running server. Its flags are made from the fields of Settings, so that no list is kept twice."""

import inspect
import os
import socket
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from service.serving.threads import plan_threads, usable_cores
from service.settings import BadSettings, Settings, read_settings

EPILOG = "Every flag is also an environment variable: --max-body-bytes is ATTEND_MAX_BODY_BYTES. Example: attend serve --port 8000"


def install(app: typer.Typer) -> None:
    """Adds the command."""

    def serve(config: Path | None = None, **flags: Any) -> None:
        """Serve attention over HTTP until stopped."""
        try:
            settings = read_settings(flags, config)
        except BadSettings as error:
            typer.echo(f"attend serve: {error}", err=True)
            raise typer.Exit(2) from None
        run(settings)

    serve.__signature__ = inspect.Signature([_config(), *map(_flag, Settings.model_fields)])  # type: ignore[attr-defined]
    app.command(epilog=EPILOG)(serve)


def _config() -> inspect.Parameter:
    option = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def _flag(name: str) -> inspect.Parameter:
    """The option for a field of Settings; unset is None, so that the environment and the file show through."""
    field = Settings.model_fields[name]
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind in (int, float, bool)]
    kind = kinds[0] if kinds else str
    default = "" if field.default is None or field.default == {} else f" [default: {field.default}]"
    option = typer.Option(help=f"{field.description}{default}", show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM."""
    try:
        threads = plan_threads(settings.workers, settings.threads, usable_cores())
    except ValueError as error:
        typer.echo(f"attend serve: {error}", err=True)
        raise typer.Exit(2) from None
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
