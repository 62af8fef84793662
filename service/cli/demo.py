"""`attend demo`: a real sentence through a real server, shown in the terminal, and how to repeat it by hand."""

import json
import shlex
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import typer
from rich.console import Console
from rich.markup import escape

from service.cli.child import NotStarted, child_server
from service.cli.exits import complain, reported
from service.cli.flags import AsJson
from service.cli.infer import headline
from service.cli.links import linked, links_table
from service.client import AttendResult, Client, calls
from service.serving.embeddings import NoModel, Sentence, hash_words, read_minilm
from service.settings import Settings

EPILOG = """Examples: attend demo --sentence "The trophy does not fit into the suitcase because it is too big"

attend demo --vectors hash --save . --json"""
SENTENCE = "The cat sat on the mat because it was tired"
PORT = 8000  # of the lines to repeat it with
HASH_NOTE = """Each word's vector is drawn from the word's own hash, and the layer's weights from a seed: nothing here was learnt.
The heads mean nothing; what they link shows the form of an answer, no more."""
MINILM_NOTE = """The vectors are what attention layer {} of all-MiniLM-L6-v2 (of 0 to 5) gets in that model, and the weights are
that layer's own: what the heads link is what they learnt to link."""


class Vectors(StrEnum):
    """Where the tokens' vectors come from."""

    AUTO = "auto"
    HASH = "hash"
    MINILM = "minilm"


Text = Annotated[str, typer.Option("--sentence", metavar="TEXT", help="What to put through it.")]
Kind = Annotated[Vectors, typer.Option("--vectors", help="Of the words' own hash, or of all-MiniLM-L6-v2; auto takes that if installed.")]
Layer = Annotated[int | None, typer.Option("--layer", min=0, help="Of all-MiniLM-L6-v2, which attention layer, from 0; 0 if not given.")]
Save = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write the request; a new temporary folder if not given.")]


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(demo)


def demo(sentence: Text = SENTENCE, vectors: Kind = Vectors.AUTO, layer: Layer = None, save: Save = None, as_json: AsJson = False) -> None:
    """Start a server, put a sentence through it, show what each head links, and stop it."""
    console = Console(highlight=False, soft_wrap=True)
    read, note = read_sentence(sentence, vectors, layer)
    try:
        folder = Path(tempfile.mkdtemp(prefix="attend-demo-")) if save is None else save.absolute()
        files = _write(read, folder)
        with reported("demo"), child_server() as url, Client(url, transport=httpx.HTTPTransport()) as client:
            result, seconds = _ask(client, read, files)
    except NotStarted as error:
        complain("demo", str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        complain("demo", f"cannot write to {save or 'a temporary folder'}: {error.strerror}", "Give another folder with --save.")
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_document(sentence, read, files, result, seconds)))
        return
    console.print(f"\n[bold]{escape(sentence)}[/bold]\n\n{escape(note)}\n")
    _show(console, read, result, seconds)
    _show_how(console, read, files)


@dataclass(frozen=True, slots=True)
class _Files:
    """The bodies, as files that anyone can post: of the layer, where its weights are not drawn, and of the request."""

    request: Path
    layer: Path | None


def read_sentence(sentence: str, vectors: Vectors, layer: int | None = None) -> tuple[Sentence, str]:
    """The sentence's vectors and layer, and what is to be said of them. Ends the command where there are none."""
    drawn = Settings.model_construct().default_layer()  # that of a server nobody has configured
    if vectors is Vectors.HASH and layer is not None:
        complain("demo", "expected --layer with the model's vectors, got --vectors hash", "Leave out one of the two.")
        raise typer.Exit(2)
    try:
        if vectors is Vectors.HASH:
            return hash_words(sentence, drawn), HASH_NOTE
        try:
            return read_minilm(sentence, layer or 0), MINILM_NOTE.format(layer or 0)
        except NoModel as error:
            if vectors is Vectors.MINILM or layer is not None:
                complain("demo", str(error))
                raise typer.Exit(1) from None
            return hash_words(sentence, drawn), f"{HASH_NOTE}\nFor heads that mean something: {error}"
    except ValueError as error:
        complain("demo", str(error), "Give another --sentence or --layer.")
        raise typer.Exit(2) from None


