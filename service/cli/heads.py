"""`attend heads`: metrics of each head for a request in a file, as tables that fit the terminal."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.cli.flags import ENGINE_FIELDS, AsJson, Ca, Config, Url, with_settings
from service.cli.request_file import Document, File, print_reply, send_file, without_special
from service.cli.terminal import fail, report_errors
from service.client.responses import read_analysis
from service.tensors import Array
from service.wire.problems import did_you_mean
from service.wire.schemas.analysis import METRIC_SHAPES, METRICS

EPILOG = """Examples: attend heads request.json --d-model 4 --num-heads 2

attend heads request.json --metrics entropy,strongest_links,pruning_order

attend heads request.json --url http://127.0.0.1:8000 --json"""
Names = Annotated[str | None, typer.Option("--metrics", help="Names of metrics, separated by commas; or all.", show_default=False)]
Special = Annotated[bool, typer.Option("--special", help="Count special tokens ([CLS], [SEP], <s>, …) in the tables too.")]
NOT_IN_ALL = {"duplicate_token_score", "induction_score", "single_head", "value_norm_weights"}  # need tokens or equal heads, or are large
MAX_COLUMN = 12  # characters of a metric's name
CELL = 6  # characters of a column for a head
MAX_ROWS = 40  # of a table by position
MAX_ITEMS = 8  # of a batch


