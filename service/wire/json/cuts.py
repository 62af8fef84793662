"""A large JSON body without its long lists of numbers and long strings; each of them is cut out, and read in pieces.

A parser holds the interpreter's lock from the first byte to the last, so nothing long is handed to one. What is left of the body has a
bound in bytes, and its values are counted when they are read. Quotation marks and brackets are found by numpy, which lets the lock go.
"""

import math
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge
from service.tensors import Array
from service.wire.arrays import MAX_RANK, Kind
from service.wire.json.lists import array_of_integers
from service.wire.json.rows import read_rows
from service.wire.json.strict import line_and_column, parse_slowly
from service.wire.limits import JSON_TEXT_BYTES, WireLimits

CUT = 1 << 16  # bytes from which on a value is cut out
PIECE = 1 << 17  # bytes read at a time: with all that the parser makes of them, they stay in the processor's caches
STEP = 1 << 18  # bytes looked at at a time
REST = 4 << 20  # bytes that may be left
OTHER = f"at most {REST} bytes beside numbers of tensors and base64"
LONGEST_NAME = 64  # bytes
OPENING, CLOSING = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
OPENING[[ord("["), ord("{")]] = CLOSING[[ord("]"), ord("}")]] = True
NONE: Array = np.zeros(0, np.int64)
QUOTE, BACKSLASH = ord('"'), ord("\\")
Read = Callable[[bytes, Callable[[int], str]], Array]


@dataclass(frozen=True, slots=True)
class Brackets:
    """Brackets and braces outside of strings, in order; `depth` is that behind each, `strings` how many quotation marks stand before it."""

    places: Array
    opens: Array
    lists: Array  # whether it is a bracket, and no brace
    depth: Array
    strings: Array


class Cuts:
    """A large body in parts. `rest` has a string in the place of each value that was cut out; `values` has those values by these strings.

    Raises MalformedBody where brackets or quotation marks do not match, and TooLarge.
    """

    def __init__(self, body: bytes, names: Collection[str], limits: WireLimits) -> None:
        """Lists that are members called one of `names` are tensors: cut out whatever they hold."""
        self.body, self.names, self.limits = body, names, limits
        self.brackets, strings = _look_through(body, limits)
        self.values: dict[str, CutList | CutString] = {}
        self._spans: list[tuple[int, int, str]] = []
        found: list[tuple[int, int, CutList | CutString]] = []
        self._find_lists(0, len(self.brackets.places), 1, found)
        lists = np.array([(start, stop) for start, stop, _ in found], np.int64).reshape(-1, 2)
        for start, stop in strings:
            i = int(np.searchsorted(lists[:, 0], start)) - 1
            if (i < 0 or lists[i, 1] <= start) and _name_before(body, start) is not None:
                found.append((start, stop, CutString(body, start, stop)))
        token = secrets.token_hex(8)  # which nobody can have written into the body
        pieces, last, size = [], 0, 0
        for i, (start, stop, value) in enumerate(sorted(found, key=lambda each: each[0])):
            name = f"{token}:{i}"
            self.values[name] = value
            self._spans.append((start, stop, name))
            pieces += [body[last:start], b'"%b"' % name.encode()]
            size += start - last
            last = stop
        if size + len(body) - last > REST:
            raise TooLarge.where("", OTHER, str(size + len(body) - last))
        self.rest = b"".join((*pieces, body[last:]))

    def place_of(self, offset: int) -> str:
        """Where in the body a byte of the rest stands, in words."""
        for start, stop, name in self._spans:
            if offset <= start:
                break
            offset += stop - start - len(name) - 2
        return line_and_column(self.body, min(offset, len(self.body)))

    def _find_lists(self, low: int, high: int, depth: int, found: list[Any]) -> None:
        """Adds the long lists among the brackets from `low` to `high` that open to that depth, and those below others."""
        brackets = self.brackets
        if depth > self.limits.depth:
            raise TooLarge.where("", f"a document at most {self.limits.depth} deep (max_depth)", "one nested deeper")
        inside = slice(low, high)
        first = low + np.flatnonzero(brackets.opens[inside] & (brackets.depth[inside] == depth))
        last = low + np.flatnonzero(~brackets.opens[inside] & (brackets.depth[inside] == depth - 1))
        long = np.flatnonzero(brackets.places[last] - brackets.places[first] >= CUT)
        for i, j in zip(first[long].tolist(), last[long].tolist(), strict=True):
            start, stop = int(brackets.places[i]), int(brackets.places[j]) + 1
            if brackets.lists[i] and brackets.lists[j] and brackets.lists[i:j].all():
                name = _name_before(self.body, start)
                if name is not None and (name in self.names or brackets.strings[i] == brackets.strings[j]):
                    found.append((start, stop, CutList(self, i, j)))
                    continue
            self._find_lists(i + 1, j, depth + 1, found)