def _write(read: Sentence, folder: Path) -> _Files:
    folder.mkdir(parents=True, exist_ok=True)
    files = _Files(folder / "request.json", folder / "layer.json" if read.weights else None)
    body = {"layer": read.layer, "query": read.vectors, "tokens": {"query": read.tokens}, "reply": {"decimals": 4}}
    files.request.write_bytes(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
    if files.layer is not None:
        files.layer.write_bytes(calls.put_layer(read.layer, read.spec, read.weights).body or b"")
    return files


def _ask(client: Client, read: Sentence, files: _Files) -> tuple[AttendResult, float]:
    """The answer, and the seconds it took from here to the server and back, on a connection that is open."""
    if files.layer is not None:
        client.send(calls.Call("PUT", calls.layer_path(read.layer), files.layer.read_bytes(), repeat="unbegun"))
    call = calls.Call("POST", "/attend", files.request.read_bytes(), calls.read_attend)
    client.send(call)
    started = time.perf_counter()
    response = client.send(call)
    return calls.read_attend(response), time.perf_counter() - started


def _document(sentence: str, read: Sentence, files: _Files, result: AttendResult, seconds: float) -> dict[str, Any]:
    return {
        "sentence": sentence,
        "tokens": read.tokens,
        "layer": result.layer.model_dump(),
        "outputs": {name: list(array.shape) for name, array in result.items()},
        "links": [
            [{"query": q, "key": k, "weight": float(rows[q, k])} for q, k in links]
            for rows, links in zip(result.attention_weights, linked(result.attention_weights, read.tokens), strict=True)
        ],
        "seconds": seconds,
        "timing": result.timing,
        "again": _again(read, files),
    }


def _show(console: Console, read: Sentence, result: AttendResult, seconds: float) -> None:
    first = ", ".join(f"{number:.3f}" for number in read.vectors[0, :3])
    n, width = read.vectors.shape
    console.print("[bold]POST /attend[/bold]")
    tokens = ", ".join(f'"{token}"' for token in read.tokens)
    for line in (
        f'{{"layer": "{result.layer.name}",',
        f' "query": [[{first}, … {width} numbers], … {n} rows],',
        f' "tokens": {{"query": [{tokens}]}},',
        ' "reply": {"decimals": 4}}',
    ):
        console.print(line, markup=False)
    console.print("\n[bold]200 OK[/bold]")
    for name, array in result.items():
        console.print(f"{name} {list(array.shape)}", markup=False)
    console.print(f"{headline(result)}; {seconds * 1e3:.1f} there and back\n", markup=False)
    console.print(links_table(result.attention_weights, read.tokens), soft_wrap=False)


def _show_how(console: Console, read: Sentence, files: _Files) -> None:
    size = sum(path.stat().st_size for path in (files.request, files.layer) if path is not None)
    console.print(f"\nThe files in {files.request.parent} ({size / 1e6:.1f} MB) stay; remove them when you are done.", markup=False)
    console.print("\n[bold]Again, by hand[/bold]")
    for line in _again(read, files):
        console.print(f"  {line}", markup=False)


def _again(read: Sentence, files: _Files) -> list[str]:
    """The lines for a shell that repeat it."""
    url = f"http://127.0.0.1:{PORT}"
    lines = [f"attend serve --port {PORT}"]
    if files.layer is not None:
        lines.append(f"curl -s -X PUT {url}/layers/{read.layer} --data-binary {shlex.quote(f'@{files.layer}')}")
    lines.append(f"curl -s {url}/attend --data-binary {shlex.quote(f'@{files.request}')}")
    return lines
