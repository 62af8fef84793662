"""`attend figure`: a figure of the heads for one request in a file, from a server or drawn in this process."""

from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.flags import ENGINE_FIELDS, AsJson, Ca, Config, Url, with_fields, with_settings
from service.cli.request_file import Document, File, send_file, without_special
from service.cli.terminal import print_result, report_errors, write_file
from service.wire.schemas.figure import Figure

EPILOG = """Examples: attend figure request.json -o heads.svg

attend figure request.json --kind head --head 3 --values --log -o head3.png

attend figure request.json --kind mean --theme dark -o mean.png --url http://127.0.0.1:8000"""
OPTIONS = ("kind", "theme", "colours", "title", "item", "pool", "maximum", "width", "dpi")
FORMATS = {".png": "png", ".svg": "svg", ".html": "html", ".htm": "html"}

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="The file to write: .png, .svg or .html; default: FILE.svg.", show_default=False),
]
Head = Annotated[list[int] | None, typer.Option("--head", help="A head to show. Repeatable.", show_default=False)]
Values = Annotated[bool | None, typer.Option("--values/--no-values", help="Write numbers in the cells.", show_default=False)]
Logarithmic = Annotated[bool | None, typer.Option("--log/--linear", help="Scale of the colours.", show_default=False)]
NoSpecial = Annotated[bool, typer.Option("--no-special", help="Leave out special tokens ([CLS], [SEP], <s>, …).")]


@with_settings(*ENGINE_FIELDS)
@with_fields(Figure, *OPTIONS)
def figure(
    file: File,
    output: Output = None,
    head: Head = None,
    values: Values = None,
    log: Logarithmic = None,
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
    given = {name: flags.pop(name, None) for name in OPTIONS} | {"heads": head or None, "values": values, "scale": scale}
    options = {name: value for name, value in given.items() if value is not None} | {"format": FORMATS[output.suffix.lower()]}

    def change(document: Document) -> Document:
        return without_special(_with_figure(document, options)) if no_special else _with_figure(document, options)

    with report_errors("figure"):
        drawn = send_file("figure", "/attend/figure", file, change, url, ca, config, flags).content
    write_file("figure", output, drawn)
    print_result({"file": str(output), "bytes": len(drawn)}, f"{output}: {len(drawn)} bytes", as_json)


def _with_figure(document: Document, options: dict[str, Any]) -> Document:
    """The request with these options in `figure`; unchanged if that is no object, which the service refuses."""
    figure = document.get("figure", {})
    return {**document, "figure": {**figure, **options}} if isinstance(figure, dict) else document
