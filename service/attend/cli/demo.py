"""`attend demo`: sends a sentence to a new server, shows what each head links in it, and prints the commands that repeat it."""

import json
import math
import shlex
import tempfile
import textwrap
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import typer
from rich.console import Console
from rich.markup import escape

from attend.cli.clients import NotStarted, child_server
from attend.cli.head_roles import ROLES, measured_roles
from attend.cli.metric_tables import metric_tables
from attend.cli.request_file import headline, without_special
from attend.cli.terminal import AsJson, fail, report_errors
from attend.client import AttendResult, Client, operations
from attend.client.responses import read_attend
from attend.serving.words.hashed import hash_words
from attend.serving.words.models import MODELS
from attend.serving.words.sentence import ModelNotInstalled, Sentence
from attend.settings import Settings
from attend.tensors import Array

EPILOG = """\b
Examples:
  attend demo --sentence "The trophy does not fit into the suitcase because it is too big"
  attend demo --vectors hash --save . --json"""
SENTENCE = "Anna sold a book to Tom and Anna sold a book to"
PORT = 8000  # in the printed commands
LINKS = 3  # shown per head


class Vectors(StrEnum):
    """Source of the tokens' vectors."""

    SMALL = "small"
    MINILM = "minilm"
    HASH = "hash"


Text = Annotated[str, typer.Option("--sentence", metavar="TEXT", help="The sentence.")]
Source = Annotated[
    Vectors,
    typer.Option("--vectors", help="The model they are from: small, which comes with attend, or minilm, all-MiniLM-L6-v2; or hash."),
]
Layer = Annotated[
    int | None, typer.Option("--layer", min=0, help="Attention layer of the model; default: a telling one.", show_default=False)
]
Save = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder for the request and its layer; default: a new temporary folder.", show_default=False),
]


def demo(
    sentence: Text = SENTENCE, vectors: Source = Vectors.SMALL, layer: Layer = None, save: Save = None, as_json: AsJson = False
) -> None:
    """Start a server, send it a sentence, show what each head links, and stop it."""
    embedded = read_sentence(sentence, vectors, layer)
    try:
        folder = Path(tempfile.mkdtemp(prefix="attend-demo-")) if save is None else save.absolute()
        request = _write_request(embedded, folder)
        with report_errors("demo"), child_server() as url, Client(url, transport=httpx.HTTPTransport()) as client:
            layer_file = _put_layer(client, embedded, folder)
            result, seconds = _send(client, request)
            metrics = client.analysis(
                embedded.vectors,
                layer=embedded.layer,
                metrics=["strongest_links", *ROLES],
                analysis={"top_links": LINKS},
                **without_special({"tokens": {"query": embedded.tokens}}),
                **embedded.options,
            )
    except NotStarted as error:
        fail("demo", str(error))
    except OSError as error:
        fail("demo", f"cannot write to {save or 'a temporary folder'}: {error.strerror}", "Give another folder with --save.")
    links = metrics["strongest_links"]
    roles = [] if vectors is Vectors.HASH else measured_roles(metrics)
    if as_json:
        document = {
            "sentence": sentence,
            "tokens": embedded.tokens,
            "layer": result.layer.model_dump(),
            "outputs": {name: list(array.shape) for name, array in result.items()},
            "heads": roles,
            "links": [_links_of_head(*head) for head in zip(links["queries"], links["keys"], links["weights"], strict=True)],
            "seconds": seconds,
            "timing": result.timing,
            "again": _commands(request, layer_file),
        }
        typer.echo(json.dumps(document))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{escape(sentence)}[/bold]\n\n{escape(textwrap.fill(embedded.note, 100))}\n")
    if roles:
        lines = [f"head {head} {role}" for head, role in enumerate(roles)]
        console.print("\n".join(["What each head does here, with the share of its weight that does it:", *lines, ""]), markup=False)
    _show_request_and_reply(console, embedded, result, seconds)
    for table in metric_tables({"strongest_links": links}, console.width):
        console.print(table, soft_wrap=False)
    size = sum(file.stat().st_size for file in (request, layer_file) if file)
    console.print(f"\nThe files in {folder} ({size / 1e3:,.0f} kB) are not removed.", markup=False)
    more = [f"attend {command} {shlex.quote(str(request))}" for command in ("heads", "figure")]  # these need no server
    for title, lines in (("More of the same request", more), ("The same by hand", _commands(request, layer_file))):
        console.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            console.print(f"  {line}", markup=False)


