"""`attend capture`: runs a model of transformers on a text, and writes its attention layers with the inputs that they got to a file."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attend.cli.clients import open_client
from attend.cli.model_folder import Target, arguments_of, load_model, model_name, report_model_errors, written
from attend.cli.terminal import AsJson, Ca, Url, fail, progress_line, report_errors
from attend.client.captures import Capture
from attend.client.captures import capture as capture_model
from attend.client.model_calls import count_unknown

EPILOG = """\b
Examples:
  attend capture path/to/bert "Anna gave the book to Ben."
  attend capture openai-community/gpt2 "The cat sat"
  attend capture path/to/t5 "translate English to German: The house is small." --target "Das Haus ist klein."
  attend capture path/to/llama "The cat sat" --layers 0,1 --url http://127.0.0.1:8000"""
SUFFIX = ".capture.safetensors"
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A model of transformers: its folder, or its name in the cache of Hugging Face.", show_default=False
    ),
]
Text = Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads.", show_default=False)]
Numbers = Annotated[str | None, typer.Option("--layers", help="Numbers of layers, separated by commas; default: all.", show_default=False)]
Name = Annotated[str | None, typer.Option(help="Of the model: its layers are NAME-NUMBER; default: the model's.", show_default=False)]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help=f"The file to write; default: NAME{SUFFIX}.", show_default=False)
]


def capture(
    model: Model,
    text: Text,
    target: Target = None,
    layers: Numbers = None,
    name: Name = None,
    output: Output = None,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Run a model on a text, and write its attention layers with the inputs that they got to a file.

    The service computes each layer, and its attention weights are compared with the model's own. Drop the file on the page of a server to
    see all layers and heads. With --url the layers stay on that server.
    """
    numbers = None if layers is None else _numbers(layers)
    name = name or model_name(model)
    file = output or Path(f"{name}{SUFFIX}")
    console = Console(highlight=False, markup=False)
    loaded, tokenizer = load_model("capture", model)
    with (
        report_model_errors("capture"),
        report_errors("capture"),
        open_client(url, ca) as client,
        progress_line(f"running {name}", Console(stderr=True)),
    ):
        arguments = arguments_of("capture", loaded, tokenizer, text, target)
        captured = capture_model(loaded, arguments, client, tokenizer=tokenizer, name=name, layers=numbers)
    try:
        captured.save(file)
    except OSError as error:
        fail("capture", f"cannot write {file}: {error.strerror}", "Give another file with --output.")
    if as_json:
        typer.echo(json.dumps(_document(captured, file)))
        return
    console.print(_table(captured))
    for layer, why in captured.skipped.items():
        console.print(f"{layer} is not in the file: {why}", soft_wrap=True)
    for layer in (name for name, own in captured.items() if not own.agrees and not math.isnan(own.difference)):
        console.print(f"{layer} differs from the model: what the page shows of it is not what the model computes.", soft_wrap=True)
    if unknown := count_unknown(arguments, tokenizer):
        console.print(f"{unknown} of the tokens are unknown to the tokenizer.", soft_wrap=True)
    console.print(written(file, url), soft_wrap=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers separated by commas, got {text!r}", param_hint="--layers") from None


def _table(captured: Capture) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    for title in ("heads", "queries", "keys", "difference from the model"):
        table.add_column(title, justify="right")
    for layer in captured.values():
        query = layer.request["query"]
        key = layer.request.get("key", query)
        table.add_row(layer.name, *map(str, (layer.spec.num_heads, query.shape[-2], key.shape[-2])), layer.shown_difference)
    return table


def _document(captured: Capture, file: Path) -> dict[str, Any]:
    layers = []
    for layer in captured.values():
        difference = None if math.isnan(layer.difference) else layer.difference
        place = {"name": layer.name, "part": layer.part, "number": layer.number}
        layers.append({**place, "spec": layer.spec.model_dump(mode="json"), "difference": difference})
    return {"file": str(file), "layers": layers, "skipped": dict(captured.skipped)}
