"""The strict JSON parser: Python's `json` with checks. It is slow, and finds the place of a fault."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from service.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge, pointer
from service.wire.limits import JSON_TEXT_BYTES

LONG_INTEGER = b"0" * 309  # an integer with fewer digits is in the range of float64
DIGITS_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
SCALARS = {str, int, float, bool, type(None)}


class _RepeatedKey:
    def __init__(self, key: str) -> None:
        self.key = key


class _Constant:
    def __init__(self, text: str) -> None:
        self.text = text


def line_and_column(body: bytes, offset: int) -> str:
    """Line and column of a byte in a text, counted from 1."""
    line, column = body.count(b"\n", 0, offset) + 1, offset - body.rfind(b"\n", 0, offset)
    return f"line {line} column {column}"


def parse_strictly(
    body: bytes, whole: str = "body", place_of: Callable[[int], str] | None = None, placed: Sequence[Any] | None = None
) -> Any:
    """The document as Python objects. Raises MalformedBody, TooLarge (depth) or InvalidRequest (a number beyond float64).

    Error messages call the text `whole`. If it was cut from another text, `place_of` maps a byte offset to the place in that text. The n-th
    NaN in the text is replaced by the n-th item of `placed`; their numbers must agree.
    """
    values = iter(placed or ())
    constants = faults = 0

    def constant(name: str) -> Any:
        nonlocal constants, faults
        constants += name == "NaN"
        value = next(values, _Constant(name)) if name == "NaN" else _Constant(name)
        faults += isinstance(value, _Constant)
        return value

    def members(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal faults
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        faults += 1
        return _RepeatedKey(_first_repeated(key for key, _ in pairs))

    huge = LONG_INTEGER in body.translate(DIGITS_TO_ZEROS)
    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=members, parse_constant=constant, parse_int=_integer if huge else None)
        fault = _fault(document, ()) if faults or huge or b"e" in body or b"E" in body else None
    except UnicodeDecodeError as error:
        raise MalformedBody.where("", "JSON in UTF-8", f"an invalid byte at offset {error.start}") from None
    except json.JSONDecodeError as error:
        got = f"the end of the {whole}" if error.pos >= len(text) else f"{text[error.pos]!r}"
        place = f"line {error.lineno} column {error.colno}" if place_of is None else place_of(len(text[: error.pos].encode()))
        raise MalformedBody.where("", "JSON", f"{got} at {place} ({error.msg.lower()})") from None
    except RecursionError:
        raise TooLarge.where("", "a document of moderate depth", "one nested too deeply") from None
    if fault:
        raise fault
    if placed is not None and constants != len(placed):
        raise MalformedBody.where("", "JSON", "NaN, which JSON does not have")
    return document


def parse_nested(text: str, at: str) -> Any:
    """Parses JSON text inside a request. Raises as `parse_strictly`, with pointers below `at`, and TooLarge for long text."""
    size = len(text) if len(text) > JSON_TEXT_BYTES else len(encoded := text.encode(errors="surrogatepass"))
    if size > JSON_TEXT_BYTES:
        raise TooLarge.where(at, f"JSON text of at most {JSON_TEXT_BYTES} bytes", str(size))
    try:
        return parse_strictly(encoded, "text")
    except RequestError as refusal:
        raise refusal.with_paths(at.__add__) from None


def _integer(text: str) -> int | float:
    """An integer. A huge one becomes a float; one beyond float64 becomes infinity, which `_fault` reports."""
    return int(text) if len(text) < len(LONG_INTEGER) else float(text)


def _first_repeated(keys: Iterable[str]) -> str:
    """The first key that is there already."""
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
