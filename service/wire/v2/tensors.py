"""Tensors of a V2 request: as bytes after the JSON, or as lists of numbers in it."""

from typing import Any, NamedTuple

from service.tensors import Array, Datatype
from service.wire.arrays import Kind, array_over


class BinaryTensor(NamedTuple):
    """A tensor sent as bytes: those from `start` to `stop` after the JSON. `at` points to its input."""

    datatype: Datatype
    shape: tuple[int, ...]
    start: int
    stop: int
    at: str

    def array(self, following: memoryview) -> Array:
        """The array, a view of `following`, the bytes after the JSON. Raises InvalidRequest."""
        return array_over(following[self.start : self.stop], self.datatype, self.shape, self.at)


class CutList(NamedTuple):
    """Replaces, in a parsed header, a list that was cut out of the text. `nested`: whether it contains lists."""

    number: int  # index among the lists that were cut out
    nested: bool


class JsonTensor(NamedTuple):
    """A tensor whose numbers are in the JSON, in input number `input`. `data`: a `CutList`, or the value in the JSON."""

    input: int
    kind: Kind
    datatype: Datatype
    shape: tuple[int, ...]
    data: Any
