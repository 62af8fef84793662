"""`attend openapi`: prints the document that a server serves at /openapi.json."""

import json
from pathlib import Path
from typing import Annotated

import typer

from service.cli.terminal import report_errors, write_file
from service.settings import read_settings

EPILOG = "Example: attend openapi -o openapi.json"
File = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.", show_default=False)]


def openapi(output: File = None) -> None:
    """Print the OpenAPI document, or write it to a file."""
    with report_errors("openapi"):
        settings = read_settings({})
    from service.web.app import create_app

    text = json.dumps(create_app(settings).openapi(), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
    else:
        write_file("openapi", output, f"{text}\n".encode())
