"""A request in a file, for `attend infer`, `heads` and `figure`: reads it, changes some of its members, and sends it."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import typer

from service.cli.clients import open_client
from service.cli.terminal import read_file
from service.client import Client
from service.client.operations import post
from service.client.sessions import SESSIONS
from service.errors import LayerNotFound
from service.wire.schemas.attend import is_special

File = Annotated[str, typer.Argument(metavar="FILE", help="A JSON body of POST /attend; - reads standard input.", show_default=False)]
Document = dict[str, Any]


def send_file(
    command: str,
    path: str,
    file: str,
    change: Callable[[Document], Document],
    url: str | None,
    ca: Path | None,
    config: Path | None,
    flags: Mapping[str, Any],
) -> httpx.Response:
    """The response to the changed request in the file. Raises typer.Exit, BadSettings or AttendError.

    A body that is no JSON object is sent unchanged, and the service refuses it.
    """
    body, layer = read_file(command, file), ""
    try:
        document = orjson.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        layer, changed = str(document.get("layer", "")), change(document)
        body = body if changed == document else orjson.dumps(changed)
    with open_client(url, ca, config, flags) as client, _layer_beside(client, file, layer, url, flags):
        return client.perform(post(path, body, "unbegun" if path.startswith(SESSIONS) else "always"))  # a step appends rows


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
    """The request with "omit": "special" among its tokens, unless it has `omit`, no special tokens, or nothing else in a batch item."""
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


def print_reply(response: httpx.Response) -> None:
    """Prints the body of a JSON reply."""
    sys.stdout.buffer.write(response.content + b"\n")
