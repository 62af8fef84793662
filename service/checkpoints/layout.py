"""What a layout is: the names its weights have below the layer's own name, and how they become canonical ones.

A `Form` is one row of the table in `table.py`, plain data but for its `convert`. A layout that is spelled in several ways (Keras' variable
paths and its files) has several forms. The words: a *stem* is the name of the layer in its checkpoint (`encoder.layer.3.attention`), a
*part* is what one tensor below it is (`query.weight`, `qkv.bias`); where a part is one of ours it has the canonical name.

Neither finding layers in a checkpoint nor the rest of a spec is known here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.checkpoints.problems import field_pointer, shape_of, weight_pointer
from service.errors import InvalidRequest
from service.spec import PROJECTIONS
from service.tensors import Array

Weights = dict[str, Array]
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """One layer's tensors by part, with what is needed to say where something is wrong."""

    arrays: Mapping[str, Array]  # part -> tensor
    names: Mapping[str, str]  # part -> its name in the checkpoint
    stem: str  # normalised: "." between the segments
    given: Mapping[str, Any]  # the spec that came with the checkpoint
    elsewhere: Callable[[str], Array | None]  # a tensor of the checkpoint by its normalised name

    def has(self, part: str) -> bool:
        return part in self.arrays

    def get(self, part: str, *shape: str) -> Array:
        """The tensor, one name of an axis for each of its axes: `get("query.weight", "out", "in")`. Raises InvalidRequest otherwise."""
        array = self.arrays[part]
        if array.ndim != len(shape):
            raise self.misfit(part, f"shape [{', '.join(shape)}]")
        return array

    def misfit(self, part: str, expected: str) -> InvalidRequest:
        return InvalidRequest.where(weight_pointer(self.names[part]), expected, shape_of(self.arrays[part]))

    def number(self, name: str) -> int | None:
        """A count of the spec that came; None if it is not there. Raises InvalidRequest if it is no positive integer."""
        value = self.given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidRequest.where(field_pointer(name), "a positive integer", str(value)[:60])
        return value


@dataclass(frozen=True, slots=True)
class Read:
    """What a form makes of a layer: weights, what they tell of the spec, and what the layout's models have where the spec is silent."""

    weights: Weights
    told: Fields = field(default_factory=dict)
    assumed: Fields = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of naming and laying out the weights of a layer."""

    layout: str
    names: Mapping[str, str]  # name below the stem -> part
    convert: Callable[[Found], Read]
    optional: tuple[tuple[str, ...], ...] = ()  # parts that may be missing, each group together
    aside: Mapping[str, int | None] = field(default_factory=dict)  # pattern of names that are no weights -> rank they must have to be that
    refused: Mapping[str, str] = field(default_factory=dict)  # name -> why a layer that has it cannot be held
    needs: Mapping[str, str] = field(default_factory=dict)  # fields of the spec that must be said -> what is expected there
    told_under: tuple[str, ...] | None = None  # stems that make the names tell the layout: last segments; None any, () none
    inside: str = ""  # the names' first segment that is the layer's own, where its output projection stands beside it
    not_beside: str = ""  # a tensor beside the stem with which the names tell it no more

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.names.values()).difference(*self.optional)


def linear_names(
    query: str, key: str, value: str, output: str, *, weight: str = "weight", bias: str = "bias", biases: str = "qkvo"
) -> dict[str, str]:
    """Names of four separate projections -> canonical names; `biases` says which may have a bias."""
    paths = dict(zip(PROJECTIONS, (query, key, value, output), strict=True))
    names = {f"{path}.{weight}": f"{name}.weight" for name, path in paths.items()}
    with_bias = {name for name, letter in zip(PROJECTIONS, "qkvo", strict=True) if letter in biases}
    return names | {f"{path}.{bias}": f"{name}.bias" for name, path in paths.items() if name in with_bias}


QKV_BIASES = ("query.bias", "key.bias", "value.bias")
ALL_BIASES = (*QKV_BIASES, "output.bias")


def vectors(found: Found) -> Weights:
    """Biases, norms and sinks that are there under their canonical names, all of one axis."""
    parts = (*ALL_BIASES, "query_norm.weight", "key_norm.weight", "sinks")
    return {part: found.get(part, "n") for part in parts if found.has(part)}


def as_linear(found: Found) -> Weights:
    """Four matrices [out, in], applied as x @ W.T: canonical as they are, and so not copied."""
    return {f"{name}.weight": found.get(f"{name}.weight", "out", "in") for name in PROJECTIONS} | vectors(found)


def as_kernels(found: Found) -> Weights:
    """Four matrices [in, out], applied as x @ W: canonical transposed."""
    return {f"{name}.weight": found.get(f"{name}.weight", "in", "out").T for name in PROJECTIONS} | vectors(found)


def linear(found: Found) -> Read:
    return Read(as_linear(found))


def kernels(found: Found) -> Read:
    return Read(as_kernels(found))
