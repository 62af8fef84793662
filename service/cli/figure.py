"""`attend figure`: a figure of the heads for one request in a file, from a server or drawn in this process."""

from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.flags import ENGINE_FIELDS, AsJson, Ca, Config, Url, with_settings
from service.cli.request_file import Document, File, send_file, without_special
from service.cli.terminal import print_result, report_errors, write_file

EPILOG = """Examples: attend figure request.json -o heads.svg

attend figure request.json --kind head --head 3 --values --log -o head3.png

attend figure request.json --kind mean --theme dark -o mean.png --url http://127.0.0.1:8000"""
FORMATS = {".png": "png", ".svg": "svg", ".html": "html", ".htm": "html"}

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="The file to write: .png, .svg or .html; default: FILE.svg.", show_default=False),
]
KindOption = Annotated[str | None, typer.Option(help="heads, head, mean, std, similarity or concatenation.", show_default=False)]
Theme = Annotated[str | None, typer.Option(help="light or dark.", show_default=False)]
Colours = Annotated[str | None, typer.Option(help="viridis or cividis.", show_default=False)]
Title = Annotated[str | None, typer.Option(help="Title of the figure.", show_default=False)]
Head = Annotated[list[int] | None, typer.Option("--head", help="A head to show. Repeatable.", show_default=False)]
Item = Annotated[int | None, typer.Option(help="Index of the batch item to draw.", show_default=False)]
Pool = Annotated[str | None, typer.Option(help="mean or max, for pairs that share a cell.", show_default=False)]
Values = Annotated[bool | None, typer.Option("--values/--no-values", help="Write numbers in the cells.", show_default=False)]
Logarithmic = Annotated[bool | None, typer.Option("--log/--linear", help="Scale of the colours.", show_default=False)]
Maximum = Annotated[float | None, typer.Option(help="Value of the last colour.", show_default=False)]
Width = Annotated[int | None, typer.Option(help="Width in CSS pixels.", show_default=False)]
NoSpecial = Annotated[bool, typer.Option("--no-special", help="Leave out special tokens ([CLS], [SEP], <s>, …).")]
Dpi = Annotated[int | None, typer.Option(help="Resolution of a PNG; 96: a CSS pixel is a pixel.", show_default=False)]


@with_settings(*ENGINE_FIELDS)
def figure(
    file: File,
    output: Output = None,
    kind: KindOption = None,
    theme: Theme = None,
    colours: Colours = None,
    title: Title = None,
    head: Head = None,
    item: Item = None,
    pool: Pool = None,
    values: Values = None,
    log: Logarithmic = None,
    maximum: Maximum = None,
    width: Width = None,
    dpi: Dpi = None,
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
    options: dict[str, Any] = {
        "kind": kind,
        "format": FORMATS[output.suffix.lower()],
        "theme": theme,
        "colours": colours,
        "title": title,
        "heads": head or None,
        "item": item,
        "pool": pool,
        "values": values,
        "scale": None if log is None else "log" if log else "linear",
        "maximum": maximum,
        "width": width,
        "dpi": dpi,
    }
    options = {name: value for name, value in options.items() if value is not None}

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
