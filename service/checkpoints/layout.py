"""A layout: the names and shapes of a layer's tensors in one framework, and their conversion to canonical weights.

A layout with several spellings (Keras has variable paths and file names) has several `Layout`s of the same name. The *stem* is the name of
the layer in its checkpoint (`encoder.layer.3.attention`); a *part* is the role of a tensor below the stem (`query.weight`, `qkv.bias`),
canonical if possible.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from service.checkpoints.refusals import field_pointer, shape_of, weight_pointer
from service.errors import InvalidRequest
from service.spec_parts import PROJECTIONS
from service.tensors import Array

Weights = dict[str, Array]
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer, and the caller's spec."""

    arrays: Mapping[str, Array]  # part -> tensor
    names: Mapping[str, str]  # part -> its name in the checkpoint
    stem: str  # normalised: "." between the segments
    given: Mapping[str, Any]  # fields of the caller's spec
    elsewhere: Callable[[str], Array | None]  # any tensor of the checkpoint, by normalised name

    def has(self, part: str) -> bool:
        return part in self.arrays

    def get(self, part: str, *shape: str) -> Array:
        """The tensor with one axis per name: `get("query.weight", "out", "in")`. Raises InvalidRequest for another rank."""
        array = self.arrays[part]
        if array.ndim != len(shape):
            raise self.misfit(part, f"shape [{', '.join(shape)}]")
        return array

    def misfit(self, part: str, expected: str) -> InvalidRequest:
        return InvalidRequest.where(weight_pointer(self.names[part]), expected, shape_of(self.arrays[part]))

    def number(self, name: str) -> int | None:
        """A count in the caller's spec; None if absent. Raises InvalidRequest if it is no positive integer."""
        value = self.given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidRequest.where(field_pointer(name), "a positive integer", str(value)[:60])
        return value


@dataclass(frozen=True, slots=True)
class Converted:
    """Canonical weights; the fields of the spec that they determine; and defaults of the layout for fields that the caller leaves out."""

    weights: Weights
    known: Fields = field(default_factory=dict)
    assumed: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One spelling of a layout."""

    name: str
    names: Mapping[str, str]  # name below the stem -> part
    convert: Callable[[LayerTensors], Converted]
    optional: tuple[tuple[str, ...], ...] = ()  # groups of parts that may be missing, each group as a whole
    ignored: Mapping[str, int | None] = field(default_factory=dict)  # pattern of buffers -> their rank, None for any
    refused: Mapping[str, str] = field(default_factory=dict)  # name -> what is expected instead of that tensor
    required_fields: Mapping[str, str] = field(default_factory=dict)  # field of the spec -> what is expected there
    identified_under: tuple[str, ...] | None = None  # last segments of stems where the names identify the layout; None: all
    parent: str = ""  # first segment of q, k and v, if the output projection is outside of it
    excluded_by: str = ""  # a sibling of the stem that means another layout

    @cached_property
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


def vectors(tensors: LayerTensors) -> Weights:
    """The biases, norm weights and sinks that the layer has."""
    parts = (*ALL_BIASES, "query_norm.weight", "key_norm.weight", "sinks")
    return {part: tensors.get(part, "n") for part in parts if tensors.has(part)}


def as_linear(tensors: LayerTensors) -> Weights:
    """Four matrices [out, in], applied as x @ W.T. This is the canonical orientation, so they are not copied."""
    return {f"{name}.weight": tensors.get(f"{name}.weight", "out", "in") for name in PROJECTIONS} | vectors(tensors)


def as_kernels(tensors: LayerTensors) -> Weights:
    """Four matrices [in, out], applied as x @ W. They are transposed to the canonical orientation."""
    return {f"{name}.weight": tensors.get(f"{name}.weight", "in", "out").T for name in PROJECTIONS} | vectors(tensors)


def linear(tensors: LayerTensors) -> Converted:
    return Converted(as_linear(tensors))


def kernels(tensors: LayerTensors) -> Converted:
    return Converted(as_kernels(tensors))
