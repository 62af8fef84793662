"""Pointers into a request for attention -> pointers into the V2 request that was sent, for errors found after the body was read.

The field of a tensor is an input, by its place in the list; every other field is a parameter; the layer is the model. Errors of the body
itself point into it already. Knows neither JSON bodies nor protobuf.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from service.errors import Problem
from service.wire.codec import ErrorPaths
from service.wire.v2.parameters import OPTIONS, TENSORS


class InputPath(NamedTuple):
    """Where an input stands. `numbers` is the pointer from the input to its elements; "" where they are bytes, which no pointer reaches."""

    name: str
    shape: tuple[int, ...]
    numbers: str = ""
    nested: bool = False


@dataclass(frozen=True, slots=True)
class V2ErrorPaths(ErrorPaths):
    """Where the parts of one request stand. `model` points to the model's name; "" where the name is in the path of the URL."""

    inputs: Sequence[InputPath] = ()
    model: str = ""

    def translate(self, problem: Problem) -> Problem:
        name, *index = problem.at.split("/")[1:] or [""]
        if name == "layer":
            return replace(problem, at=self.model)
        for i, input_path in enumerate(self.inputs):
            if input_path.name == name:
                return _in_input(problem, f"/inputs/{i}", input_path, index)
        if name in OPTIONS:
            return replace(problem, at=f"/parameters{problem.at}")
        return replace(problem, at="/inputs") if name in TENSORS else problem


def _in_input(problem: Problem, at: str, input_path: InputPath, parts: Sequence[str]) -> Problem:
    """A problem of an input, or of its element at `parts`. The name of the input, no longer in the pointer, goes into the message."""
    index = [int(part) for part in parts if part.isdigit()]
    shape = input_path.shape
    got = problem.got if input_path.name in problem.expected else f"{problem.got} in {input_path.name}"
    if not index:
        return replace(problem, at=at, got=got)
    if len(index) == len(shape) - 1 and shape[-1] == 1:
        index.append(0)  # [b, 1] is read as [b]
    if not input_path.numbers or len(index) != len(shape):
        return replace(problem, at=at, got=f"{problem.got} as element {index} of {input_path.name}")
    if input_path.nested:
        return replace(problem, at=at + input_path.numbers + "".join(f"/{i}" for i in index), got=got)
    flat = 0
    for i, length in zip(index, shape, strict=True):
        flat = flat * length + i
    return replace(problem, at=f"{at}{input_path.numbers}/{flat}", got=got)
