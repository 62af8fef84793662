"""Large JSON bodies, parsed a piece at a time: the rows of their tensors are found by the brackets alone.

A parser needs several times the memory of what it parses, and holds the interpreter's lock all the while: parsed in pieces, a
body of a hundred megabytes leaves other threads their turn, and nothing but its arrays. Whatever does not look regular is no business
of this file: such a body is parsed in one piece, which also finds what is wrong with it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from service.errors import AttendError
from service.tensors import Array
from service.wire import json_form
from service.wire.arrays import Kind
from service.wire.json_rows import parse_rows
from service.wire.limits import WireLimits

WORTHWHILE = 1 << 21  # bytes of a body from which on pieces pay
PIECE = 1 << 17  # bytes: with all that the parser makes of it, it stays in the processor's caches
STRINGS = 1 << 16  # quotation marks at most: names and words, not a document of strings


@dataclass(frozen=True, slots=True)
class Pieces:
    """A body without its large tensors: each stands there as a 0, and here, by its field, as the pieces of the body that hold its rows."""

    rest: bytes
    tensors: dict[str, list["Rows"]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor, along its outermost axis: where their text is, and how many there are."""

    text: slice
    count: int


def parse(body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False) -> dict[str, Any]:
    """What `json_form.parse` gives for the same body, and raises, for less memory."""
    members = _parse_in_pieces(body, kinds, limits, shapes_alone)
    return json_form.parse(body, kinds, limits, shapes_alone) if members is None else members


def _parse_in_pieces(body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool) -> dict[str, Any] | None:
    """The members of a large body whose tensors are regular; None for any other, and for one with anything wrong in it."""
    if (pieces := find_pieces(body, kinds)) is None or (arrays := _assembled(body, pieces, kinds, limits)) is None:
        return None
    try:
        return json_form.parse(pieces.rest, kinds, limits, shapes_alone) | arrays
    except AttendError:
        return None


def _assembled(body: bytes, pieces: Pieces, kinds: Mapping[str, Kind], limits: WireLimits) -> dict[str, Array] | None:
    """The large tensors, each put together from its pieces; None where one is not regular."""
    arrays: dict[str, Array] = {}
    for field, parts in pieces.tensors.items():
        start = 0
        for part in parts:
            rows = parse_rows(memoryview(body)[part.text], kinds[field], limits)
            if rows is None or len(rows) != part.count or (start and rows.shape[1:] != arrays[field].shape[1:]):
                return None
            if not start:
                arrays[field] = np.empty((sum(each.count for each in parts), *rows.shape[1:]))
            arrays[field][start : start + part.count] = rows
            start += part.count
    return arrays


def find_pieces(body: bytes, fields: Container[str]) -> Pieces | None:
    """The large tensors of a JSON object among its members named in `fields`; None where there are none to be sure of."""
    if len(body) < WORTHWHILE or b"\\" in body:  # every second quotation mark ends a string
        return None
    quotes = _quotes(body)
    if quotes is None or not len(brackets := _brackets(body, quotes)):
        return None
    opens = np.isin(_characters(body)[brackets], np.frombuffer(b"[{", np.uint8))
    depth = np.cumsum(np.where(opens, 1, -1))
    ends = brackets[~opens & (depth == 1)]
    tensors, rest, last = {}, [], 0
    for start in brackets[opens & (depth == 2)].tolist():
        end = int(ends[np.searchsorted(ends, start)]) if len(ends) and ends[-1] > start else 0
        field = _field(body, quotes, start)
        if end - start < PIECE or field not in fields or body[start] != ord("["):
            continue
        inside = slice(*np.searchsorted(brackets, (start + 1, end)))
        rows = _rows(body, slice(start, end), brackets[inside], opens[inside], depth[inside])
        if rows is None or field in tensors:
            return None
        tensors[field] = rows
        rest += [body[last:start], b"0"]
        last = end + 1
    return Pieces(b"".join((*rest, body[last:])), tensors) if tensors else None


def _characters(body: bytes) -> Array:
    characters: Array = np.frombuffer(body, np.uint8)
    return characters


def _quotes(body: bytes) -> Array | None:
    """Where quotation marks stand; None where there are too many, or one too few."""
    found, at = [], body.find(b'"')
    while at >= 0:
        found.append(at)
        if len(found) > STRINGS:
            return None
        at = body.find(b'"', at + 1)
    return np.array(found, np.int64) if len(found) % 2 == 0 else None


def _brackets(body: bytes, quotes: Array) -> Array:
    """Where brackets and braces stand outside of strings."""
    characters, step, found = _characters(body), 1 << 18, []
    for start in range(0, len(characters), step):
        piece = characters[start : start + step]
        found.append(np.flatnonzero((piece & 0xD9) == 0x59) + start)  # [ ] { } and Y _ y DEL, of which numbers have none
    at: Array = np.concatenate(found)
    outside: Array = np.isin(characters[at], np.frombuffer(b"[]{}", np.uint8)) & (np.searchsorted(quotes, at) % 2 == 0)
    return at[outside]


def _field(body: bytes, quotes: Array, start: int) -> str:
    """The name before a value; empty where there is none to be sure of."""
    before = int(np.searchsorted(quotes, start))
    if before < 2 or body[quotes[before - 1] + 1 : start].strip() != b":":
        return ""
    return body[quotes[before - 2] + 1 : quotes[before - 1]].decode("utf-8", "replace")


def _rows(body: bytes, value: slice, brackets: Array, opens: Array, depth: Array) -> list[Rows] | None:
    """The rows of a list of lists, as many to a piece as fill it; None where anything but a comma stands between two."""
    first, last = np.flatnonzero(opens & (depth == 3)), np.flatnonzero(~opens & (depth == 2))  # brackets of each row
    if not len(first) or len(first) != len(last):
        return None
    starts, ends = brackets[first], brackets[last]
    places = [(value.start, int(starts[0]), b""), (int(ends[-1]), value.stop, b"")]
    bounds, filled = [0], int(starts[0])
    for i, end in enumerate(ends[:-1].tolist(), 1):
        if end - filled >= PIECE:
            bounds.append(i)
            filled = int(starts[i])
            places.append((end, filled, b","))
    if any(body[left + 1 : right].strip() != between for left, right, between in places):
        return None
    return [Rows(slice(int(starts[i]), int(ends[j - 1]) + 1), j - i) for i, j in pairwise((*bounds, len(starts)))]
