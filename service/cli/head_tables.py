"""Metrics as tables that fit a terminal: one row per head, then the links in words, then pairs of heads. Knows no server.

What is too large for a terminal is named with its shape; `--json` has it all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from service.tensors import Array
from service.wire.schemas.analysis import SHAPES

COLUMN = 12  # characters of a column with a metric's name above it
CELL = 6  # of one whose head is a number
ROWS = 40  # of a table by position
ITEMS = 8  # of a batch


def tables(metrics: Mapping[str, Any], width: int, batched: bool) -> Iterator[Table | str]:
    """Everything to print, from metrics as `read_metrics` returns them."""
    if not batched:
        yield from _item(metrics, width)
        return
    items = len(next(_arrays(next(iter(metrics.values())))))
    for b in range(min(items, ITEMS)):
        yield f"item {b}"
        yield from _item({name: _of_item(value, b) for name, value in metrics.items()}, width)
    if items > ITEMS:
        yield f"{items - ITEMS} more items; --json has them"


def is_batched(metrics: Mapping[str, Any]) -> bool:
    """Whether the metrics have a leading axis of items, told by their ranks."""
    name, value = next(iter(metrics.items()))
    part = next(iter(SHAPES[name]))
    return bool(np.ndim(value[part] if part else value) == len(SHAPES[name][part]))


def _arrays(value: Any) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else [value]


def _of_item(value: Any, b: int) -> Any:
    return {part: x[b] for part, x in value.items()} if isinstance(value, dict) else value[b]


def _item(metrics: Mapping[str, Any], width: int) -> Iterator[Table | str]:
    """The tables of one item: numbers per head side by side, and whatever has another shape below."""
    flat = [(name, part, letters, _part(metrics[name], part)) for name in metrics for part, letters in SHAPES[name].items()]
    per_head = [(_title(name, part), array) for name, part, letters, array in flat if letters == "bh" and name != "pruning_order"]
    step = max(1, (width - 6) // (COLUMN + 1))
    for start in range(0, len(per_head), step):
        yield _per_head(per_head[start : start + step])
    if whole := [(_title(name, part), array) for name, part, letters, array in flat if letters == "b"]:
        yield _whole(whole)
    if "strongest_links" in metrics:
        yield _links(metrics["strongest_links"])
    if "pruning_order" in metrics:
        yield _order(metrics["pruning_order"])
    for name, part, letters, array in flat:
        grids = {"bhh": array, "bhq": array.T, "bhk": array.T, "bq": array[:, None] if letters == "bq" else array}
        if letters in grids:
            yield _grid(_title(name, part), grids[letters], width, "query" if "q" in letters else "head" if letters == "bhh" else "key")
        elif letters == "bhqk":
            yield f"{_title(name, part)}: {' x '.join(map(str, array.shape))} numbers; --json has them"


def _part(value: Any, part: str) -> Array:
    array: Array = np.asarray(value[part] if part else value)
    return array


def _title(name: str, part: str) -> str:
    return f"{name} {part}".strip().replace("_", " ")


def _number(number: float) -> str:
    return "-" if np.isnan(number) else f"{number:.3f}" if abs(number) < 1000 else f"{number:.3g}"


def _table(*columns: str, title: str = "") -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=title or None, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", max_width=COLUMN if i else None)
    return table


def _per_head(columns: Sequence[tuple[str, Array]]) -> Table:
    table = _table("head", *(title for title, _ in columns))
    for h in range(len(columns[0][1])):
        table.add_row(str(h), *(_number(array[h]) for _, array in columns))
    return table


def _whole(rows: Sequence[tuple[str, Array]]) -> Table:
    table = _table("all heads", "")
    for title, array in rows:
        table.add_row(title, _number(float(array)))
    return table


def _links(links: Mapping[str, Any]) -> Table:
    """Each head's links, query → key, in words where there are words; as many as fit wrap into the second column."""
    table = Table("head", "strongest links", box=SIMPLE, padding=(0, 1, 0, 0))
    for h, weights in enumerate(links["weights"]):
        ends = []
        for n, weight in enumerate(weights):
            if not np.isnan(weight):
                query, key = (_end(links, side, h, n) for side in ("query", "key"))
                ends.append(f"{query}→{key}\N{NO-BREAK SPACE}{weight:.2f}")
        table.add_row(str(h), "  ".join(ends))
    return table


def _end(links: Mapping[str, Any], side: str, h: int, n: int) -> str:
    from service.attention.figures.labels import printable  # whose room loads torch, which a command does late

    at = int(links["queries" if side == "query" else "keys"][h][n])
    words = links.get(f"{side}_words")
    return f"{printable(words[h][n] or '')}({at})" if words else str(at)


def _order(order: Mapping[str, Array]) -> Table:
    table = _table("step", "head that goes", "error after", title="pruning order")
    for step, (head, error) in enumerate(zip(order["heads"], order["errors"], strict=True), 1):
        table.add_row(str(step), str(int(head)) if head >= 0 else "-", _number(error))
    return table


def _grid(title: str, rows: Array, width: int, corner: str) -> Table | str:
    """Numbers by position and head; only its shape where it is wider than the terminal."""
    if 8 + rows.shape[1] * (CELL + 1) > width:
        return f"{title}: {' x '.join(map(str, rows.shape))} numbers; --json has them"
    table = _table(corner, *(str(h) for h in range(rows.shape[1])) if rows.shape[1] > 1 else [""], title=title)
    for i, row in enumerate(rows[:ROWS]):
        table.add_row(str(i), *map(_number, row))
    if len(rows) > ROWS:
        table.caption = f"{len(rows) - ROWS} more rows; --json has them"
    return table