def read_sentence(sentence: str, vectors: Vectors, layer: int | None = None) -> Sentence:
    """The sentence as the input of a layer. Raises typer.Exit if it cannot be made."""
    if (model := MODELS.get(vectors)) is None and layer is not None:
        fail("demo", f"expected --layer with --vectors {' or '.join(MODELS)}, got --vectors hash", "Leave out one of the two.", code=2)
    try:
        if model is None:
            return hash_words(sentence, Settings.model_construct().default_layer())
        return model.read(sentence, model.telling_layer if layer is None else layer)
    except (ValueError, ModelNotInstalled) as error:
        fail("demo", str(error), "Give another --sentence, --layer or --vectors.", code=2)


def _write_request(embedded: Sentence, folder: Path) -> Path:
    """The file of the request."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {
        "layer": embedded.layer,
        "query": embedded.vectors,
        "tokens": {"query": embedded.tokens},
        **embedded.options,
        "reply": {"decimals": 4},
    }
    file = folder / "request.json"
    file.write_bytes(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
    return file


def _put_layer(client: Client, embedded: Sentence, folder: Path) -> Path | None:
    """The file of the layer, which commands read if a request beside it names the layer; None if the server has the layer already."""
    if not embedded.weights:
        return None
    client.put_layer(embedded.layer, embedded.spec, embedded.weights)
    file = folder / f"{embedded.layer}.safetensors"
    file.write_bytes(client.layer_file(embedded.layer))
    return file


def _send(client: Client, request: Path) -> tuple[AttendResult, float]:
    """The result, and the seconds of a round trip over an open connection."""
    operation = operations.post("/attend", request.read_bytes())
    client.perform(operation)
    started = time.perf_counter()
    response = client.perform(operation)
    seconds = time.perf_counter() - started
    return read_attend(response), seconds


def _show_request_and_reply(console: Console, embedded: Sentence, result: AttendResult, seconds: float) -> None:
    first = ", ".join(f"{number:.3f}" for number in embedded.vectors[0, :3])
    n, width = embedded.vectors.shape
    tokens = ", ".join(f'"{token}"' for token in embedded.tokens)
    options = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in embedded.options.items())
    console.print("[bold]POST /attend[/bold]")
    console.print(f'{{"layer": "{result.layer.name}",', markup=False)
    console.print(f' "query": [[{first}, … {width} numbers], … {n} rows],', markup=False)
    console.print(f' "tokens": {{"query": [{tokens}]}},\n{options} "reply": {{"decimals": 4}}}}', markup=False)
    console.print("\n[bold]200 OK[/bold]")
    for name, array in result.items():
        console.print(f"{name} {list(array.shape)}", markup=False)
    console.print(f"{headline(result)}; {seconds * 1e3:.1f} round trip\n", markup=False)


def _links_of_head(queries: Array, keys: Array, weights: Array) -> list[dict[str, Any]]:
    """The links for --json. A head with fewer links than requested has NaN weights in the remaining places."""
    links = zip(queries.tolist(), keys.tolist(), weights.tolist(), strict=True)
    return [{"query": query, "key": key, "weight": weight} for query, key, weight in links if not math.isnan(weight)]


def _commands(request: Path, layer: Path | None) -> list[str]:
    """Shell commands that repeat the request."""
    url = f"http://127.0.0.1:{PORT}"
    add = [] if layer is None else [f"attend layers add {layer.stem} {shlex.quote(str(layer))} --url {url}"]
    return [f"attend serve --port {PORT}", *add, f"curl -s {url}/attend --data-binary {shlex.quote(f'@{request}')}"]
