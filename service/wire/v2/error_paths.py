"""Translates JSON pointers into an AttendRequest to pointers into the V2 request, for errors found after decoding.

A tensor field becomes an input, by its index; every other field a parameter; the layer the model. Errors found during decoding point into
the V2 request already. This module is independent of JSON and protobuf.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from service.errors import Problem
from service.wire.v2.members import INPUT_FIELDS, PARAMETER_FIELDS


class InputPath(NamedTuple):
    """An input of the V2 request. `numbers`: the pointer from the input to its elements, "" if they are bytes."""

    name: str
    shape: tuple[int, ...]
    numbers: str = ""
    nested: bool = False


def translate_problem(problem: Problem, inputs: Sequence[InputPath], model: str = "") -> Problem:
    """The same problem, with a pointer into the V2 request that has these inputs. `model`: the pointer to the model's name, "" if the name
    is in the URL."""
    name, *index = problem.at.split("/")[1:] or [""]
    if name == "layer":
        return replace(problem, at=model)
    for i, input_path in enumerate(inputs):
        if input_path.name == name:
            return _in_input(problem, f"/inputs/{i}", input_path, index)
    if name in PARAMETER_FIELDS:
        return replace(problem, at=f"/parameters{problem.at}")
    return replace(problem, at="/inputs") if name in INPUT_FIELDS else problem


def _in_input(problem: Problem, at: str, input_path: InputPath, parts: Sequence[str]) -> Problem:
    """Translates a problem of an input or its element `parts`. The pointer loses the input's name, so the message names it."""
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
