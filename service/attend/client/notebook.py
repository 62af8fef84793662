"""Results for people: HTML for notebooks, with a heat map for each head, tables of metrics and words; metrics as text for `print`.

The HTML has no scripts and loads nothing. Texts are escaped. Its size is bounded: long sequences are pooled, and many heads left out. The
cells of a map are one PNG: as cells of tables, 16 maps of long sequences are 37,000 elements in 1.15 MB, which a notebook keeps, not 65 kB.
"""

import struct
import zlib
from binascii import b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from attend.tensors import Array
from attend.wire.schemas.analysis import METRICS
from attend.wire.schemas.tokens import Tokens

MAX_MAPS = 16  # most heat maps
MAX_CELLS = 48  # most cells along an axis; the weights that share a cell are pooled by their maximum
MAX_LABELS = 24  # most tokens along an axis that are written out
LABEL_CHARACTERS = 12  # characters of a token
MAX_ROWS = 64  # most heads or tokens in a table
LINKS_PER_HEAD = 3  # of each head in a table
TEXT_WIDTH = 100  # characters of a line of numbers
SHOWN_NUMBERS = 4  # numbers of a vector in a table
COLOURS = np.array([[244, 247, 252], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]])  # colours, as on the service's page


def heat_maps(weights: Array, select: Mapping[str, Any], tokens: Mapping[str, Any], about: str) -> str | None:
    """A heat map for each head of the first batch item; None without weights.

    `weights`: [b,h,q,k], [h,q,k], or without h if `select` averages. `select` and `tokens` are those of the request; queries and keys whose
    tokens `omit` has are left out.
    """
    if not weights.size:
        return None
    average = bool(select.get("average"))
    batched = weights.ndim == 4 - average
    of_item = weights[0] if batched else weights  # [h,q,k], or [q,k] if averaged
    names = ["mean over heads"] if average else [f"head {i}" for i in select.get("heads") or range(len(of_item))]
    maps = of_item.reshape(-1, *of_item.shape[-2:])[:MAX_MAPS].astype(np.float64)
    rows, columns = (_labels(tokens, side) for side in ("query", "key"))
    rows = [rows[i] for i in select.get("queries") or () if i < len(rows)] or rows
    omits = Tokens.model_construct(omit=tokens.get("omit")).omits
    for axis, labels in ((1, rows), (2, columns)):
        kept = [i for i, token in enumerate(labels) if not omits(token)]
        if kept and len(labels) == maps.shape[axis]:
            maps, labels[:] = maps.take(kept, axis), [labels[i] for i in kept]
    drawn = [_heat_map(cells, name, "largest weight", rows, columns) for cells, name in zip(maps, names, strict=False)]
    notes = [about]
    if batched and len(weights) > 1:
        notes.append(f"item 0 of {len(weights)}")
    if len(names) > MAX_MAPS:
        notes.append(f"{len(names) - MAX_MAPS} more heads are not shown")
    return f"{_beside(drawn)}<div>{escape('; '.join(notes))}</div>"


def metric_tables(metrics: Mapping[str, Any], about: str) -> str | None:
    """A row for each head with its numbers and strongest links, and a heat map of each metric between heads; None without any of them.

    `metrics` are those of an `AnalysisResult`. Of a batch, the first item is shown.
    """
    columns: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}  # the widest column, hence the last
    maps, others = [], []
    for name, metric in metrics.items():
        shapes = METRICS[name].shapes if name in METRICS else {}
        items = {part: _first_item(metric[part] if part else metric, letters) for part, letters in shapes.items()}
        if name == "strongest_links":
            links["strongest links"] = _links(items, metric)
        elif set(shapes.values()) == {"bh"} and name != "pruning_order":  # which has a number for each step
            columns |= {f"{name} {part}".strip().replace("_", " "): [_number(x) for x in array] for part, array in items.items()}
        elif shapes == {"": "bhh"}:
            labels = [str(i) for i in range(len(items[""]))]
            maps.append(_heat_map(items[""], name.replace("_", " "), "largest", labels, labels))
        else:
            others.append(name)
    columns |= links
    if not any(columns.values()) and not maps:
        return None
    heads = max(map(len, columns.values()), default=0)
    rows = [_row("td", [str(i), *(column[i] for column in columns.values())]) for i in range(min(heads, MAX_ROWS))]
    notes = [about]
    if heads > MAX_ROWS:
        notes.append(f"{heads - MAX_ROWS} more heads are not shown")
    if others:
        notes.append(f"also {', '.join(others)}")
    table = f"<table>{_row('th', ['head', *columns])}{''.join(rows)}</table>" if rows else ""
    return f"{table}{_beside(maps)}<div>{escape('; '.join(notes))}</div>"


def metric_text(metrics: Mapping[str, Any], about: str) -> str:
    """The numbers of each metric in brackets, the inner parts of large ones left out; of strongest links a line for each head.

    `metrics` are those of an `AnalysisResult`. Of a batch, the links of the first item are shown.
    """
    lines = [about]
    for name, metric in metrics.items():
        shapes = METRICS[name].shapes if name in METRICS else {}
        if name == "strongest_links":
            links = _links({part: _first_item(metric[part], letters) for part, letters in shapes.items()}, metric)
            lines += [name, *(f"  head {head}: {text}" for head, text in enumerate(links[:MAX_ROWS]))]
            lines += [f"  {len(links) - MAX_ROWS} more heads"] * (len(links) > MAX_ROWS)
            continue
        for part in shapes:
            title = f"{name}{'.' if part else ''}{part} "
            numbers = np.asarray(metric[part] if part else metric)
            lines.append(title + np.array2string(numbers, TEXT_WIDTH, 3, True, prefix=title, threshold=MAX_ROWS))
    return "\n".join(lines)