class CutString:
    """A long string: its text from `start` to `stop`, quotation marks included."""

    is_list = nested = False

    def __init__(self, body: bytes, start: int, stop: int) -> None:
        self.body, self.start, self.stop = body, start + 1, stop - 1

    def array(self, kind: Kind, at: str) -> Array:
        raise InvalidRequest.where(at, "a list of numbers", "a string")

    def integers(self, kind: Kind, dtype: np.dtype[Any], at: str) -> Array:
        raise InvalidRequest.where(at, "a list of numbers", "a string")

    def text(self) -> Iterator[bytes]:
        """The string in pieces of UTF-8, which end where no escape is cut."""
        start = self.start
        while start < self.stop:
            stop = min(start + PIECE, self.stop)
            if stop < self.stop and (escape := self.body.rfind(b"\\", stop - 6, stop)) >= 0:
                stop = escape if self.body[escape - 1] != BACKSLASH else escape - 1
            piece = self.body[start:stop]
            if b"\\" in piece:
                piece = self._unescaped(start, stop).encode(errors="replace")
            yield piece
            start = stop

    def plain(self, at: str) -> Any:
        if self.stop - self.start > 2 * JSON_TEXT_BYTES:  # every character of JSON text may be an escape
            raise TooLarge.where(at, f"a text of at most {2 * JSON_TEXT_BYTES} bytes", str(self.stop - self.start))
        return self._unescaped(self.start, self.stop)

    def _unescaped(self, start: int, stop: int) -> str:
        place_of = lambda offset: line_and_column(self.body, start + offset - 1)  # noqa: E731
        return str(parse_slowly(b'"%b"' % self.body[start:stop], place_of=place_of))