@with_settings(*ENGINE_FIELDS)
def heads(
    file: File,
    metrics: Names = None,
    special: Special = False,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Show metrics of each head for one request.

    Without --metrics they are those in the file, or the cheap ones that it suffices for. Without --url the layers are those that
    `attend serve` would have with the same flags, environment and file, and that in NAME.safetensors beside FILE, if the request is for
    the layer NAME. The tables leave special tokens out, as queries and in links, unless `tokens` in the file has `omit`.
    """
    wanted = None if metrics is None else _metrics(metrics)
    omitted = False

    def change(document: Document) -> Document:
        nonlocal omitted
        document = document if wanted is None else {**document, "metrics": wanted}
        shown = document if special or as_json else without_special(document)
        omitted = shown != document
        return shown

    with report_errors("heads"):
        response = send_file("heads", "/attend/analysis", file, change, url, ca, config, flags)
        result = None if as_json else read_analysis(response)
    if result is None:
        print_reply(response)
        return
    console = Console(highlight=False, markup=False)
    console.print(f"layer {result.layer.name}, fingerprint {result.layer.fingerprint[:12]}")
    if omitted:
        console.print("special tokens are left out; --special counts them")
    if result.fully_masked_rows:
        console.print(f"{result.fully_masked_rows} fully masked rows, which no metric counts")
    for table in metric_tables(result.metrics, console.width):
        console.print(Text(table) if isinstance(table, str) else table)


def _metrics(names: str) -> list[str]:
    """The names of metrics. Raises typer.Exit for an unknown one."""
    if names == "all":
        return [name for name in METRICS if name not in NOT_IN_ALL]
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in METRICS]:
        fail("heads", f"no metric is called {unknown[0]!r}{did_you_mean(unknown[0], METRICS)}", f"There are {', '.join(METRICS)}.", code=2)
    return wanted


def metric_tables(metrics: Mapping[str, Any], width: int) -> Iterator[Table | str]:
    """The tables for the metrics of an `AnalysisResult`; a line of text for an array that is too large for a table."""
    name = next(iter(metrics))
    part, letters = next(iter(METRIC_SHAPES[name].items()))
    first = _part(metrics[name], part)
    if first.ndim < len(letters):  # without a batch axis
        yield from _item(metrics, width)
        return
    for b in range(min(len(first), MAX_ITEMS)):
        yield f"item {b}"
        item = {name: {part: x[b] for part, x in value.items()} if isinstance(value, dict) else value[b] for name, value in metrics.items()}
        yield from _item(item, width)
    if len(first) > MAX_ITEMS:
        yield f"{len(first) - MAX_ITEMS} more items; --json has them"


def _item(metrics: Mapping[str, Any], width: int) -> Iterator[Table | str]:
    """The tables of one item of a batch: first metrics with one number per head, in columns, then those of other shapes."""
    flat = [
        (f"{name} {part}".strip().replace("_", " "), letters, _part(metrics[name], part))
        for name in metrics
        for part, letters in METRIC_SHAPES[name].items()
        if name not in ("strongest_links", "pruning_order")
    ]
    per_head = [(title, array) for title, letters, array in flat if letters == "bh"]
    step = max(1, (width - 6) // (MAX_COLUMN + 1))
    for start in range(0, len(per_head), step):
        titles, arrays = zip(*per_head[start : start + step], strict=True)
        yield _table("", ("head", *titles), ((str(h), *map(_number, row)) for h, row in enumerate(zip(*arrays, strict=True))))
    if all_heads := [(title, _number(float(array))) for title, letters, array in flat if letters == "b"]:
        yield _table("", ("all heads", ""), all_heads)
    if "strongest_links" in metrics:
        yield _strongest_links(metrics["strongest_links"])
    if "pruning_order" in metrics:
        order = metrics["pruning_order"]
        steps = enumerate(zip(order["heads"], order["errors"], strict=True), 1)
        rows = ((str(n), str(int(head)) if head >= 0 else "-", _number(error)) for n, (head, error) in steps)
        yield _table("pruning order", ("step", "removed head", "error after"), rows)
    for title, letters, array in flat:
        if letters == "bq":
            yield _grid(title, array[:, None], width, "query")
        elif letters in ("bhh", "bhq", "bhk"):
            yield _grid(title, array if letters == "bhh" else array.T, width, {"h": "head", "q": "query", "k": "key"}[letters[-1]])
        elif letters == "bhqk":
            yield _shape_only(title, array)


def _part(value: Any, part: str) -> Array:
    array: Array = np.asarray(value[part] if part else value)
    return array


def _number(number: float) -> str:
    return "-" if np.isnan(number) else f"{number:.3f}" if abs(number) < 1000 else f"{number:.3g}"


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=title or None, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", max_width=MAX_COLUMN if i else None)
    for row in rows:
        table.add_row(*row)
    return table


def _strongest_links(links: Mapping[str, Any]) -> Table:
    """The links query → key of each head, with words if the request had tokens."""
    table = Table("head", "strongest links", box=SIMPLE, padding=(0, 1, 0, 0))
    for h, weights in enumerate(links["weights"]):
        ends = []
        for n, weight in enumerate(weights):
            if not np.isnan(weight):
                query, key = (_position(links, side, h, n) for side in ("query", "key"))
                ends.append(f"{query}→{key}\N{NO-BREAK SPACE}{weight:.2f}")
        table.add_row(str(h), "  ".join(ends))
    return table


def _position(links: Mapping[str, Any], side: str, h: int, n: int) -> str:
    from service.attention.figures.layout import printable  # loads torch

    at = int(links["queries" if side == "query" else "keys"][h][n])
    words = links.get(f"{side}_words")
    return f"{printable(words[h][n] or '')}({at})" if words else str(at)


def _grid(title: str, rows: Array, width: int, corner: str) -> Table | str:
    """Numbers by position and head; only the shape if the table would be wider than the terminal."""
    if 8 + rows.shape[1] * (CELL + 1) > width:
        return _shape_only(title, rows)
    columns = map(str, range(rows.shape[1])) if rows.shape[1] > 1 else [""]
    table = _table(title, (corner, *columns), ((str(i), *map(_number, row)) for i, row in enumerate(rows[:MAX_ROWS])))
    if len(rows) > MAX_ROWS:
        table.caption = f"{len(rows) - MAX_ROWS} more rows; --json has them"
    return table


def _shape_only(title: str, array: Array) -> str:
    return f"{title}: {' x '.join(map(str, array.shape))} numbers; --json has them"
