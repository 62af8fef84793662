"""Where in the body that was sent stands what a refusal speaks of: pointers into a request for attention -> pointers into a V2 request.

A tensor's field is an input, by its place in the list; every other field is a parameter; the layer is the model. For what is refused once
the body has been read: refusals of the body itself point into it already. Knows neither JSON bodies nor protobuf, and no layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from service.errors import Problem, RequestError
from service.wire.v2.parameters import OPTIONS, TENSORS


class Sent(NamedTuple):
    """An input as it was sent. `numbers` points from it to its elements; "" where they are bytes, which no pointer reaches."""

    name: str
    shape: tuple[int, ...]
    numbers: str = ""
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything of one request stands. `model` points to the model's name; one that stands in a path has no pointer."""

    inputs: Sequence[Sent] = ()
    model: str = ""

    def moved(self, problem: Problem) -> Problem:
        """The same problem, at its place in the V2 request."""
        name, *index = problem.at.split("/")[1:] or [""]
        if name == "layer":
            return replace(problem, at=self.model)
        for i, sent in enumerate(self.inputs):
            if sent.name == name:
                return _inside(problem, f"/inputs/{i}", sent, index)
        if name in OPTIONS:
            return replace(problem, at=f"/parameters{problem.at}")
        return replace(problem, at="/inputs") if name in TENSORS else problem


def placed(refusal: RequestError, places: Places | None) -> RequestError:
    """The refusal with every problem at its place; as it is where the body could not be read, or where it blames no place."""
    if places is None or not refusal.problems:
        return refusal
    return type(refusal)(problems=[places.moved(problem) for problem in refusal.problems])


def _inside(problem: Problem, at: str, sent: Sent, parts: Sequence[str]) -> Problem:
    """A problem of an input, or of the element of it that `parts` say. The input's name, no longer in the pointer, goes into the words."""
    index = [int(part) for part in parts if part.isdigit()]
    got = problem.got if sent.name in problem.expected else f"{problem.got} in {sent.name}"
    if not index:
        return replace(problem, at=at, got=got)
    if len(index) == len(sent.shape) - 1 and sent.shape[-1] == 1:
        index.append(0)  # [b, 1] is read as [b]
    if not sent.numbers or len(index) != len(sent.shape):
        return replace(problem, at=at, got=f"{problem.got} as element {index} of {sent.name}")
    if sent.nested:
        return replace(problem, at=at + sent.numbers + "".join(f"/{i}" for i in index), got=got)
    flat = 0
    for i, length in zip(index, sent.shape, strict=True):
        flat = flat * length + i
    return replace(problem, at=f"{at}{sent.numbers}/{flat}", got=got)
