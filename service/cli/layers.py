"""`attend layers`: what a server holds, or what it would hold with these settings."""

import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from service.cli.backend import open_backend
from service.cli.exits import reported
from service.cli.flags import AsJson, Config, Url, with_settings
from service.wire.documents import LayerDocument, Layers

EPILOG = """Examples: attend layers --url http://127.0.0.1:8000

attend layers --d-model 512 --num-heads 8 --json"""


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(with_settings(layers))


def layers(url: Url = None, as_json: AsJson = False, config: Config = None, **flags: Any) -> None:
    """List the layers of a server, or those that `attend serve` would have with the same settings."""
    with reported("layers"), open_backend(url, config, flags) as backend:
        held = backend.layers()
    if as_json:
        sys.stdout.write(Layers(layers=held).model_dump_json() + "\n")
    else:
        Console().print(_table(held))


def _table(held: list[LayerDocument]) -> Table:
    table = Table("layer", "d_model", "heads", "dtype", "init", "seed", "parameters", "device", "fingerprint")
    for layer in held:
        spec = layer.spec
        drawn = ["given", ""] if spec.init is None else [spec.init, str(spec.seed)]
        table.add_row(
            *[layer.name, str(spec.d_model), str(spec.num_heads), spec.dtype, *drawn],
            *[f"{layer.parameters:,}", layer.device, layer.fingerprint[:12]],
        )
    return table
