"""The strict JSON parser: Python's `json` with checks. It is slow, and finds the place of a fault.

Python's parser holds the GIL until it has made every object. So the values of a text are counted before, from its brackets and commas.
"""

import json
import math
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attend.errors import InvalidRequest, MalformedBody, RequestError, TooLarge, pointer
from attend.limits import JSON_TEXT_BYTES, WireLimits
from attend.tensors import Array

DEFAULT_LIMITS = WireLimits()
PIECE_BYTES = 1 << 17  # bytes of a text whose values are counted at a time
LIST, LIST_END, OBJECT, OBJECT_END, COMMA, QUOTE = b'[]{},"'
WHITE_SPACE = b" \t\r\n"
LONG_INTEGER = b"0" * 309  # an integer with fewer digits is in the range of float64
DIGITS_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
SCALARS = {str, int, float, bool, type(None)}


def parse_strictly(
    text: bytes,
    name: str = "body",
    position_of: Callable[[int], str] | None = None,
    replacements: Sequence[Any] | None = None,
    limits: WireLimits = DEFAULT_LIMITS,
    nonfinite: bool = False,
    at: str = "",
) -> Any:
    """The document as Python objects.

    Raises MalformedBody, InvalidRequest (a number beyond float64), or TooLarge for more values or a deeper nesting than `limits` allow.

    Errors call the text `name`. If it is a part of a request, `at` is the pointer to it. If it is a part of a larger text, `position_of`
    maps an offset in bytes to line and column of the whole, which is then what is malformed.
    With `replacements`, the n-th NaN becomes the n-th of them, and there must be as many of both. They do not count as values. With
    `nonfinite`, NaN and infinities are numbers, as Python writes them.
    """
    too_deep = _require_few_values(text, name, limits, len(replacements or ()), at)
    malformed_at = at if position_of is None else ""
    unused = iter(replacements or ())
    nan_count = faults = 0

    def constant(word: str) -> Any:
        nonlocal nan_count, faults
        nan_count += word == "NaN"
        value = next(unused, _Constant(word)) if word == "NaN" else _Constant(word)
        faults += isinstance(value, _Constant)
        return value

    def members(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal faults
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        faults += 1
        return _RepeatedKey(_first_repeated(key for key, _ in pairs))

    huge = LONG_INTEGER in text.translate(DIGITS_TO_ZEROS)
    try:
        characters = text.removeprefix(BOM_UTF8).decode()  # the codec utf-8-sig would be imported here, which needs a free file handle
        document = json.loads(
            characters,
            object_pairs_hook=members,
            parse_constant=float if nonfinite else constant,
            parse_int=_integer if huge else None,
        )
        may_be_faulty = faults or too_deep or (not nonfinite and (huge or b"e" in text or b"E" in text))
        fault = _fault(document, (), limits.max_depth, nonfinite, at) if may_be_faulty else None
    except UnicodeDecodeError as error:
        raise MalformedBody.where(malformed_at, "JSON in UTF-8", f"an invalid byte at offset {error.start}") from None
    except json.JSONDecodeError as error:
        got = f"the end of the {name}" if error.pos >= len(characters) else f"{characters[error.pos]!r}"
        position = (
            f"line {error.lineno} column {error.colno}" if position_of is None else position_of(len(characters[: error.pos].encode()))
        )
        raise MalformedBody.where(malformed_at, "JSON", f"{got} at {position} ({error.msg.lower()})") from None
    except RecursionError:
        raise TooLarge.where(at, "a document of moderate depth", "one nested too deeply") from None
    if fault:
        raise fault
    if replacements is not None and nan_count != len(replacements):
        raise MalformedBody.where(malformed_at, "JSON", "NaN, which JSON does not have")
    return document


def parse_nested(text: str, at: str, nonfinite: bool = False) -> Any:
    """Parses JSON text that a request has at the pointer `at`. Raises as `parse_strictly`, and TooLarge for long text."""
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) > JSON_TEXT_BYTES:
        raise TooLarge.where(at, f"JSON text of at most {JSON_TEXT_BYTES} bytes", str(len(encoded)))
    return parse_strictly(encoded, "text", nonfinite=nonfinite, at=at)


