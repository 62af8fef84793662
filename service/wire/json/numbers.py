"""Parses lists of numbers in a JSON text into arrays, without a Python object per number.

simdjson parses the numbers; it holds the GIL and flattens nested lists. So a long list is parsed in pieces, cut at commas: numpy finds the
brackets of a piece, simdjson parses the piece with blanks instead of brackets, and at the end the positions of all brackets give the shape.
"""

import re
import threading
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, NoReturn

import numpy as np
import simdjson

from service.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge, pointer
from service.tensors import Array
from service.wire.arrays import MAX_RANK, Kind, beyond_float64, converted
from service.wire.json.strict import EMPTY_AXIS, array_of_integers, array_of_lists, line_and_column, parse_strictly
from service.wire.limits import WireLimits

PIECE = 1 << 17  # bytes: a piece and its parsed numbers fit in the processor's caches
LARGEST_PLAIN = 4 << 20  # bytes of a list that is not a tensor
MINUS_INFINITY, STAND_IN = b'"-inf"', -1e308  # same length; with one more digit it exceeds float64
OPEN, CLOSE, COMMA, BLANK = b"[], "
NESTED, EMPTY = re.compile(rb"\[\s*\["), re.compile(rb"\[\s*\]")
FLOAT64 = np.dtype(np.float64)
_threads = threading.local()


@dataclass(frozen=True, slots=True)
class NumberList:
    """A list in a JSON text, brackets included: text[start:stop]. It has no objects and no strings except "-inf"; it may be malformed."""

    text: bytes
    start: int
    stop: int
    limits: WireLimits

    @property
    def nested(self) -> bool:
        """Whether the first item is a list."""
        return NESTED.match(self.text, self.start) is not None

    @property
    def empty(self) -> bool:
        return EMPTY.fullmatch(self.text, self.start, self.stop) is not None

    def array(self, kind: Kind, at: str, dtype: np.dtype[Any] = FLOAT64) -> Array:
        """The list as an array of that datatype. Raises MalformedBody, TooLarge, or InvalidRequest with a pointer below `at`."""
        if self.stop - self.start <= PIECE:
            text = self.text[self.start : self.stop]
            array = _restored(_parse(_numbers_alone(text, kind)), text, kind)
            if array is not None and not beyond_float64(array, dtype):
                return converted(array, dtype, at)
        return _LongList(self, kind, at, dtype).array()

    def plain(self, at: str) -> Any:
        """The list as Python objects."""
        if self.stop - self.start > LARGEST_PLAIN:
            raise TooLarge.where(at, f"a list of at most {LARGEST_PLAIN} bytes", str(self.stop - self.start))
        return parse_strictly(self.text[self.start : self.stop], place_of=lambda offset: line_and_column(self.text, self.start + offset))


def _parsed(text: bytes) -> Any:
    """Parses with this thread's parser. simdjson raises RuntimeError if a value of an earlier parse still exists (the traceback of an error
    may refer to one); then a new parser replaces it."""
    try:
        return _threads.parser.parse(text)
    except (AttributeError, RuntimeError):
        _threads.parser = simdjson.Parser()
        return _threads.parser.parse(text)


def _parse(text: bytes) -> Array | None:
    """A list of any depth as float64; None if it is no array of numbers."""
    try:
        rows = document = _parsed(text)
        shape: list[int] = []
        lists, items = 0, 1  # lists in, and items of, the axes so far
        while isinstance(rows, simdjson.Array) and len(shape) <= MAX_RANK:
            shape.append(len(rows))
            lists, items = lists + items, items * len(rows)
            rows = rows[0] if items else None
        if len(shape) > MAX_RANK or not items or np.count_nonzero(np.frombuffer(text, np.uint8) == OPEN) != lists:
            return None
        numbers = np.frombuffer(document.as_buffer(of_type="d"), np.float64)
        return numbers.reshape(shape) if numbers.size == items and _rows_agree(document, shape) else None
    except (TypeError, ValueError, RuntimeError):  # elements that are not numbers, integers of more than 64 bits, malformed text
        return None


def _rows_agree(value: Any, shape: list[int]) -> bool:
    """Whether each list has the length of the first one at its depth."""
    if len(shape) == 1:
        return True
    return set(map(len, value)) == {shape[1]} and (len(shape) == 2 or all(_rows_agree(row, shape[1:]) for row in value))


