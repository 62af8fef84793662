"""Failures of commands: a message on standard error, with a hint, and an exit code.

0 success; 1 refused, failed, or a difference found; 2 invalid arguments (typer's code).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from service.client import BadReply, TimedOut, Unreachable, Untrusted
from service.errors import AttendError, CapacityError, Forbidden, LayerNotFound, NotReady, ServiceFault, TooLarge, Unauthenticated
from service.settings import BadSettings

HINTS: dict[type[AttendError], str] = {
    TimedOut: "The server took too long; send smaller requests, or read its log.",
    Untrusted: "Name the CA bundle with --ca, or in ATTEND_CA.",
    Unreachable: "Start a server with `attend serve`, or leave --url out: then no server is needed.",
    BadReply: "Is the server at --url an attend of this version?",
    LayerNotFound: "`attend layers list` with the same --url or layer flags shows which layers there are.",
    Unauthenticated: "Set the variable ATTEND_API_KEY to a key of that server.",
    Forbidden: "Run this against a server that listens on the loopback address, or leave --url out.",
    NotReady: "Try again when /health/ready answers 200.",
    CapacityError: "Try again later, or with smaller requests.",
    TooLarge: "Send a smaller request, or raise the named limit of the server.",
    ServiceFault: "This is a fault of the server; its log has the cause under the request id.",
}


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Turns BadSettings and AttendError into a message and an exit code. Other exceptions are bugs and keep their traceback."""
    try:
        yield
    except BadSettings as error:
        complain(command, str(error))
        raise typer.Exit(2) from None
    except AttendError as error:
        hint = next((HINTS[kind] for kind in type(error).__mro__ if kind in HINTS), "")
        complain(command, error.detail, *getattr(error, "__notes__", ()), hint)
        raise typer.Exit(1) from None


def complain(command: str, message: str, *more: str) -> None:
    """Prints a message to standard error, with the name of the command, and indented lines after it."""
    typer.echo(f"attend {command}: {message}", err=True)
    for line in more:
        if line:
            typer.echo(f"  {line}", err=True)