def _require_few_values(text: bytes, name: str, limits: WireLimits, uncounted: int, at: str) -> bool:
    """Raises TooLarge if a JSON text has more than `limits.values` values, of which `uncounted` are left out, and its outermost one.

    Returns whether it is nested deeper than `limits.max_depth`. Makes no object of any value. Of malformed text the numbers may be any.
    """
    opened = text.count(b"[") + text.count(b"{")  # at least as many as outside of strings
    if opened < limits.max_depth and opened + text.count(b",") - uncounted <= limits.values:
        return False
    values, depths, opens = -uncounted, np.zeros(1, np.int64), np.zeros(1, np.bool_)
    deepest = 0
    for marks in filter(len, _structure(text)):
        before, opens, closes = opens[-1:], (marks == LIST) | (marks == OBJECT), (marks == LIST_END) | (marks == OBJECT_END)
        empty = np.concatenate((before, opens[:-1])) & closes
        # a value follows each bracket and comma, but not in an empty list, and the last bracket of a piece may begin one
        values += int((marks == COMMA).sum()) + int(opens.sum()) - int(empty.sum())
        if values - opens[-1] > limits.values:
            raise TooLarge.where(at, f"at most {limits.values} values outside of tensors in one {name}", "more")
        depths = depths[-1] + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int64)
        deepest = max(deepest, int(depths.max()))
    return deepest >= limits.max_depth


def _structure(text: bytes) -> Iterator[Array]:
    """What a JSON text has outside of its strings, and their quotation marks, without white space. In pieces, so that other threads
    run in between."""
    start, in_string = 0, np.uint8(0)
    while start < len(text):
        piece = text[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:  # what it escapes is in the next piece
            piece = piece[:-1]
        start += len(piece)
        unescaped = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        marks = np.frombuffer(unescaped.translate(None, WHITE_SPACE), np.uint8)
        quotes = marks == QUOTE
        in_strings = in_string + np.cumsum(quotes, dtype=np.uint8)  # odd in a string
        in_string = in_strings[-1] if len(marks) else in_string
        yield marks[(in_strings % 2 == 0) | quotes]


class _RepeatedKey:
    """Takes the place of an object with a repeated key."""

    def __init__(self, key: str) -> None:
        self.key = key


class _Constant:
    """Takes the place of NaN or an infinity, which JSON does not have."""

    def __init__(self, text: str) -> None:
        self.text = text


def line_and_column(text: bytes, offset: int) -> str:
    """Line and column of a byte in a text, counted from 1."""
    line, column = text.count(b"\n", 0, offset) + 1, offset - text.rfind(b"\n", 0, offset)
    return f"line {line} column {column}"


def _integer(text: str) -> int | float:
    """An integer. A huge one becomes a float; one beyond float64 becomes infinity, which `_fault` reports."""
    return int(text) if len(text) < len(LONG_INTEGER) else float(text)


def _first_repeated(keys: Iterable[str]) -> str:
    """The first key that occurs a second time."""
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # None


def _fault(value: Any, path: tuple[Any, ...], depth: int, nonfinite: bool, at: str) -> RequestError | None:
    """The first fault in `value`, in document order: more nesting than `depth`, and unless `nonfinite`, a number that is not finite."""
    if isinstance(value, _RepeatedKey):
        return MalformedBody.where(pointer((*path, value.key), at), "each key once", f'"{value.key}" twice')
    if isinstance(value, _Constant):
        return MalformedBody.where(pointer(path, at), "a JSON number", value.text)
    if isinstance(value, list | dict) and value and len(path) + 1 >= depth:
        member = [key for key in path[:1] if isinstance(key, str)]
        return TooLarge.where(pointer(member, at), f"a document at most {depth} deep (max_depth)", "one nested deeper")
    if isinstance(value, float) and not (nonfinite or math.isfinite(value)):
        return InvalidRequest.where(pointer(path, at), "a finite number", "a number beyond the range of a float64")
    if isinstance(value, list) and set(map(type, value)) <= SCALARS and (nonfinite or (math.inf not in value and -math.inf not in value)):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        may_be_faulty = isinstance(item, list | dict | _RepeatedKey | _Constant | float)
        if may_be_faulty and (fault := _fault(item, (*path, key), depth, nonfinite, at)):
            return fault
    return None
