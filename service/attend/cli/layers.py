"""`attend layers`: lists layers, and adds, exports and removes them as safetensors files.

`add`, `export` and `remove` work on a server (`--url`) or on the folder that stores its layers (`--layers-dir`). A running server watches
that folder.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from attend.checkpoints import ModelFolder, described_layers, layers_of_file
from attend.checkpoints.families import PARTS
from attend.cli.clients import open_client
from attend.cli.families import print_steps
from attend.cli.terminal import ENGINE_FIELDS, AsJson, Ca, Config, Url, print_result, report_errors, with_settings, write_file
from attend.client import Client
from attend.spec import LayerSpec
from attend.wire.schemas.layers import LayerInfo, Layers

EPILOG = """\b
Examples:
  attend layers list --url http://127.0.0.1:8000
  attend layers list --d-model 512 --num-heads 8 --json
  attend layers add encoder0 path/to/model --layer 0 --url http://127.0.0.1:8000
  attend layers add encoder0 model.safetensors --prefix encoder.layer.0 --spec '{"num_heads": 12}' --url http://127.0.0.1:8000"""
ADD_EPILOG = "\b\nExample:\n  attend layers add encoder0 path/to/model --layer 0 --url http://127.0.0.1:8000"

WIDEST = 200  # columns of a table

Name = Annotated[str, typer.Argument(help="Name of the layer.", show_default=False)]
Server = Annotated[str | None, typer.Option("--url", help="A running server.", show_default=False)]
Folder = Annotated[Path | None, typer.Option(help="A folder of layers, instead of a server.", show_default=False)]

group = typer.Typer(no_args_is_help=True, help="List layers; add, export and remove them as safetensors files.", epilog=EPILOG)


@group.command("list", epilog="\b\nExample:\n  attend layers list --url http://127.0.0.1:8000")
@with_settings(*ENGINE_FIELDS)
def show(url: Url = None, ca: Ca = None, as_json: AsJson = False, config: Config = None, **flags: Any) -> None:
    """List the layers of a server, or those that `attend serve` would have with the same settings."""
    with report_errors("layers list"), open_client(url, ca, config, flags) as client:
        found = client.layers()
    if as_json:
        typer.echo(Layers(layers=found).model_dump_json())
    else:
        _print_table(found)


