"""The strict JSON parser: Python's `json` with checks. It is slow, and finds the place of a fault."""

import json
import math
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attend.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge, pointer
from attend.wire.limits import JSON_TEXT_BYTES

LONG_INTEGER = b"0" * 309  # an integer with fewer digits is in the range of float64
DIGITS_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
SCALARS = {str, int, float, bool, type(None)}


def parse_strictly(
    text: bytes, name: str = "body", position_of: Callable[[int], str] | None = None, replacements: Sequence[Any] | None = None
) -> Any:
    """The document as Python objects. Raises MalformedBody, TooLarge (depth) or InvalidRequest (a number beyond float64).

    Errors call the text `name`. If it is a part of another text, `position_of` maps an offset in bytes to line and column of the whole.
    With `replacements`, the n-th NaN becomes the n-th of them, and there must be as many of both.
    """
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
        document = json.loads(characters, object_pairs_hook=members, parse_constant=constant, parse_int=_integer if huge else None)
        fault = _fault(document, ()) if faults or huge or b"e" in text or b"E" in text else None
    except UnicodeDecodeError as error:
        raise MalformedBody.where("", "JSON in UTF-8", f"an invalid byte at offset {error.start}") from None
    except json.JSONDecodeError as error:
        got = f"the end of the {name}" if error.pos >= len(characters) else f"{characters[error.pos]!r}"
        position = (
            f"line {error.lineno} column {error.colno}" if position_of is None else position_of(len(characters[: error.pos].encode()))
        )
        raise MalformedBody.where("", "JSON", f"{got} at {position} ({error.msg.lower()})") from None
    except RecursionError:
        raise TooLarge.where("", "a document of moderate depth", "one nested too deeply") from None
    if fault:
        raise fault
    if replacements is not None and nan_count != len(replacements):
        raise MalformedBody.where("", "JSON", "NaN, which JSON does not have")
    return document


def parse_nested(text: str, at: str) -> Any:
    """Parses JSON text inside a request. Raises as `parse_strictly`, with pointers below `at`, and TooLarge for long text."""
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) > JSON_TEXT_BYTES:
        raise TooLarge.where(at, f"JSON text of at most {JSON_TEXT_BYTES} bytes", str(len(encoded)))
    try:
        return parse_strictly(encoded, "text")
    except RequestError as refusal:
        raise refusal.with_paths(at.__add__) from None


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
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _fault(value: Any, at: tuple[Any, ...]) -> RequestError | None:
    """The first fault in `value`, in document order."""
    if isinstance(value, _RepeatedKey):
        return MalformedBody.where(pointer((*at, value.key)), "each key once", f'"{value.key}" twice')
    if isinstance(value, _Constant):
        return MalformedBody.where(pointer(at), "a JSON number", value.text)
    if isinstance(value, float) and not math.isfinite(value):
        return InvalidRequest(problems=[Problem(pointer(at), "a finite number", "a number beyond the range of a float64")])
    if isinstance(value, list) and set(map(type, value)) <= SCALARS and math.inf not in value and -math.inf not in value:
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, list | dict | _RepeatedKey | _Constant | float) and (fault := _fault(item, (*at, key))):
            return fault
    return None
