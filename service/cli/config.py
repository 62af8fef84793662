"""`attend config`: all settings of a server here, with the source of each.

No setting is a secret: keys and certificates are in files, whose paths are settings.
"""

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from service.attention.native import extension
from service.cli.flags import AsJson, Config, with_settings
from service.cli.terminal import report_errors
from service.settings import Settings, read_settings, sources
from service.wire.native import numbers

EPILOG = """Examples: attend config --config attend.toml

ATTEND_PORT=9000 attend config --json"""


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
    table = Table("setting", "value", "source")
    for name, value in values.items():
        shown = "" if value in (None, {}) else value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, shown, "" if origins[name] == "default" else origins[name])
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"numbers in JSON: {numbers.variant()} (not a setting: python, or the instructions that the compiled extension uses)")
    console.print(f"short calls: {extension.variant()} (not a setting: torch, or the instructions that the compiled extension uses)")
