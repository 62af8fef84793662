"""`attend infer`, `attend heads` and `attend figure`: the reply to one request in a file, from a server or computed in this process."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import orjson
import typer
from rich.console import Console
from rich.text import Text

from attend.cli.clients import open_client
from attend.cli.metric_tables import metric_tables
from attend.cli.model_folder import Target
from attend.cli.terminal import (
    ENGINE_FIELDS,
    AsJson,
    Ca,
    Config,
    Url,
    fail,
    print_result,
    report_errors,
    with_fields,
    with_settings,
    write_file,
)
from attend.client import AttendResult, Client, TopWeights
from attend.client.operations import post
from attend.client.responses import read_analysis, read_attend
from attend.client.sessions import SESSIONS, session_path
from attend.errors import LayerNotFound, did_you_mean
from attend.tensors import Array
from attend.wire.schemas.analysis import METRICS
from attend.wire.schemas.figure import Figure
from attend.wire.schemas.tokens import is_special

INFER_EPILOG = """\b
Examples:
  attend infer request.json --d-model 4 --num-heads 2
  echo '{"query": [[1, 0, 0, 0], [0, 1, 0, 0]]}' | attend infer - --d-model 4 --num-heads 2 --json
  attend infer request.json --url http://127.0.0.1:8000
  attend infer step.json --session ID --url http://127.0.0.1:8000"""
HEADS_EPILOG = """\b
Examples:
  attend heads request.json --d-model 4 --num-heads 2
  attend heads request.json --metrics entropy,strongest_links,pruning_order
  attend heads request.json --url http://127.0.0.1:8000 --json
  attend heads path/to/model --text "Mary and John went to the store, and John gave a drink to" --token " Mary\""""
FIGURE_EPILOG = """\b
Examples:
  attend figure request.json -o heads.svg
  attend figure request.json --kind head --head 3 --values --log -o head3.png
  attend figure request.json --kind mean --theme dark -o mean.png --url http://127.0.0.1:8000"""
