"""`attend heads`: what each head does with a request from a file, measured by a server or in this process."""

import sys
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.text import Text

from service.cli.backend import open_backend
from service.cli.exits import complain, reported
from service.cli.flags import AsJson, Ca, Config, Url, with_settings
from service.cli.head_tables import is_batched, tables
from service.cli.infer import read_file
from service.client.result import read_metrics
from service.wire.schemas.analysis import METRICS

EPILOG = """Examples: attend heads request.json --d-model 4 --num-heads 2

attend heads request.json --metrics entropy,strongest_links,pruning_order

attend heads request.json --url http://127.0.0.1:8000 --json"""
File = Annotated[str, typer.Argument(metavar="FILE", help="A JSON body of POST /attend or /attend/analysis; - is standard input.")]
Names = Annotated[str | None, typer.Option("--metrics", help="Names, with commas between; or all.", show_default=False)]
NEED_MORE = {"duplicate_token_score", "induction_score", "single_head", "value_norm_weights"}  # words, equal heads, much room


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(with_settings(heads))


def heads(
    file: File, metrics: Names = None, url: Url = None, ca: Ca = None, as_json: AsJson = False, config: Config = None, **flags: Any
) -> None:
    """Measure what each head does with one request.

    Without --metrics they are those that the file names, or the cheap ones that it gives enough for. Without --url the layers are those
    that `attend serve` would have with the same flags, environment and file.
    """
    body = read_file("heads", file)
    if metrics is not None:
        body = _with_metrics(body, metrics)
    with reported("heads"), open_backend(url, ca, config, flags) as backend:
        response = backend.analyse(body)
    if as_json:
        sys.stdout.buffer.write(response.body + b"\n")
        return
    console, result = Console(highlight=False, markup=False), read_metrics(response.body)
    console.print(f"layer {result.layer.name}, fingerprint {result.layer.fingerprint[:12]}")
    if result.fully_masked_rows:
        console.print(f"{result.fully_masked_rows} rows without a key, which no metric counts")
    for shown in tables(result.metrics, console.width, is_batched(result.metrics)):
        console.print(Text(shown) if isinstance(shown, str) else shown)


def _with_metrics(body: bytes, names: str) -> bytes:
    """The body with these metrics in place of its own. Ends the command where it is no JSON object or a name is none of ours."""
    wanted = [name for name in METRICS if name not in NEED_MORE] if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in METRICS]:
        complain("heads", f"no metric is called {unknown[0]!r}", f"There are {', '.join(METRICS)}.")
        raise typer.Exit(2)
    try:
        document = orjson.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        complain("heads", "expected a JSON object in the file, got something else")
        raise typer.Exit(1)
    return orjson.dumps({**document, "metrics": wanted})