class CutList:
    """A long list, of lists or of numbers: what stands between two of the body's brackets. Read some rows or numbers at a time."""

    is_list = True

    def __init__(self, cuts: Cuts, low: int, high: int) -> None:
        self.body, self.brackets, self.limits, self.low, self.high = cuts.body, cuts.brackets, cuts.limits, low, high
        self.nested = high > low + 1

    def array(self, kind: Kind, at: str) -> Array:
        """The list as float64. Raises MalformedBody, or InvalidRequest with the place of the first fault."""
        return self._array(at, lambda text, place_of: read_rows(text, kind, self.limits, place_of))

    def integers(self, kind: Kind, dtype: np.dtype[Any], at: str) -> Array:
        """The list as integers of that datatype, each as it was sent."""
        return self._array(at, lambda text, place_of: array_of_integers(parse_slowly(text, place_of=place_of), kind, dtype, ""))

    def text(self) -> Iterator[bytes]:
        raise InvalidRequest.where("", "a string", "a list")

    def plain(self, at: str) -> Any:
        start, stop = self._place(self.low), self._place(self.high) + 1
        if stop - start > REST:
            raise TooLarge.where(at, OTHER, str(stop - start))
        if self.high - self.low > 2 * self.limits.values:
            raise TooLarge.where(at, f"at most {self.limits.values} plain values in one body", "more")
        return parse_slowly(self.body[start:stop], place_of=lambda offset: line_and_column(self.body, start + offset))

    def _place(self, i: int) -> int:
        return int(self.brackets.places[i])

    def _array(self, at: str, read: Read) -> Array:
        rank = int(self.brackets.depth[self.low : self.high].max() - self.brackets.depth[self.low]) + 1
        if rank > MAX_RANK:
            raise InvalidRequest.where(at, f"at most {MAX_RANK} nested lists", str(rank))
        return self._rows(self.low, self.high, at, read)

    def _rows(self, low: int, high: int, at: str, read: Read) -> Array:
        """The list between these brackets."""
        brackets, depth = self.brackets, self.brackets.depth[low]
        inside = slice(low + 1, high)
        first = low + 1 + np.flatnonzero(brackets.opens[inside] & (brackets.depth[inside] == depth + 1))
        last = low + 1 + np.flatnonzero(~brackets.opens[inside] & (brackets.depth[inside] == depth))
        if not len(first):
            return self._numbers(self._place(low) + 1, self._place(high), at, read)
        starts, ends = brackets.places[first], brackets.places[last] + 1
        self._demand_between(self._place(low) + 1, int(starts[0]), at, 0)
        rows = _Rows(len(first), self._place(high) - self._place(low), at)
        i = 0
        while i < len(first):
            start = int(starts[i])
            if i:
                self._demand_between(int(ends[i - 1]), start, at, i)
            j = max(i + 1, int(np.searchsorted(ends, start + PIECE, "right")))
            stop = int(ends[j - 1])
            if stop - start > PIECE:
                rows.add(self._rows(int(first[i]), int(last[i]), f"{at}/{i}", read)[None])
            else:
                rows.add(self._read(start, stop, at, i, read))
            i = j
        self._demand_between(int(ends[-1]), self._place(high), at, len(first))
        return rows.whole()

    def _numbers(self, start: int, stop: int, at: str, read: Read) -> Array:
        """A list of numbers alone, cut at commas."""
        commas = sum(self.body.count(b",", i, min(i + STEP, stop)) for i in range(start, stop, STEP))
        rows, filled = _Rows(commas + 1, stop - start, at), 0
        while start <= stop:
            end = stop if stop - start <= PIECE else self.body.rfind(b",", start, start + PIECE)
            if end < 0:
                raise InvalidRequest.where(f"{at}/{filled}", f"a number of less than {PIECE} bytes", "a longer one")
            numbers = self._read(start, end, at, filled, read)
            rows.add(numbers)
            filled += len(numbers)
            start = end + 1
        return rows.whole()

    def _read(self, start: int, stop: int, at: str, before: int, read: Read) -> Array:
        """What stands between two places of a list, `before` of whose items stand before them. Raises with the place of a fault."""
        text = b"".join((b"[", memoryview(self.body)[start:stop], b"]"))
        try:
            return read(text, lambda offset: line_and_column(self.body, start + offset - 1))
        except RequestError as refusal:
            raise type(refusal)(problems=[_moved(problem, at, before) for problem in refusal.problems]) from None

    def _demand_between(self, start: int, stop: int, at: str, i: int) -> None:
        """Raises where anything but the comma before the row `i` stands there; before the first row and behind the last there is none."""
        between = self.body[start : min(stop, start + PIECE)].strip()
        edge = i == 0 or self.body[stop : stop + 1] == b"]"
        if stop - start <= PIECE and between == (b"" if edge else b","):
            return
        place_of = lambda offset: line_and_column(self.body, start + offset)  # noqa: E731
        left, right = (b"[" if i == 0 else b"[0"), (b"]" if edge and i else b"0]")
        parse_slowly(left + between + right, place_of=place_of)  # what is no JSON is refused here
        raise InvalidRequest.where(f"{at}/{i}", "a list, as the rows before", "something else")


class _Rows:
    """An array that grows by rows until it is whole. Raises InvalidRequest for one of another shape."""

    def __init__(self, count: int, size: int, at: str) -> None:
        """`size` is the bytes of its text: each number takes two, a digit and what parts it from the next."""
        self.count, self.size, self.at, self.filled = count, size, at, 0
        self.shape: tuple[int, ...] = ()
        self.array: Array = np.zeros(0)

    def add(self, rows: Array) -> None:
        if not self.shape:
            self.shape = (self.count, *rows.shape[1:])
            if self._fits():
                self.array = np.empty(self.shape, rows.dtype)
        self._demand_alike(rows, self.shape)
        if self._fits():
            self.array[self.filled : self.filled + len(rows)] = rows
        self.filled += len(rows)

    def whole(self) -> Array:
        if not self._fits() or self.filled != self.count:
            raise InvalidRequest.where(self.at, f"{self.count} rows of one length", "others")
        return self.array

    def _fits(self) -> bool:
        """Whether the text is long enough for all rows to be as the first; where it is not, some other is refused when it comes."""
        return 2 * math.prod(self.shape) <= self.size + 2

    def _demand_alike(self, rows: Array, shape: tuple[int, ...]) -> None:
        at, more = f"{self.at}/{self.filled}", len(rows) > shape[0] - self.filled
        for i, length in enumerate(shape[1:], 1):
            if i >= rows.ndim:
                raise InvalidRequest.where(at + "/0" * (i - 1), f"a list of {length}", "a number")
            if rows.shape[i] != length:
                raise InvalidRequest.where(at + "/0" * (i - 1), f"{length} values, as in the rows before", str(rows.shape[i]))
        if rows.ndim > len(shape) or more:
            raise InvalidRequest.where(at + "/0" * (len(shape) - 1), "a number", "a list")


