"""How a command ends when it cannot do what was asked: one readable message on standard error, with what to do, and an exit code.

0 done, 1 refused, failed or found wrong, 2 asked in a way that makes no sense (typer's own code for a bad flag).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from service.client import BadReply, TimedOut, Unreachable, Untrusted
from service.errors import AttendError, CapacityError, Forbidden, LayerNotFound, NotReady, ServiceFault, TooLarge, Unauthenticated
from service.settings import BadSettings

HINTS: dict[type[AttendError], str] = {
    TimedOut: "The server took too long; ask for less at once, or look at its log.",
    Untrusted: "Name the file of its authority's certificate with --ca, or in ATTEND_CA.",
    Unreachable: "Start a server with `attend serve`, or leave --url out: then nothing has to run beforehand.",
    BadReply: "Is it a server of this version that answers at --url?",
    LayerNotFound: "`attend layers` shows what is held, with the same --url and layer flags.",
    Unauthenticated: "Put a key of that server into the variable ATTEND_API_KEY.",
    Forbidden: "Run this against a server that listens on the loopback address, or leave --url out.",
    NotReady: "Try again in a moment; /health/ready tells when.",
    CapacityError: "The same may succeed later, or with less at once.",
    TooLarge: "Send or ask for less, or raise the limit it names where the server is started.",
    ServiceFault: "This is the server's fault; its log has the cause under the request id.",
}


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Turns what a user can cause into a message and an exit code; everything else is a bug and keeps its traceback."""
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
    """One message on standard error, under the name of the command."""
    typer.echo(f"attend {command}: {message}", err=True)
    for line in more:
        if line:
            typer.echo(f"  {line}", err=True)
