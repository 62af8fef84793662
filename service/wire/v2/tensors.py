"""Tensors of a V2 request, as bytes after the JSON or as lists of numbers in it -> arrays.

A long list is parsed in pieces: what the parser returns stays in the processor's caches, and other threads run in between. A list that is
irregular in any way is left to the slower reader, which also says what is wrong with it.
"""

import math
from typing import NamedTuple

import numpy as np

from service.tensors import Array, Datatype
from service.wire.arrays import Kind, array_over, beyond_float64, held_exactly
from service.wire.json.rows import parse_numbers, parse_rows
from service.wire.limits import WireLimits

PIECE = 1 << 17  # bytes
NESTED = 1 << 20  # bytes of lists of lists; longer ones go the slower way, which takes them in pieces


class BinaryTensor(NamedTuple):
    """A tensor whose bytes follow the JSON, from `start` to `stop` among them; `at` points to its input."""

    row: Datatype
    shape: tuple[int, ...]
    start: int
    stop: int
    at: str

    def array(self, following: memoryview) -> Array:
        """The array, over those bytes. Raises InvalidRequest."""
        return array_over(following[self.start : self.stop], self.row, self.shape, self.at)


class JsonTensor(NamedTuple):
    """A tensor whose numbers are in the JSON, in the input of that index."""

    input: int
    kind: Kind
    row: Datatype
    shape: tuple[int, ...]


def array_of_list(text: bytes, place: slice, kind: Kind, row: Datatype, shape: tuple[int, ...], limits: WireLimits) -> Array | None:
    """The array of that datatype and shape whose numbers the list holds, flat or nested; None where they are others, or not regular.

    `place` is the list's, brackets included. Raises InvalidRequest, without a place, where the datatype does not hold a number.
    """
    start, stop, size = place.start + 1, place.stop - 1, math.prod(shape)
    if stop - start > PIECE and text.find(b"[", start, start + PIECE) < 0:
        numbers = _in_pieces(text, start, stop, kind, row, size, limits)
        return None if numbers is None else numbers.reshape(shape)
    numbers = _numbers(text, start, stop, kind, limits) if stop - start <= NESTED else None
    if numbers is None or numbers.shape not in (shape, (size,)) or beyond_float64(numbers, row.numpy):
        return None
    return held_exactly(numbers, row.numpy, "").reshape(shape)


def _in_pieces(text: bytes, start: int, stop: int, kind: Kind, row: Datatype, size: int, limits: WireLimits) -> Array | None:
    """The numbers between two places, cut at commas; None where there are not just so many."""
    if 2 * size - 1 > stop - start:  # each has a digit, and a comma between
        return None
    array, filled, end = np.empty(size, row.numpy), 0, start - 1
    while end < stop:
        start = end + 1
        end = stop if stop - start <= PIECE else text.rfind(b",", start, start + PIECE)
        numbers = None if end < 0 else _numbers(text, start, end, kind, limits)
        if numbers is None or numbers.ndim != 1 or not 0 < numbers.size <= size - filled or beyond_float64(numbers, row.numpy):
            return None
        array[filled : filled + numbers.size] = held_exactly(numbers, row.numpy, "")
        filled += numbers.size
    return array if filled == size else None


def _numbers(text: bytes, start: int, stop: int, kind: Kind, limits: WireLimits) -> Array | None:
    """What stands between two places, as float64; None where it is not regular."""
    numbers = parse_numbers(text[start:stop]) if text.find(b"[", start, stop) < 0 else None
    return parse_rows(memoryview(text)[start:stop], kind, limits) if numbers is None else numbers