def word_table(tokens: Sequence[str], vectors: Array, about: str) -> str:
    """A row for each token with the beginning and the norm of its vector."""
    rows = []
    for token, vector in zip(tokens[:MAX_ROWS], vectors, strict=False):
        numbers = ", ".join(map(_number, vector[:SHOWN_NUMBERS])) + " …" * (vector.size > SHOWN_NUMBERS)
        rows.append(_row("td", [token, numbers, _number(np.linalg.norm(vector))]))
    more = f"{len(tokens) - MAX_ROWS} more tokens are not shown; " if len(tokens) > MAX_ROWS else ""
    return f"<table>{_row('th', ['token', 'vector', 'norm'])}{''.join(rows)}</table><div>{escape(more + about)}</div>"


def _first_item(array: Array, letters: str) -> Array:
    """The array without its batch axis, of which the first item is taken."""
    return array[0] if array.ndim == len(letters) and len(array) else array


def _links(parts: Mapping[str, Array], metric: Mapping[str, Any]) -> list[str]:
    """The strongest links of each head as text, with words if the request had tokens."""
    batched = metric["weights"].ndim == 3

    def end(side: str, head: int, n: int) -> str:
        words = metric.get(f"{side}_words")
        number = int(parts["queries" if side == "query" else "keys"][head, n])
        return str((words[0] if batched else words)[head][n]) if words else str(number)

    heads = []
    for head, weights in enumerate(parts["weights"]):
        links = ((n, x) for n, x in enumerate(weights[:LINKS_PER_HEAD]) if not np.isnan(x))
        heads.append(", ".join(f"{end('query', head, n)}→{end('key', head, n)} {x:.2f}" for n, x in links))
    return heads


def _number(number: Any) -> str:
    return "" if np.isnan(number) else f"{number:.3f}"


def _beside(figures: Iterable[str]) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(figures)}</div>'


def _row(tag: str, texts: Iterable[str]) -> str:
    cells = "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
    return f"<tr>{cells}</tr>" if tag == "th" else f'<tr style="white-space:nowrap">{cells}</tr>'


def _labels(tokens: Mapping[str, Any], side: str) -> list[str]:
    """The first item's tokens of queries or keys; without tokens of keys, those of queries. A wrong number of them is no label."""
    words: Sequence[Any] = tokens.get(side) or tokens.get("query") or ()
    return list(words if not words or isinstance(words[0], str) else words[0])


def _heat_map(weights: Array, name: str, largest_of: str, rows: Sequence[str], columns: Sequence[str]) -> str:
    """An SVG of weights [q,k], with the labels beside it if they are few. The last colour is the largest weight."""
    cells = _pooled(np.nan_to_num(weights, posinf=0, neginf=0))
    height, width = cells.shape
    labelled = (len(rows), len(columns)) == weights.shape and max(weights.shape) <= MAX_LABELS
    side, margin = (14, 7 * LABEL_CHARACTERS) if labelled else (max(3, 144 // max(height, width)), 0)
    largest = float(cells.max())
    picture = b2a_base64(_png(_colours(cells / largest if largest > 0 else cells)), newline=False).decode()
    texts = ""
    for i, row in enumerate(rows if labelled else ()):
        texts += f'<text x="{margin - 4}" y="{margin + side * i + 11}" text-anchor="end">{_short(row)}</text>'
    for i, column in enumerate(columns if labelled else ()):
        x, y = margin + side * i + 11, margin - 4
        texts += f'<text x="{x}" y="{y}" transform="rotate(-90 {x} {y})">{_short(column)}</text>'
    caption = f"{name}, {largest_of} {largest:.2f}"
    return (
        f'<figure style="margin:0"><figcaption>{escape(caption)}</figcaption>'
        f'<svg role="img" aria-label="{escape(caption)}" width="{margin + side * width}" height="{margin + side * height}" '
        'font-size="11" font-family="sans-serif" fill="currentColor">'
        f'<image x="{margin}" y="{margin}" width="{side * width}" height="{side * height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{picture}"/>{texts}</svg></figure>'
    )


def _short(token: str) -> str:
    return escape(token if len(token) <= LABEL_CHARACTERS else token[: LABEL_CHARACTERS - 1] + "…")


def _pooled(weights: Array) -> Array:
    """The largest weights of blocks, at most MAX_CELLS along each axis."""
    for axis, length in enumerate(weights.shape):
        cells = min(length, MAX_CELLS)
        weights = np.maximum.reduceat(weights, np.arange(cells) * length // cells, axis)
    return weights


def _colours(shares: Array) -> Array:
    """uint8 [q,k,3] of shares in 0..1."""
    stops = np.linspace(0, 1, len(COLOURS))
    return np.stack([np.interp(shares, stops, channel) for channel in COLOURS.T], -1).astype(np.uint8)


def _png(pixels: Array) -> bytes:
    """A PNG of uint8 [height, width, 3]."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = zlib.compress(b"".join(b"\0" + line.tobytes() for line in pixels))  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # eight bits a channel, RGB
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
