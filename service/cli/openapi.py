"""`attend openapi`: prints the document that a server serves at /openapi.json."""

import json
from pathlib import Path
from typing import Annotated

import typer

from service.cli.exits import complain, reported
from service.settings import read_settings

EPILOG = "Example: attend openapi -o openapi.json"
File = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.", show_default=False)]


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(openapi)


def openapi(output: File = None) -> None:
    """Print the OpenAPI document, or write it to a file."""
    with reported("openapi"):
        settings = read_settings({})
    from service.web.app import create_app

    text = json.dumps(create_app(settings).openapi(), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        complain("openapi", f"cannot write {output}: {error.strerror}")
        raise typer.Exit(1) from None