def _moved(problem: Problem, at: str, before: int) -> Problem:
    """A problem of some items of a list, as one of the list."""
    index = problem.at.split("/")[1:]
    if index and index[0].isdigit():
        index[0] = str(int(index[0]) + before)
    elif isinstance(problem, Problem) and not index:
        return problem if problem.expected == "JSON" else Problem(at, problem.expected, problem.got)
    return Problem("/".join((at, *index)), problem.expected, problem.got)


def _look_through(body: bytes, limits: WireLimits) -> tuple[Brackets, list[tuple[int, int]]]:
    """The body's brackets, and its long strings. Raises MalformedBody where they do not match, TooLarge for too many lists."""
    characters = np.frombuffer(body, np.uint8)
    escapes = b"\\" in body
    found: list[Array] = []
    counts: list[Array] = []
    strings: list[tuple[int, int]] = []
    quotes_before = opened = backslashes = 0
    last = -1  # quotation mark
    for start in range(0, len(characters), STEP):
        piece = characters[start : start + STEP]
        quotes = np.flatnonzero(piece == QUOTE) if body.find(b'"', start, start + STEP) >= 0 else NONE
        if escapes:
            quotes, backslashes = _unescaped(piece, quotes, backslashes)
        at = np.flatnonzero((piece & 0xD9) == 0x59)  # [ ] { } and Y _ y DEL, of which numbers have none
        at = at[OPENING[piece[at]] | CLOSING[piece[at]]]
        before = quotes_before + np.searchsorted(quotes, at)
        if len(quotes) or quotes_before % 2:
            outside = before % 2 == 0
            at, before = at[outside], before[outside]
        opened += int(np.count_nonzero(OPENING[piece[at]]))
        if opened > limits.lists:
            raise TooLarge.where("", f"at most {limits.lists} lists in one body", "more")
        found.append(at + start)
        counts.append(before)
        if len(quotes):
            absolute = np.concatenate(([last], quotes + start))
            for i in np.flatnonzero(np.diff(absolute) >= CUT).tolist():
                if (quotes_before + i) % 2:
                    strings.append((int(absolute[i]), int(absolute[i + 1]) + 1))
            last = int(absolute[-1])
            quotes_before += len(quotes)
    places = np.concatenate(found) if found else np.zeros(0, np.int64)
    kinds = characters[places]
    opens = OPENING[kinds]
    depth = np.cumsum(np.where(opens, np.int32(1), np.int32(-1)), dtype=np.int32)
    brackets = Brackets(places, opens, (kinds & 0x20) == 0, depth, np.concatenate(counts) if counts else places)
    _demand_balance(body, brackets, quotes_before)
    return brackets, strings


def _demand_balance(body: bytes, brackets: Brackets, quotes: int) -> None:
    depth = brackets.depth
    if (below := depth < 0).any():
        place = int(brackets.places[int(np.argmax(below))])
        raise MalformedBody.where("", "JSON", f"{chr(body[place])!r} at {line_and_column(body, place)} (extra data)")
    if quotes % 2 or (len(depth) and depth[-1]):
        what = "a string without an end" if quotes % 2 else "a bracket without its end"
        raise MalformedBody.where("", "JSON", f"the end of the body at {line_and_column(body, len(body))} ({what})")


def _unescaped(piece: Array, quotes: Array, backslashes: int) -> tuple[Array, int]:
    """The quotation marks that no escape is; and how many backslashes the piece ends with. `backslashes` stand just before it."""
    if not backslashes and not (piece[np.maximum(quotes, 1) - 1] == BACKSLASH).any():
        return quotes, _trailing(piece)
    others = np.where(piece == BACKSLASH, -1 - backslashes, np.arange(len(piece)))
    last = np.maximum.accumulate(others)  # the last character up to each that is no backslash
    before = np.concatenate(([-1 - backslashes], last[:-1]))
    run = quotes - 1 - before[quotes]
    return quotes[run % 2 == 0], _trailing(piece) + (backslashes if last[-1] < 0 else 0)


def _trailing(piece: Array) -> int:
    """How many backslashes the piece ends with."""
    text = piece.tobytes()
    return len(text) - len(text.rstrip(b"\\"))


def _name_before(body: bytes, start: int) -> str | None:
    """The name of the member whose value starts there; "" for one that is long or has escapes, None where the value is no member's."""
    before = body[max(0, start - LONGEST_NAME) : start].rstrip()
    if not before.endswith(b":"):
        return None
    before = before[:-1].rstrip()
    begin = before.rfind(b'"', 0, len(before) - 1)
    name = before[begin + 1 : -1]
    return "" if begin < 0 or not before.endswith(b'"') or b"\\" in name else name.decode(errors="replace")
