"""Shared by all commands: flags, some of them generated from the fields of Settings and of other models; output; exit codes.

Exit codes, for all commands: 1 if the command failed or found a difference, 2 if its arguments are wrong (typer's code), 130 after Ctrl-C.
docs/operations.md has the table.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, NoReturn, cast, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from attend.client import BadReply, TimedOut, Unreachable, Untrusted
from attend.client.connection import CA
from attend.errors import AttendError, CapacityError, Forbidden, LayerNotFound, NotReady, ServiceFault, TooLarge, Unauthenticated
from attend.settings import LAYER_FIELDS, BadSettings, Settings

Url = Annotated[str | None, typer.Option(help="URL of a running server; without it, this process computes.", show_default=False)]
Ca = Annotated[
    Path | None,
    typer.Option(envvar=CA, help="CA bundle used to verify the server, a file or a folder.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.", show_default=False)]

ENGINE_FIELDS = (*LAYER_FIELDS, "layers", "layers_dir", "device", "threads")

HINTS: dict[type[AttendError], str] = {
    TimedOut: "The server took too long; send smaller requests, or read its log.",
    Untrusted: "Name the CA bundle with --ca, or in ATTEND_CA.",
    Unreachable: "Start a server with `attend serve`, or leave --url out where it is optional.",
    BadReply: "Is the server at --url an attend of this version?",
    LayerNotFound: "`attend layers list` with the same --url or layer flags shows which layers there are.",
    Unauthenticated: "Set the variable ATTEND_API_KEY to a key of that server.",
    Forbidden: "Use a key with the named scope; a server without keys accepts changes of layers on its loopback address only.",
    NotReady: "Try again when /health/ready answers 200.",
    CapacityError: "Try again later, or with smaller requests.",
    TooLarge: "Send a smaller request, or raise the named limit of the server.",
    ServiceFault: "This is a fault of the server; its log has the cause under the request id.",
}


@dataclass(frozen=True)
class ProgressLine:
    """A line of progress; `timer` starts it."""

    progress: Progress
    timer: Timer

    def show(self, text: str) -> None:
        """Change its text."""
        self.progress.update(self.progress.task_ids[0], description=text)


@contextmanager
def progress_line(text: str, console: Console, seconds: float = 2.0) -> Iterator[ProgressLine]:
    """A line with the time, on a terminal alone, if the `with` block takes more than `seconds`. It disappears at the end."""
    progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True)
    progress.add_task(text, total=None)
    timer = Timer(seconds, progress.start)
    if console.is_terminal:
        timer.start()
    try:
        yield ProgressLine(progress, timer)
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
            progress.stop()


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: adds a flag for each of these settings, as `with_fields` does."""
    return with_fields(Settings, *names)


def with_fields(model: type[BaseModel], *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: adds a flag for each of these fields of `model`, passed as keyword arguments, None if not given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        flags = [_flag(name, model.model_fields[name]) for name in names]
        cast(Any, command).__signature__ = signature.replace(parameters=[*own, *flags])  # typeshed has no such attribute
        return command

    return decorate


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option for a field of a model. Its default is None, so that the environment and the file can set the field."""
    choices = get_args(field.annotation) or (field.annotation,)
    choices = tuple(get_args(choice)[0] if get_origin(choice) is Annotated else choice for choice in choices)
    kinds = [kind for kind in choices if kind in (int, float, bool)]
    names = [name for choice in choices for name in (choice, *get_args(choice)) if isinstance(name, str)]  # of a Literal
    text = str(field.description).replace("if null", "if not set")
    notes = [", ".join(names)] * (not all(name in text for name in names))
    notes += [] if field.default in (None, {}, "") else [f"default {field.default}"]
    option = typer.Option(help=f"{text} ({'; '.join(notes)})" if notes else text, show_default=False)
    annotation = Annotated[(kinds[0] if kinds else str) | None, option]  # type: ignore[valid-type]  # built at run time
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@contextmanager
def report_errors(command: str) -> Iterator[None]:
    """Turns BadSettings and AttendError into a message and an exit code. Other exceptions are bugs and keep their traceback."""
    try:
        yield
    except BadSettings as error:
        fail(command, str(error), code=2)
    except AttendError as error:
        hint = next((HINTS[kind] for kind in type(error).__mro__ if kind in HINTS), "")
        fail(command, error.detail, *getattr(error, "__notes__", ()), hint)


def fail(command: str, message: str, *hints: str, code: int = 1) -> NoReturn:
    """Prints a message to standard error, with the name of the command, and hints below it. Raises typer.Exit."""
    for line in (f"attend {command}: {message}", *(f"  {hint}" for hint in hints if hint)):
        typer.echo(line, err=True)
    raise typer.Exit(code) from None


def print_result(document: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Prints the document as JSON, or the text."""
    typer.echo(json.dumps(document) if as_json else text)


def write_file(command: str, path: Path, content: bytes) -> None:
    """Writes the file. Raises typer.Exit if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        fail(command, f"cannot write {path}: {error.strerror}")
