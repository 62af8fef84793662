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
from service.spec import LAMBDAS
from service.spec_parts import PROJECTIONS
from service.tensors import Array

Weights = dict[str, Array]
Fields = dict[str, Any]

WITH_BIAS = (*PROJECTIONS, "gate", "query_down", "key_value_down", "rope_key")
MATRICES = (*WITH_BIAS, "position_key", "position_query", "index_query", "index_key", "index_head_weights")
NORMS = ("query_norm", "key_norm", "query_down_norm", "key_value_down_norm", "index_key_norm")
AXES: dict[str, tuple[str, ...]] = {  # canonical weight -> its axes
    **{f"{name}.weight": ("out", "in") for name in MATRICES},
    **{f"{name}.bias": ("n",) for name in (*WITH_BIAS, *NORMS)},
    **{f"{name}.weight": ("n",) for name in (*NORMS, "head_norm")},
    **dict.fromkeys(("sinks", *LAMBDAS), ("n",)),
    **dict.fromkeys(("content_bias", "position_bias"), ("heads", "n")),
    **dict.fromkeys(("grid_bias", "grid_rows", "grid_columns"), ("places", "n")),
    "relative_bias": ("buckets", "heads"),
}


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer, and the caller's spec."""

    arrays: Mapping[str, Array]  # part -> tensor
    names: Mapping[str, str]  # part -> its name in the checkpoint
    stem: str  # normalised: "." between the segments
    given: Mapping[str, Any]  # fields of the caller's spec
    find: Callable[[str], Array | None]  # any tensor of the checkpoint, by normalised name
    conversion: Mapping[str, Any]  # what a model's config says about the conversion

    def has(self, part: str) -> bool:
        return part in self.arrays

    def get(self, part: str, *shape: str) -> Array:
        """The tensor with one axis per name: `get("query.weight", "out", "in")`. Raises InvalidRequest for another rank."""
        array = self.arrays[part]
        if array.ndim != len(shape):
            raise self.misfit(part, f"shape [{', '.join(shape)}]")
        return array

    def misfit(self, part: str, expected: str) -> InvalidRequest:
        """The error about the checkpoint's tensor from which a part was made."""
        kind = part.rpartition(".")[2]
        source = next((x for x in (part, f"qkv.{kind}", f"kv.{kind}", f"up.{kind}", f"down.{kind}") if self.has(x)), None)
        if source is None:  # a tensor of another layer, or computed from several
            return InvalidRequest.where(weight_pointer(part), expected, "another")
        return InvalidRequest.where(weight_pointer(self.names[source]), expected, shape_of(self.arrays[source]))

    def number(self, name: str) -> int | None:
        """A count in the caller's spec; None if absent. Raises InvalidRequest if it is no positive integer."""
        value = self.given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidRequest.where(field_pointer(name), "a positive integer", str(value)[:60])
        return value


@dataclass(frozen=True, slots=True)
class Converted:
    """Canonical weights; the fields of the spec that the tensors determine; and defaults for fields that the caller leaves out."""

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
    assumed: Fields = field(default_factory=dict)  # defaults for fields of the spec
    required_fields: Mapping[str, str] = field(default_factory=dict)  # field of the spec, such as rope.theta -> what is expected there
    identified_under: tuple[str, ...] | None = None  # last segments of stems where the names identify the layout; None: all
    parent: str = ""  # first segment of q, k and v, if the output projection is outside of it
    excluded_by: str = ""  # a sibling of the stem that means another layout

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.names.values()).difference(*self.optional)
