"""Tables of the metrics of heads that fit the terminal, for `attend heads` and `attend demo`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from attend.tensors import Array
from attend.wire.schemas.analysis import METRICS

MAX_COLUMN = 12  # characters of a metric's name
CELL = 6  # characters of a column for a head
MAX_ROWS = 40  # of a table by position
MAX_ITEMS = 8  # of a batch


def metric_tables(metrics: Mapping[str, Any], width: int) -> Iterator[Table | str]:
    """The tables for the metrics of an `AnalysisResult`; a line of text for an array that is too large for a table."""
    name = next(iter(metrics))
    part, axes = next(iter(METRICS[name].shapes.items()))
    first = _part(metrics[name], part)
    if first.ndim < len(axes):  # without a batch axis
        yield from _item_tables(metrics, width)
        return
    for index in range(min(len(first), MAX_ITEMS)):
        yield f"item {index}"
        yield from _item_tables({name: _item(value, index) for name, value in metrics.items()}, width)
    if len(first) > MAX_ITEMS:
        yield f"{len(first) - MAX_ITEMS} more items; --json has them"


def _item(value: Any, index: int) -> Any:
    """A metric, an array or several arrays by name, of one item of a batch."""
    return {part: array[index] for part, array in value.items()} if isinstance(value, dict) else value[index]


def _item_tables(metrics: Mapping[str, Any], width: int) -> Iterator[Table | str]:
    """The tables of one item of a batch: first metrics with one number per head, in columns, then those of other shapes."""
    flat = [
        (f"{name} {part}".strip().replace("_", " "), axes, _part(metrics[name], part))
        for name in metrics
        for part, axes in METRICS[name].shapes.items()
        if name not in ("strongest_links", "pruning_order")
    ]
    per_head = [(title, array) for title, axes, array in flat if axes == "bh"]
    step = max(1, (width - 6) // (MAX_COLUMN + 1))
    for start in range(0, len(per_head), step):
        titles, arrays = zip(*per_head[start : start + step], strict=True)
        yield _table("", ("head", *titles), ((str(h), *map(_format_number, row)) for h, row in enumerate(zip(*arrays, strict=True))))
    if all_heads := [(title, _format_number(float(array))) for title, axes, array in flat if axes == "b"]:
        yield _table("", ("all heads", ""), all_heads)
    if "strongest_links" in metrics:
        yield _strongest_links(metrics["strongest_links"])
    if "pruning_order" in metrics:
        order = metrics["pruning_order"]
        steps = enumerate(zip(order["heads"], order["errors"], strict=True), 1)
        rows = ((str(n), str(int(head)) if head >= 0 else "-", _format_number(error)) for n, (head, error) in steps)
        yield _table("pruning order", ("step", "removed head", "error after"), rows)
    for title, axes, array in flat:
        if axes == "bq":
            yield _grid(title, array[:, None], width, "query")
        elif axes in ("bhh", "bhq", "bhk"):
            yield _grid(title, array if axes == "bhh" else array.T, width, {"h": "head", "q": "query", "k": "key"}[axes[-1]])
        elif axes == "bhqk":
            yield _shape_only(title, array)


def _part(value: Any, part: str) -> Array:
    """The array of a metric that has that name; the metric itself, which is one array, for the name ""."""
    array: Array = np.asarray(value[part] if part else value)
    return array


def _format_number(number: float) -> str:
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
    from attend.heads.figures.geometry import printable  # loads torch

    at = int(links["queries" if side == "query" else "keys"][h][n])
    words = links.get(f"{side}_words")
    return f"{printable(words[h][n] or '')}({at})" if words else str(at)


def _grid(title: str, rows: Array, width: int, corner: str) -> Table | str:
    """Numbers by position and head; only the shape if the table would be wider than the terminal."""
    if 8 + rows.shape[1] * (CELL + 1) > width:
        return _shape_only(title, rows)
    columns = map(str, range(rows.shape[1])) if rows.shape[1] > 1 else [""]
    table = _table(title, (corner, *columns), ((str(i), *map(_format_number, row)) for i, row in enumerate(rows[:MAX_ROWS])))
    if len(rows) > MAX_ROWS:
        table.caption = f"{len(rows) - MAX_ROWS} more rows; --json has them"
    return table


def _shape_only(title: str, array: Array) -> str:
    return f"{title}: {' x '.join(map(str, array.shape))} numbers; --json has them"
