"""Lists of numbers in a JSON text, as arrays.

The compiled reader (`wire/native`) reads regular lists of numbers. Python's `json` reads every other one, and finds the place of a fault.
It makes an object of each number and holds the GIL, so it reads a long list in pieces. A piece ends at a comma; where that is inside of
lists, brackets are added: [[1,2],[3,4]] may be read as [[1,2],[3]] and [[4]].
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from attend.axes import Kind
from attend.errors import InvalidRequest, Problem, RequestError, TooLarge, pointer
from attend.limits import WireLimits
from attend.tensors import BY_NUMPY, Array
from attend.wire.arrays import MAX_RANK, beyond_float64, convert, range_text
from attend.wire.json.strict import line_and_column, parse_strictly
from attend.wire.native import numbers
from attend.wire.problems import describe_value

PIECE_BYTES = 1 << 17  # bytes of a list that Python parses at a time
MAX_PARSED_BYTES = 4 << 20  # bytes of a list of numbers or a long string that is not a tensor
EMPTY_AXIS = 'numbers, or an object such as {"shape": [0, 64], "data": []} if there are none'
NESTED, EMPTY = re.compile(rb"\[\s*\["), re.compile(rb"\[\s*\]")
FLOAT64 = np.dtype(np.float64)
LITERALS: dict[Kind, int] = {"bias": numbers.HAS_MINUS_INFINITY, "mask": numbers.HAS_BOOLEANS}
ALLOWED: dict[Kind, tuple[set[type], str]] = {  # types of the elements, and their description
    "number": ({int, float}, "a number"),
    "bias": ({int, float, str}, 'a number or "-inf"'),
    "mask": ({int, float, bool}, "0, 1, true or false"),
    "count": ({int, float}, "a whole number"),
    "segment": ({int, float}, "a whole number"),
}


class RawValue(NamedTuple):
    """A value in a JSON text that is not parsed yet: text[start:stop], brackets or quotation marks included. It may be malformed."""

    text: bytes
    start: int
    stop: int
    limits: WireLimits

    def parsed(self, at: str) -> Any:
        """The value as Python objects. Raises MalformedBody, InvalidRequest or TooLarge."""
        if self.stop - self.start > MAX_PARSED_BYTES:
            raise TooLarge.where(at, f"a value of at most {MAX_PARSED_BYTES} bytes", str(self.stop - self.start))
        position_of = lambda offset: line_and_column(self.text, self.start + offset)  # noqa: E731
        return parse_strictly(self.text[self.start : self.stop], position_of=position_of, limits=self.limits, at=at)


class NumberList(RawValue):
    """A list without objects, and without strings except "-inf"."""

    __slots__ = ()

    @property
    def nested(self) -> bool:
        """Whether the first item is a list."""
        return NESTED.match(self.text, self.start) is not None

    @property
    def empty(self) -> bool:
        return EMPTY.fullmatch(self.text, self.start, self.stop) is not None

    def array(self, kind: Kind, at: str, dtype: np.dtype[Any] = FLOAT64) -> Array:
        """The list as an array of that datatype. Raises MalformedBody, TooLarge, or InvalidRequest with a pointer below `at`."""
        if (found := numbers.read(self.text, self.start, self.stop, self.limits.lists, dtype)) is not None:
            array, literals = found
            if dtype is FLOAT64 and not literals:
                return array
            if not literals & ~LITERALS.get(kind, 0) and not beyond_float64(array, dtype):
                return convert(array, dtype, at)
        return self._read_in_pieces(ArrayBuilder(kind, at, dtype))

    def _read_in_pieces(self, builder: "ArrayBuilder") -> Array:
        start, open_before, lists = self.start, 0, 0  # `open_before`: lists around the piece that begins at `start`
        while True:
            stop = self.stop if self.stop - start <= PIECE_BYTES else self.text.rfind(b",", start, start + PIECE_BYTES)
            piece = self.text[start:stop] if stop >= 0 else self.text[start : start + PIECE_BYTES]
            open_after = open_before + piece.count(b"[") - piece.count(b"]") if stop < self.stop else 0
            lists += piece.count(b"[")
            self._require_bounded(builder.at, lists, open_before + _max_depth(piece))
            if stop < 0:
                raise InvalidRequest.where(builder.pointer_to_next(), f"a number of less than {PIECE_BYTES} bytes", "a longer one")
            try:
                items = self._parse(piece, start, open_before, open_after, stop == self.stop, builder.at)
            except RequestError as error:
                raise error.translated(builder.in_whole) from None
            builder.add(items, open_before, open_after)
            if stop == self.stop:
                return builder.array()
            start, open_before = stop + 1, open_after

    def _parse(self, piece: bytes, start: int, open_before: int, open_after: int, is_last: bool, at: str) -> Any:
        """The piece as Python lists. It is completed by the brackets of the lists that it begins or ends in.

        The comma between two pieces is in neither, so an item must end before it and another begin after it. If none does, text is added
        that makes the piece malformed.
        """
        before = b"[" * open_before + (b"0," if start > self.start and piece.lstrip()[:1] == b"]" else b"")
        no_item = open_after <= 0 or piece.rstrip()[-1:] in (b"", b",", b"[")
        after = b"" if is_last else b"," if no_item else b"]" * open_after
        position_of = lambda offset: line_and_column(self.text, start + max(0, offset - len(before)))  # noqa: E731
        limits = replace(self.limits, values=2 * PIECE_BYTES)  # numbers of a tensor have no other limit than its bytes
        return parse_strictly(b"".join((before, piece, after)), position_of=position_of, limits=limits, at=at)

    def _require_bounded(self, at: str, lists: int, depth: int) -> None:
        if depth > self.limits.max_depth:
            raise TooLarge.where(at, f"a document at most {self.limits.max_depth} deep (max_depth)", "one nested deeper")
        if lists > self.limits.lists:
            raise TooLarge.where(at, f"at most {self.limits.lists} lists in one tensor", "more")


def _max_depth(piece: bytes) -> int:
    """How many more lists are open, at most, than at the beginning of the piece."""
    characters = np.frombuffer(piece, np.int8)
    return int(np.cumsum((characters == ord("[")).view(np.int8) - (characters == ord("]")).view(np.int8), dtype=np.int32).max(initial=0))


class ArrayBuilder:
    """Builds an array from nested Python lists, whole or in pieces. Raises InvalidRequest with the place of the first fault."""

    def __init__(self, kind: Kind, at: str, dtype: np.dtype[Any] = FLOAT64) -> None:
        self.kind, self.at, self.dtype = kind, at, dtype
        self.exact = dtype.kind in "iu" and dtype.itemsize == 8  # float64 cannot represent all of them
        self.numbers: list[Any] = []  # of the current piece
        self.pieces: list[Array] = []  # the numbers of the pieces before it
        self.rank = 0  # 0: not known yet
        self.lengths: dict[int, int] = {}  # of the lists at each depth
        self.counts: list[int] = []  # how many items each open list has so far

    def add(self, items: list[Any], open_before: int = 0, open_after: int = 0) -> None:
        """Adds a piece. Its outermost `open_before` lists continue those of the piece before; the next piece continues `open_after`.

        The text [[1, 2], [3, 4]], cut at its last comma, comes as [[1, 2], [3]] with `open_after` 2, and [[4]] with `open_before` 2.
        """
        self._add_list(items, 1, open_before, open_after)
        self.pieces.append(np.array(self.numbers, self.dtype if self.exact else FLOAT64))
        self.numbers = []

    def array(self) -> Array:
        """The whole array."""
        array = np.concatenate(self.pieces) if len(self.pieces) > 1 else self.pieces[0]
        return convert(array.reshape([self.lengths[depth] for depth in range(1, self.rank + 1)]), self.dtype, self.at)

    def in_whole(self, problem: Problem) -> Problem:
        """A problem of the next piece as one of the whole list. The first items at each depth of a piece continue open lists."""
        if not problem.at:
            return problem
        index = [int(part) for part in problem.at.removeprefix(self.at).split("/")[1:]]
        for depth, before in enumerate(self.counts):
            if depth < len(index) and not any(index[:depth]):
                index[depth] += before
        return replace(problem, at=pointer(index, self.at))

    def pointer_to_next(self, skipped: int = 0) -> str:
        """Pointer to the next item, or to the one after `skipped` others."""
        return self.at + pointer([*self.counts[:-1], self.counts[-1] + skipped] if self.counts else [])

    def _add_list(self, items: list[Any], depth: int, open_before: int, open_after: int) -> None:
        if depth > open_before:
            self.counts.append(0)
        if depth > open_after:
            self._require_length(depth, self.counts[depth - 1] + len(items))
        if not self.rank and not (items and isinstance(items[0], list)):
            self.rank = depth
        if depth == self.rank:
            self._add_row(items)
        elif depth == MAX_RANK:
            raise InvalidRequest.where(self.at, f"at most {MAX_RANK} nested lists", str(depth + _rank(items[0])))
        else:
            for i, item in enumerate(items):
                if not isinstance(item, list):
                    expected = f"a list of {self.lengths.get(depth + 1, 'numbers')}"
                    raise InvalidRequest.where(self.pointer_to_next(), expected, describe_value(item))
                item_open_after = open_after if i == len(items) - 1 else 0
                self._add_list(item, depth + 1, 0 if i else open_before, item_open_after)
                self.counts[depth - 1] += depth + 1 > item_open_after
        if depth > open_after:
            self.counts.pop()

    def _add_row(self, items: list[Any]) -> None:
        types, expected = ALLOWED[self.kind]
        if not set(map(type, items)) <= types or (self.kind == "bias" and any(isinstance(item, str) and item != "-inf" for item in items)):
            for i, item in enumerate(items):
                if type(item) not in types or (isinstance(item, str) and item != "-inf"):
                    raise InvalidRequest.where(self.pointer_to_next(i), expected, describe_value(item))
        if self.exact:
            limits = np.iinfo(self.dtype)
            for i, item in enumerate(items):
                if isinstance(item, str) or item != item // 1 or not limits.min <= item <= limits.max:
                    raise InvalidRequest.where(self.pointer_to_next(i), range_text(BY_NUMPY[self.dtype]), describe_value(item))
            items = list(map(int, items))
        self.numbers += items
        self.counts[-1] += len(items)

    def _require_length(self, depth: int, length: int) -> None:
        expected = self.lengths.setdefault(depth, length)
        if length != expected:
            at = self.at + pointer(self.counts[: depth - 1])
            raise InvalidRequest.where(at, f"{expected} values, as in the rows before", str(length))
        if not length:
            raise InvalidRequest.where(self.at, EMPTY_AXIS, "an empty list")


def _rank(value: Any) -> int:
    """How many lists begin with this one."""
    rank = 0
    while isinstance(value, list):
        value, rank = value[0] if value else None, rank + 1
    return rank


def array_of_lists(value: list[Any], kind: Kind, at: str, dtype: np.dtype[Any] = FLOAT64) -> Array:
    """Nested Python lists as an array. Raises InvalidRequest with the place of the first fault."""
    builder = ArrayBuilder(kind, at, dtype)
    builder.add(value)
    return builder.array()