@group.command(epilog=ADD_EPILOG)
def add(
    name: Name,
    path: Annotated[
        Path, typer.Argument(help="A model's folder with its config.json; or a safetensors file, exported or of a checkpoint.", exists=True)
    ],
    number: Annotated[
        int | None, typer.Option("--layer", help="Number of the layer in a model's folder.", min=0, show_default=False)
    ] = None,
    part: Annotated[str | None, typer.Option(help=f"The part, where a model has several: {', '.join(PARTS)}.", show_default=False)] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of a checkpoint, if its names fit several.", show_default=False)] = None,
    prefix: Annotated[str | None, typer.Option(help="Name of the layer in a checkpoint, if it has several.", show_default=False)] = None,
    spec: Annotated[str | None, typer.Option(help="JSON: fields that tensors do not determine, as num_heads.", show_default=False)] = None,
    url: Server = None,
    ca: Ca = None,
    layers_dir: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Add or replace a layer from a model's folder, as the model's config describes it, or from a safetensors file."""
    fields = _json_object(spec)
    if path.is_dir() and number is None:
        raise typer.BadParameter(f"expected --layer with a model's folder; `attend layers inspect {path}` shows its layers")
    if path.is_dir() and (layout or prefix):
        raise typer.BadParameter("expected --layout and --prefix with a file, since the config of a model's folder determines them")
    if not path.is_dir() and (part or number is not None):
        raise typer.BadParameter("expected --layer and --part with a model's folder, got a file; --prefix selects one of its layers")
    with _client_of("add", url, ca, layers_dir) as client:
        if number is None:
            layer = client.put_layer_file(name, path, layout=layout, prefix=prefix, spec=fields)
        else:
            layer = client.put_layer_from(name, path, number, part=part, spec=fields)
    if as_json:
        typer.echo(layer.model_dump_json())
    else:
        _print_table([layer])
        if layer.assumed:
            typer.echo("assumed: " + ", ".join(f"{field} {json.dumps(value)}" for field, value in layer.assumed.items()))


@group.command(epilog="\b\nExamples:\n  attend layers inspect path/to/model\n  attend layers inspect path/to/model --json")
def inspect(
    path: Annotated[Path, typer.Argument(help="A model's folder with its config.json, or a safetensors file.", exists=True)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each layer, with its spec.")] = False,
) -> None:
    """List the attention layers of a model. No server is needed.

    Of a folder, as the model's config describes them; of a file, the layouts and prefixes that `attend layers add` takes.
    """
    folder = path.parent if path.name == "config.json" else path
    with report_errors("layers inspect"):
        found = list(described_layers(ModelFolder(folder)) if folder.is_dir() else layers_of_file(path))
    if as_json:
        for line in found:
            typer.echo(json.dumps(line))
        return
    _print_inspected([line for line in found if "refused" not in line])
    for line in found:
        if "refused" in line:
            typer.echo(f"layer {line['layer']} of part {line['part']} is refused: {line['refused']}")


@group.command(epilog="\b\nExample:\n  attend layers describe default --url http://127.0.0.1:8000")
@with_settings(*ENGINE_FIELDS)
def describe(name: Name, url: Url = None, ca: Ca = None, as_json: AsJson = False, config: Config = None, **flags: Any) -> None:
    """Print what a layer computes, step by step: x are the inputs of queries, z those of keys and values."""
    with report_errors("layers describe"), open_client(url, ca, config, flags) as client:
        steps = client.layer(name).steps or {}
    if as_json:
        typer.echo(json.dumps(steps, ensure_ascii=False))
    else:
        print_steps(steps)


@group.command(epilog="\b\nExample:\n  attend layers export encoder0 --output encoder0.safetensors --layers-dir layers")
def export(
    name: Name,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", dir_okay=False, show_default=False)],
    url: Server = None,
    ca: Ca = None,
    layers_dir: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Write a layer to a safetensors file with canonical names and its spec."""
    with _client_of("export", url, ca, layers_dir) as client:
        body = client.layer_file(name)
    write_file("layers export", output, body)
    document = {"layer": name, "file": str(output), "bytes": len(body)}
    print_result(document, f"wrote {name} to {output}, {len(body):,} bytes", as_json)


@group.command(epilog="\b\nExample:\n  attend layers remove encoder0 --url http://127.0.0.1:8000")
def remove(name: Name, url: Server = None, ca: Ca = None, layers_dir: Folder = None, as_json: AsJson = False) -> None:
    """Remove a layer."""
    with _client_of("remove", url, ca, layers_dir) as client:
        client.delete_layer(name)
    print_result({"removed": name}, f"removed {name}", as_json)


@contextmanager
def _client_of(command: str, url: str | None, ca: Path | None, layers_dir: Path | None) -> Iterator[Client]:
    if (url is None) == (layers_dir is None):
        raise typer.BadParameter("expected either --url or --layers-dir")
    with report_errors(f"layers {command}"), open_client(url, ca, None, {"layers_dir": layers_dir}) as client:
        yield client


def _json_object(text: str | None) -> Mapping[str, Any] | None:
    try:
        value = None if text is None else json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected JSON in --spec: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise typer.BadParameter('expected a JSON object in --spec, as {"num_heads": 12}')
    return value


def _print_table(layers: Sequence[LayerInfo]) -> None:
    """Prints the main fields of layers."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for title in ("layer", "d_model", "heads", "dtype", "weights", "parameters", "fingerprint"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("d_model", "heads", "parameters") else "left")
    for layer in layers:
        spec = layer.spec
        weights = "given" if spec.init is None else f"{'seed' if spec.init == 'xavier_uniform' else spec.init} {spec.seed}"
        heads = _heads(spec.model_dump())
        table.add_row(layer.name, str(spec.d_model), heads, spec.dtype, weights, f"{layer.parameters:,}", layer.fingerprint[:8])
    _print_whole(table)


def _print_inspected(layers: Sequence[Mapping[str, Any]]) -> None:
    """Prints what `inspect` found: of each layer where it is, and of a spec the widths and operators."""
    if not layers:
        return
    places = [title for title in ("part", "layer", "name", "layout", "prefix") if title in layers[0]]
    fields = [title for title in ("d_model", "head_dim", "dtype") if "spec" in layers[0]]
    table = Table(*places, *fields, *(["heads", "operators"] if fields else []), box=SIMPLE, padding=(0, 1, 0, 0))
    for layer in layers:
        row = [str(layer[title]) for title in places]
        if fields:
            spec = LayerSpec.model_validate(layer["spec"])
            operators = ", ".join(operator.summary(spec) for operator in spec.operators)
            row += [*(str(getattr(spec, title)) for title in fields), _heads(spec.model_dump()), operators]
        table.add_row(*row)
    _print_whole(table)


def _heads(spec: Mapping[str, Any]) -> str:
    """The number of heads, and that of keys and values if it differs."""
    heads, kv_heads = spec["num_heads"], spec["num_kv_heads"]
    return str(heads) if kv_heads == heads else f"{heads}/{kv_heads}"


def _print_whole(table: Table) -> None:
    """Prints the table, in 80 columns unless a name is long: names stay whole, to be copied."""
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=WIDEST)).maximum)
    console.print(table)
