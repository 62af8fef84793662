"""`attend config`, `attend openapi` and `attend version`: the settings, the API and the version of this installation."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attend.attention.native import extension
from attend.cli.terminal import AsJson, Config, print_result, report_errors, with_settings, write_file
from attend.settings import Settings, read_settings, sources
from attend.version import __version__
from attend.wire.native import numbers

CONFIG_EPILOG = """\b
Examples:
  attend config --config attend.toml
  ATTEND_PORT=9000 attend config --json"""
OPENAPI_EPILOG = "\b\nExample:\n  attend openapi -o openapi.json"
File = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.", show_default=False)]


@with_settings(*Settings.model_fields)
def config(config: Config = None, as_json: AsJson = False, **flags: Any) -> None:
    """Show the value and the source of every setting that `attend serve` would have with the same flags, environment and file.

    Exit code 2 if a setting does not exist or is invalid.
    """
    with report_errors("config"):
        settings = read_settings(flags, config)
    values, origins = settings.model_dump(mode="json"), sources(flags, config)
    if as_json:
        typer.echo(json.dumps({name: {"value": values[name], "source": origins[name]} for name in values}, indent=2))
        return
    table = Table("setting", "value", "source")  # no value is a secret: keys and certificates are in files, whose paths are settings
    for name, value in values.items():
        shown = "" if value in (None, {}) else value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, shown, "" if origins[name] == "default" else origins[name])
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"numbers in JSON: {numbers.variant()} (not a setting: python, or the instructions that the compiled extension uses)")
    console.print(f"short calls: {extension.variant()} (not a setting: torch, or the instructions that the compiled extension uses)")


def openapi(output: File = None) -> None:
    """Print the OpenAPI document, or write it to a file."""
    with report_errors("openapi"):
        settings = read_settings({})
    from attend.web.app import create_app

    text = json.dumps(create_app(settings).openapi(), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
    else:
        write_file("openapi", output, f"{text}\n".encode())


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    print_result({"version": __version__}, __version__, as_json)
