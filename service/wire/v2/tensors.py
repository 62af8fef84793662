"""Tensors of a V2 request: as bytes after the JSON, or as lists of numbers in it."""

from typing import Any, NamedTuple

from service.tensors import Array, Datatype
from service.wire.arrays import Kind, array_over


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


class CutList(NamedTuple):
    """Stands in a parsed header for one of the lists that were cut out of the text; `nested`: whether it holds lists."""

    number: int  # among those
    nested: bool


class JsonTensor(NamedTuple):
    """A tensor whose numbers are in the JSON, in the input of that index. `data` is a `CutList`, or what the input has."""

    input: int
    kind: Kind
    row: Datatype
    shape: tuple[int, ...]
    data: Any
