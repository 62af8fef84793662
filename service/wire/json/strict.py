"""The slow parser: finds where a body is wrong when the fast one only says that it is. Pure Python's `json`, with every hook watching.

Also the parser for the rare valid body that the fast one cannot hold (integers above 64 bits), and for short texts. Never on the event loop
for others.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from service.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge
from service.wire.problems import pointer

DIGITS = 309  # and a sign: what fits a float64 has no more


class _Twice:
    def __init__(self, key: str) -> None:
        self.key = key


class _Constant:
    def __init__(self, text: str) -> None:
        self.text = text


def _integer(text: str) -> int | float:
    """One that no float64 holds becomes infinite, which is then found where it stands; int() would refuse thousands of digits."""
    return int(text) if len(text) <= DIGITS else float(text)


def _members(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        return _Twice(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]  # add() is None
    return members


def _fault(value: Any, at: tuple[Any, ...]) -> RequestError | None:
    """The first fault below `value`, in document order."""
    if isinstance(value, _Twice):
        return MalformedBody(problems=[Problem(pointer((*at, value.key)), "each key once", f'"{value.key}" twice')])
    if isinstance(value, _Constant):
        return MalformedBody(problems=[Problem(pointer(at), "a JSON number", value.text)])
    if isinstance(value, float) and not math.isfinite(value):
        return InvalidRequest(problems=[Problem(pointer(at), "a finite number", "a number beyond the range of a float64")])
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, list | dict | _Twice | _Constant | float) and (fault := _fault(item, (*at, key))):
            return fault
    return None


def parse_strictly(text: bytes) -> Any:
    """A small document of names and whole numbers, such as a header. Raises MalformedBody; a key that stands twice is named."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise MalformedBody.where("", "each key once", f'"{_members(pairs).key}" twice')
        return found

    try:
        return json.loads(text.decode(), object_pairs_hook=members)
    except (ValueError, RecursionError):
        raise MalformedBody.where("", "JSON in the header", "something else") from None


def line_and_column(body: bytes, offset: int) -> str:
    """A place in a text, in the words of refusals."""
    line, column = body.count(b"\n", 0, offset) + 1, offset - body.rfind(b"\n", 0, offset)
    return f"line {line} column {column}"


def parse_slowly(body: bytes, whole: str = "body", place_of: Callable[[int], str] | None = None) -> Any:
    """The document as plain Python. Raises MalformedBody, TooLarge (depth) or InvalidRequest (a number no float64 holds).

    `whole` is what refusals call the text; where it was cut from another, `place_of` says in words where a byte of it stands in that.
    """
    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=_members, parse_constant=_Constant, parse_int=_integer)
        fault = _fault(document, ())
    except UnicodeDecodeError as error:
        raise MalformedBody(problems=[Problem("", "JSON in UTF-8", f"an invalid byte at offset {error.start}")]) from None
    except json.JSONDecodeError as error:
        came = f"the end of the {whole}" if error.pos >= len(text) else f"{text[error.pos]!r}"
        place = f"line {error.lineno} column {error.colno}"
        if place_of is not None:
            place = place_of(len(text[: error.pos].encode()))
        raise MalformedBody(problems=[Problem("", "JSON", f"{came} at {place} ({error.msg.lower()})")]) from None
    except RecursionError:
        raise TooLarge(problems=[Problem("", "a document of moderate depth", "one nested too deeply")]) from None
    if fault:
        raise fault
    return document
