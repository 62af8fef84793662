"""What commands read and print, and their exit codes.

0 success; 1 refused, failed, or a difference found; 2 invalid arguments (typer's code).
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

from service.client import BadReply, TimedOut, Unreachable, Untrusted
from service.errors import AttendError, CapacityError, Forbidden, LayerNotFound, NotReady, ServiceFault, TooLarge, Unauthenticated
from service.settings import BadSettings

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


def read_file(command: str, file: str) -> bytes:
    """The bytes of a file, or of standard input for -. Raises typer.Exit if the file cannot be read."""
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        hint = "Give the file of a JSON body of POST /attend, or - for standard input."
        fail(command, f"cannot read {file}: {error.strerror}", hint)


def write_file(command: str, path: Path, content: bytes) -> None:
    """Writes the file. Raises typer.Exit if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        fail(command, f"cannot write {path}: {error.strerror}")