def _numbers_alone(text: bytes, kind: Kind) -> bytes:
    """The text with true, false and "-inf" replaced by numbers, where the kind allows them. The length does not change."""
    if kind == "mask" and b'"' not in text:
        return text.replace(b"true", b" 1  ").replace(b"false", b" 0   ")
    return text.replace(MINUS_INFINITY, b"-1e308") if kind == "bias" else text


def _restored(numbers: Array | None, text: bytes, kind: Kind) -> Array | None:
    """The numbers with STAND_IN replaced by -inf; None if the text contains the number STAND_IN itself."""
    if numbers is None or kind != "bias" or not (count := text.count(MINUS_INFINITY)):
        return numbers
    infinite = numbers == STAND_IN
    return np.where(infinite, -np.inf, numbers) if np.count_nonzero(infinite) == count else None


class _LongList:
    """Converts one list in pieces. For each bracket read so far, `signs` has 1 (opening) or -1 (closing), and `slots` the number of commas
    before it. The number in slot n is the n-th number of the list."""

    def __init__(self, source: NumberList, kind: Kind, at: str, dtype: np.dtype[Any]) -> None:
        self.source, self.kind, self.at, self.dtype = source, kind, at, dtype
        self.numbers: list[Array] = []
        self.signs: list[Array] = []
        self.slots: list[Array] = []
        self.filled = self.opened = 0

    def array(self) -> Array:
        text, start, stop = self.source.text, self.source.start, self.source.stop
        while start <= stop:
            end = stop if stop - start <= PIECE else text.rfind(b",", start, start + PIECE)
            if end < 0:
                self._demand_depth(text.count(b"[", start, start + PIECE))
                raise InvalidRequest.where(self._path(self.filled), f"a number of less than {PIECE} bytes", "a longer one")
            self._read(start, end)
            start = end + 1
        if (shape := self._shape()) is None:
            self._refuse_irregular()
        return np.concatenate(self.numbers).reshape(shape)

    def _read(self, start: int, end: int) -> None:
        """Reads the numbers and brackets of one piece."""
        text = b"".join((b"[", memoryview(self.source.text)[start:end], b"]"))
        alone = _numbers_alone(text, self.kind)
        characters = np.frombuffer(alone, np.uint8)
        brackets = np.flatnonzero(characters[1:-1] > ord("Z")) + 1  # brackets, and the e of exponents
        kinds = characters[brackets]
        brackets = brackets[(kinds == OPEN) | (kinds == CLOSE)]
        if len(brackets):
            alone = _blanked(alone, brackets)
            self._add_brackets(characters, brackets, start)
        try:
            numbers = _restored(_parse_flat(alone), text, self.kind)
            if numbers is None or not len(numbers) or beyond_float64(numbers, self.dtype):
                numbers = self._read_strictly(_blanked(text, brackets), start)
            self.numbers.append(converted(numbers, self.dtype, ""))
        except RequestError as refusal:
            if EMPTY.search(text):
                raise InvalidRequest.where(self.at, EMPTY_AXIS, "an empty list") from None
            raise type(refusal)(problems=[self._below(problem) for problem in refusal.problems]) from None
        self.filled += len(numbers)

    def _add_brackets(self, characters: Array, brackets: Array, start: int) -> None:
        """Records sign and slot of each bracket. Checks the character outside of it, since with blanks `1[` and `]1` would be valid."""
        kinds = characters[brackets]
        signs = np.where(kinds == OPEN, 1, -1).astype(np.int8)
        near = brackets - signs
        beside = characters[near]
        if (blank := beside <= BLANK).any():
            beside = characters[near - np.where(blank, signs, 0)]
            if (beside <= BLANK).any():
                solid = np.flatnonzero(characters > BLANK)
                beside = characters[solid[np.searchsorted(solid, brackets) - signs]]
        wrong = (beside != COMMA) & (beside != kinds)
        if wrong.any():
            place = int(brackets[int(np.argmax(wrong))])
            got = f"{chr(characters[place])!r} at {line_and_column(self.source.text, start + place - 1)}"
            raise MalformedBody.where("", "JSON", f"{got} (expecting ',' delimiter)")
        # uint16 is enough for the commas of a valid piece
        commas = np.add.reduceat((characters == COMMA).view(np.uint8), np.concatenate(([0], brackets)), dtype=np.uint16)
        self.signs.append(signs)
        self.slots.append(self.filled + np.cumsum(commas[:-1], dtype=np.int64))
        self.opened += int(np.count_nonzero(signs > 0))
        if self.opened > self.source.limits.lists:
            raise TooLarge.where(self.at, f"at most {self.source.limits.lists} lists in one tensor", "more")

    def _read_strictly(self, text: bytes, start: int) -> Array:
        """The numbers of a flat list that simdjson refuses, or that has integers that float64 cannot represent."""
        values = parse_strictly(text, place_of=lambda offset: line_and_column(self.source.text, start + offset - 1))
        if self.dtype.kind in "iu" and self.dtype.itemsize == 8:
            return array_of_integers(values, self.kind, self.dtype, "")
        return array_of_lists(values, self.kind, "")

    def _below(self, problem: Problem) -> Problem:
        """A problem of the current piece, with a pointer into the whole list."""
        index = problem.at.split("/")[1:]
        return Problem(self._path(self.filled + int(index[0])), problem.expected, problem.got) if index else problem

    def _path(self, slot: int) -> str:
        """Pointer to the number in that slot."""
        index: list[int] = []  # of the current item in each open list
        last = 0
        for sign, before in zip(*self._brackets(), strict=True):
            if before > slot or (before == slot and sign < 0):
                break
            if index:
                index[-1] += before - last
            index.append(0) if sign > 0 else index.pop()
            last = before
        if index:
            index[-1] += slot - last
        return self.at + pointer(index)

    def _brackets(self) -> tuple[list[int], list[int]]:
        """The signs and the slots of all brackets."""
        return (np.concatenate(self.signs).tolist(), np.concatenate(self.slots).tolist()) if self.signs else ([], [])

    def _shape(self) -> tuple[int, ...] | None:
        """The shape that the brackets describe; None if they describe no regular array."""
        signs, slots = np.concatenate(self.signs), np.concatenate(self.slots)
        depth = np.cumsum(signs, dtype=np.int32)
        self._demand_depth(rank := int(depth.max()))
        if rank > MAX_RANK:
            raise InvalidRequest.where(self.at, f"at most {MAX_RANK} nested lists", str(rank))
        if depth[-1] or not depth[:-1].all():
            return None
        sizes = []  # numbers in each list of a depth
        for level in range(1, rank + 1):
            first, last = slots[(signs > 0) & (depth == level)], slots[(signs < 0) & (depth == level - 1)]
            size = max(1, self.filled // len(first))
            if not np.array_equal(first, np.arange(0, self.filled, size)) or not np.array_equal(last, first + size - 1):
                return None
            sizes.append(size)
        return *(size // inner for size, inner in pairwise(sizes)), sizes[-1]

    def _demand_depth(self, rank: int) -> None:
        if rank > (deepest := self.source.limits.depth):
            raise TooLarge.where(self.at, f"a document at most {deepest} deep (max_depth)", "one nested deeper")

    def _refuse_irregular(self) -> NoReturn:
        """Raises InvalidRequest at the first item that differs from the first one at its depth (a number, or a list of another length)."""
        signs, slots = self._brackets()
        rank = sum(1 for _ in takewhile(lambda bracket: bracket == (1, 0), zip(signs, slots, strict=True)))
        lengths: dict[int, int] = {}  # by depth
        index: list[int] = []  # of the current item in each open list
        last, is_list = 0, False  # whether the item before is a list
        for i, (sign, before) in enumerate(zip(signs, slots, strict=True)):
            passed, depth, last = before - last, len(index), before
            if depth == 0 and (sign < 0 or i):
                break
            if 0 < depth < rank and (passed != is_list if sign > 0 else passed or not is_list):
                index[-1] += is_list
                raise InvalidRequest.where(self.at + pointer(index), "a list, as the items before", "a number")
            if depth:
                index[-1] += passed
            if sign > 0:
                if depth == rank:
                    raise InvalidRequest.where(self.at + pointer(index), "a number", "a list")
                index.append(0)
            else:
                length = index.pop() + 1
                if lengths.setdefault(depth, length) != length:
                    expected = f"{lengths[depth]} values, as in the rows before"
                    raise InvalidRequest.where(self.at + pointer(index), expected, str(length))
            is_list = sign < 0
        place = line_and_column(self.source.text, self.source.stop - 1)
        raise MalformedBody.where("", "JSON", f"a list up to {place} whose brackets do not match")


def _parse_flat(text: bytes) -> Array | None:
    """A flat list as float64; None if it contains anything but numbers."""
    try:
        return np.frombuffer(_parsed(text).as_buffer(of_type="d"), np.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def _blanked(text: bytes, brackets: Array) -> bytes:
    flat = np.frombuffer(text, np.uint8).copy()
    flat[brackets] = BLANK
    return flat.tobytes()
