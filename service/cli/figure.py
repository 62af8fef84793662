"""`attend figure`: a figure of the heads for one request in a file, from a server or drawn in this process."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.clients import open_client
from service.cli.flags import ENGINE_FIELDS, AsJson, Ca, Config, Url, with_settings
from service.cli.infer import File
from service.cli.terminal import print_result, read_file, report_errors, write_file
from service.client.operations import post

EPILOG = """Examples: attend figure request.json -o heads.svg

attend figure request.json --kind mean --theme dark -o mean.png --url http://127.0.0.1:8000"""
FORMATS = {".png": "png", ".svg": "svg", ".html": "html", ".htm": "html"}

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write: .png, .svg or .html.", show_default=False)]
Kind = Annotated[str | None, typer.Option(help="heads, head, mean, std, similarity or concatenation.", show_default=False)]
Theme = Annotated[str | None, typer.Option(help="light or dark.", show_default=False)]
Head = Annotated[list[int] | None, typer.Option("--head", help="A head to show. Repeatable.", show_default=False)]
Title = Annotated[str | None, typer.Option(help="Title of the figure.", show_default=False)]
Width = Annotated[int | None, typer.Option(help="Width in CSS pixels.", show_default=False)]


@with_settings(*ENGINE_FIELDS)
def figure(
    file: File,
    output: Output,
    kind: Kind = None,
    theme: Theme = None,
    head: Head = None,
    title: Title = None,
    width: Width = None,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Draw the attention weights of one request. The file may have `tokens` as labels and `figure` with other options.

    Without --url the layers are those that `attend serve` would have with the same flags, environment and file.
    """
    if output.suffix.lower() not in FORMATS:
        raise typer.BadParameter(f"expected a name that ends in {', '.join(FORMATS)}, got {output.name}", param_hint="--output")
    options = {"kind": kind, "theme": theme, "heads": head or None, "title": title, "width": width}
    options["format"] = FORMATS[output.suffix.lower()]
    body = _with_figure(read_file("figure", file), {name: value for name, value in options.items() if value is not None})
    with report_errors("figure"), open_client(url, ca, config, flags) as client:
        drawn = client.perform(post("/attend/figure", body)).content
    write_file("figure", output, drawn)
    print_result({"file": str(output), "bytes": len(drawn)}, f"{output}: {len(drawn)} bytes", as_json)


def _with_figure(body: bytes, options: dict[str, Any]) -> bytes:
    """The body with these options in `figure`. Returns a body that is no JSON object unchanged; the service refuses it."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    if not isinstance(document, dict) or not isinstance(document.get("figure", {}), dict):
        return body
    return json.dumps({**document, "figure": {**document.get("figure", {}), **options}}).encode()