File = Annotated[str, typer.Argument(metavar="FILE", help="A JSON body of POST /attend; - reads standard input.", show_default=False)]
SessionId = Annotated[str | None, typer.Option("--session", help="Id of a session of the server, as POST /sessions returns it.")]
FileOrModel = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A JSON body of POST /attend, - for standard input; or, with --text, a model: its folder, or its name in the cache.",
        show_default=False,
    ),
]
ModelText = Annotated[
    str | None, typer.Option("--text", help="With a model: the text whose next or masked token it predicts.", show_default=False)
]
Token = Annotated[
    str | None, typer.Option("--token", help="With a model: the predicted token; the most likely one if not set.", show_default=False)
]
CaptureFile = Annotated[
    Path | None,
    typer.Option(
        "--capture",
        metavar="FILE",
        help="With a model: also write its layers, their inputs and the map to a file for the page.",
        show_default=False,
    ),
]
Names = Annotated[str | None, typer.Option("--metrics", help="Names of metrics, separated by commas; or all.", show_default=False)]
Special = Annotated[bool, typer.Option("--special", help="Count special tokens ([CLS], [SEP], <s>, …) in the tables too.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="The file to write: .png, .svg or .html; default: FILE.svg.", show_default=False),
]
Head = Annotated[list[int] | None, typer.Option("--head", help="A head to show. Repeatable.", show_default=False)]
Values = Annotated[bool | None, typer.Option("--values/--no-values", help="Write numbers in the cells.", show_default=False)]
Logarithmic = Annotated[bool | None, typer.Option("--log/--linear", help="Scale of the colours.", show_default=False)]
PerHead = Annotated[bool | None, typer.Option("--scale-per-head", help="Each head has a colour scale of its own.", show_default=False)]
NoSpecial = Annotated[bool, typer.Option("--no-special", help="Leave out special tokens ([CLS], [SEP], <s>, …).")]

FIGURE_FLAGS = ("kind", "theme", "colours", "title", "item", "pool", "maximum", "width", "dpi")  # named after fields of a figure
FORMATS = {".png": "png", ".svg": "svg", ".html": "html", ".htm": "html"}
MAX_NUMBERS = 512  # of a tensor that is printed in full
Document = dict[str, Any]


@with_settings(*ENGINE_FIELDS)
def infer(
    file: File,
    session: SessionId = None,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Compute one request and show the shapes and numbers of the reply.

    Without --url the layers are those that `attend serve` would have with the same flags, environment and file, and that in
    NAME.safetensors beside FILE, if the request is for the layer NAME.

    With --session the request is a step: its rows are appended to the session, and attend to all rows of it.
    """
    if session is not None and url is None:
        raise typer.BadParameter("expected --url with --session, since a server keeps the session")
    path = "/attend" if session is None else f"{session_path(session)}/attend"
    with report_errors("infer"):
        request = read_request("infer", file)
        response = request.send(path, request.document, url, ca, config, flags)
        result = None if as_json else read_attend(response)
    if result is None:
        typer.echo(response.content)
        return
    console = Console(highlight=False, markup=False)
    console.print(headline(result), soft_wrap=True)
    for name, tensor in result.items():
        parts = tensor._asdict().items() if isinstance(tensor, TopWeights) else [("", tensor)]
        for part, array in parts:
            console.print(f"\n{name}{'.' if part else ''}{part} {list(array.shape)}")
            console.print(format_numbers(array, console.width), soft_wrap=True)


@with_settings(*ENGINE_FIELDS)
def heads(
    file: FileOrModel,
    metrics: Names = None,
    special: Special = False,
    text: ModelText = None,
    token: Token = None,
    target: Target = None,
    capture: CaptureFile = None,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Show metrics of each head for one request, or what each head of a model does to its answer to a text.

    Without --metrics they are those in the file, or the cheap ones that it suffices for. Without --url the layers are those that
    `attend serve` would have with the same flags, environment and file, and that in NAME.safetensors beside FILE, if the request is for
    the layer NAME. The tables leave special tokens out, as queries and in links, unless `tokens` in the file has `omit`.

    With --text and a model, which needs transformers, the table is of layers and heads: the change of the logarithm of the token's
    probability if one head is switched off.
    """
    if text is None and Path(file).is_dir():
        fail("heads", f"expected --text, since {file} is a folder", code=2)
    if text is not None:
        from attend.cli.model_heads import show_effects

        show_effects(Path(file), text, token, target, capture, url, ca, as_json, config, flags)
        return
    if any(given is not None for given in (token, target, capture)):
        fail("heads", "expected --text and a model beside --token, --target and --capture", code=2)
    wanted = None if metrics is None else _metrics(metrics)
    with report_errors("heads"):
        request = read_request("heads", file)
        document = request.document if wanted is None else {**request.document, "metrics": wanted}
        sent = document if special or as_json else without_special(document)
        response = request.send("/attend/analysis", sent, url, ca, config, flags)
        result = None if as_json else read_analysis(response)
    if result is None:
        typer.echo(response.content)
        return
    console = Console(highlight=False, markup=False)
    console.print(f"layer {result.layer.name}, fingerprint {result.layer.fingerprint[:12]}")
    if sent != document:
        console.print("special tokens are left out; --special counts them")
    if result.fully_masked_rows:
        console.print(f"{result.fully_masked_rows} fully masked rows, which no metric counts")
    for table in metric_tables(result.metrics, console.width):
        console.print(Text(table) if isinstance(table, str) else table)


def _metrics(names: str) -> list[str]:
    """The names of metrics. Raises typer.Exit for an unknown one."""
    if names == "all":
        return [name for name, row in METRICS.items() if not (row.needs_tokens or row.needs_equal_heads or row.holds_weights)]
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in METRICS]:
        fail("heads", f"no metric is called {unknown[0]!r}{did_you_mean(unknown[0], METRICS)}", f"There are {', '.join(METRICS)}.", code=2)
    return wanted


@with_settings(*ENGINE_FIELDS)
@with_fields(Figure, *FIGURE_FLAGS)
def figure(
    file: File,
    output: Output = None,
    head: Head = None,
    values: Values = None,
    log: Logarithmic = None,
    per_head: PerHead = None,
    no_special: NoSpecial = False,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Draw the attention weights of one request. The file may have `tokens` as labels, and `figure` with the same options as the flags.

    Without --url the layers are those that `attend serve` would have with the same flags, environment and file, and that in
    NAME.safetensors beside FILE, if the request is for the layer NAME.
    """
    output = output or Path("figure.svg" if file == "-" else Path(file).with_suffix(".svg"))
    if output.suffix.lower() not in FORMATS:
        raise typer.BadParameter(f"expected a name that ends in {', '.join(FORMATS)}, got {output.name}", param_hint="--output")
    scale = None if log is None else "log" if log else "linear"
    given = {name: flags.pop(name, None) for name in FIGURE_FLAGS} | {"heads": head or None, "values": values, "scale": scale}
    given["scale_per_head"] = per_head
    options = {name: value for name, value in given.items() if value is not None} | {"format": FORMATS[output.suffix.lower()]}
    with report_errors("figure"):
        request = read_request("figure", file)
        document, in_file = request.document, request.document.get("figure", {})
        if isinstance(in_file, dict):  # the service refuses anything else
            document = {**document, "figure": {**in_file, **options}}
        sent = without_special(document) if no_special else document
        drawn = request.send("/attend/figure", sent, url, ca, config, flags).content
    write_file("figure", output, drawn)
    print_result({"file": str(output), "bytes": len(drawn)}, f"{output}: {len(drawn)} bytes", as_json)


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A request in a file. `document` is the parsed body; {} if that is no JSON object: then the body is sent unchanged, and refused."""

    file: str
    body: bytes
    document: Document

    def send(
        self, path: str, changed: Document, url: str | None, ca: Path | None, config: Path | None, flags: Mapping[str, Any]
    ) -> httpx.Response:
        """The response to the changed document. Raises BadSettings, AttendError or typer.BadParameter."""
        body = orjson.dumps(changed) if self.document and changed != self.document else self.body
        layer = str(self.document.get("layer", ""))
        with open_client(url, ca, config, flags) as client, _layer_beside(client, self.file, layer, url, flags):
            return client.perform(post(path, body, "if_not_begun" if path.startswith(SESSIONS) else "always"))  # a step appends rows


def read_request(command: str, file: str) -> RequestFile:
    """The request in a file, or in standard input for -. Raises typer.Exit if the file cannot be read."""
    try:
        body = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        more = ", or a model with --text" if command == "heads" else ""
        hint = f"Give the file of a JSON body of POST /attend, or - for standard input{more}."
        fail(command, f"cannot read {file}: {error.strerror}", hint, code=2)
    try:
        document = orjson.loads(body)
    except ValueError:
        document = {}
    return RequestFile(file, body, document if isinstance(document, dict) else {})


@contextmanager
def _layer_beside(client: Client, file: str, layer: str, url: str | None, flags: Mapping[str, Any]) -> Iterator[None]:
    """Adds a layer that only a file NAME.safetensors beside FILE has; on a server, a refusal names the command that adds it."""
    beside = next((path for path in Path(file).parent.glob("*.safetensors") if path.stem == layer), None) if file != "-" else None
    if beside is None:
        yield
    elif url is None:
        if flags.get("layers_dir") is None and layer not in {known.name for known in client.layers()}:
            client.put_layer_file(layer, beside)
        yield
    else:
        try:
            yield
        except LayerNotFound as error:
            error.add_note(f"To add it: attend layers add {layer} {shlex.quote(str(beside))} --url {shlex.quote(url)}")
            raise


def without_special(document: Document) -> Document:
    """The request with "omit": "special" in `tokens`; unchanged if it has `omit`, if no token is special, or if all of an item are."""
    tokens = document.get("tokens")
    if not isinstance(tokens, dict):
        return document
    rows = [row for side in ("query", "key") for row in _rows(tokens.get(side)) if isinstance(row, list) and row]
    special = [[is_special(str(token)) for token in row] for row in rows]
    if not any(map(any, special)) or any(map(all, special)):
        return document
    return {**document, "tokens": {"omit": "special", **tokens}}


def _rows(tokens: Any) -> list[Any]:
    """One list of tokens as the only item of a batch; several as they are."""
    if not isinstance(tokens, list) or not tokens:
        return []
    return tokens if isinstance(tokens[0], list) else [tokens]


def headline(result: AttendResult) -> str:
    """One line with the layer, its fingerprint and the time of each phase."""
    line = f"layer {result.layer.name}, fingerprint {result.layer.fingerprint[:12]}"
    if result.session_length is not None:
        line += f", session of {result.session_length} rows"
    if result.fully_masked_rows:
        line += f", {result.fully_masked_rows} fully masked rows"
    return line + "; ms: " + ", ".join(f"{phase} {duration:g}" for phase, duration in result.timing.items())


def format_numbers(array: Array, width: int) -> str:
    """The numbers of an array in brackets; only the corners of a large one."""
    array = array if array.dtype.kind in "iu" else array.astype(np.float64)
    return np.array2string(array, max_line_width=width, precision=4, suppress_small=True, threshold=MAX_NUMBERS)
