"""`attend sessions`: starts, lists, forks, shortens, exports, imports and deletes the sessions of a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from service.cli.clients import open_client
from service.cli.terminal import AsJson, Ca, print_result, report_errors, write_file
from service.client import Session
from service.wire.schemas.sessions import SessionDocument, Sessions

EPILOG = """Examples: attend sessions start default --url http://127.0.0.1:8000

attend infer step.json --session ID --url http://127.0.0.1:8000

attend sessions list --url http://127.0.0.1:8000"""
EXAMPLE = "Example: attend sessions {} --url http://127.0.0.1:8000"

Id = Annotated[str, typer.Argument(help="Id of the session, as `attend sessions start` prints it.", show_default=False)]
Server = Annotated[str, typer.Option("--url", help="A running server, with --session-memory.", show_default=False)]

group = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Start, list, fork, shorten, export, import and delete sessions.", epilog=EPILOG
)


@group.command(epilog=EXAMPLE.format("start default"))
def start(
    url: Server,
    layer: Annotated[str, typer.Argument(help="Name of the layer.")] = "default",
    capacity: Annotated[int | None, typer.Option(help="Most rows.", show_default=False)] = None,
    idle_seconds: Annotated[float | None, typer.Option(help="Seconds without a call after which it ends; 300.", show_default=False)] = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Start a session, and print its id."""
    with report_errors("sessions start"), open_client(url, ca) as client:
        document = client.session(layer, capacity=capacity, idle_seconds=idle_seconds).info()
    print_result(document.model_dump(), document.id, as_json)


@group.command("list", epilog=EXAMPLE.format("list"))
def show(url: Server, ca: Ca = None, as_json: AsJson = False) -> None:
    """List the sessions of this API key, least recently used first."""
    with report_errors("sessions list"), open_client(url, ca) as client:
        found = client.sessions()
    if found or as_json:
        print_result(Sessions(sessions=found).model_dump(), "\n".join(map(_line, found)), as_json)


@group.command(epilog=EXAMPLE.format("fork ID --length 12"))
def fork(
    id: Id,
    url: Server,
    length: Annotated[int | None, typer.Option(help="Number of rows; by default all.", show_default=False)] = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Start a session with the first rows of another one, and print its id."""
    with report_errors("sessions fork"), open_client(url, ca) as client:
        document = client.session(id=id).fork(length).info()
    print_result(document.model_dump(), document.id, as_json)


@group.command(epilog=EXAMPLE.format("truncate ID 12"))
def truncate(
    id: Id,
    length: Annotated[int, typer.Argument(help="Number of rows to keep, the first ones.", show_default=False)],
    url: Server,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Roll a session back to its first rows."""
    _change("truncate", id, lambda session: session.truncate(length), url, ca, as_json)


@group.command(epilog=EXAMPLE.format("export ID --output cache.safetensors"))
def export(
    id: Id,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", dir_okay=False, show_default=False)],
    url: Server,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Write the rows of a session to a safetensors file."""
    with report_errors("sessions export"), open_client(url, ca) as client:
        body = client.session(id=id).export()
    write_file("sessions export", output, body)
    print_result({"session": id, "file": str(output), "bytes": len(body)}, f"wrote {output}, {len(body):,} bytes", as_json)


@group.command("import", epilog=EXAMPLE.format("import ID cache.safetensors"))
def load(
    id: Id,
    file: Annotated[Path, typer.Argument(help="A file of `attend sessions export`.", exists=True, dir_okay=False, show_default=False)],
    url: Server,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Replace the rows of a session by those of a file."""
    _change("import", id, lambda session: session.load(file), url, ca, as_json)


@group.command(epilog=EXAMPLE.format("delete ID"))
def delete(id: Id, url: Server, ca: Ca = None, as_json: AsJson = False) -> None:
    """End a session, and free its memory."""
    with report_errors("sessions delete"), open_client(url, ca) as client:
        client.session(id=id).delete()
    print_result({"deleted": id}, f"deleted {id}", as_json)


def _change(command: str, id: str, change: Callable[[Session], None], url: str, ca: Path | None, as_json: bool) -> None:
    """Change a session, and print it."""
    with report_errors(f"sessions {command}"), open_client(url, ca) as client:
        session = client.session(id=id)
        change(session)
        document = session.info()
    print_result(document.model_dump(), _line(document), as_json)


def _line(document: SessionDocument) -> str:
    rows = f"{document.length} rows" if document.capacity is None else f"{document.length} of {document.capacity} rows"
    return f"{document.id}  layer {document.layer.name}, {rows}, {document.bytes:,} bytes, until {document.expires_at}"
