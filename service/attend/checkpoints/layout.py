"""What a layout is: the names and shapes of a layer's tensors in checkpoints of one kind, and their conversion to canonical weights.

A layout with several spellings (Keras has variable paths and file names) has several `Layout`s of the same name. The *stem* is the name of
the layer in its checkpoint (`encoder.layer.3.attention`); a *role* is what a tensor below the stem is (`query.weight`, `qkv.bias`),
the canonical name if there is one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attend.attention.operators import OPERATORS
from attend.errors import InvalidRequest, pointer
from attend.spec_parts import PROJECTIONS, whole
from attend.tensors import Array

Weights = dict[str, Array]
Fields = dict[str, Any]

INPUTS = PROJECTIONS[:3]
QKV_BIASES = tuple(f"{name}.bias" for name in INPUTS)
QK_NORMS = ("query_norm.weight", "key_norm.weight", "query_norm.bias", "key_norm.bias")
AXES: dict[str, tuple[str, ...]] = {  # canonical weight -> its axes
    **{f"{name}.weight": ("out", "in") for name in PROJECTIONS},
    **{f"{name}.bias": ("n",) for name in PROJECTIONS},
    **{name: axes for operator in OPERATORS for name, axes in operator.axes.items()},
}


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer, and the caller's spec."""

    arrays: Mapping[str, Array]  # role -> tensor
    names: Mapping[str, str]  # role -> its name in the checkpoint
    stem: str  # normalised: "." between the segments
    given: Mapping[str, Any]  # fields of the caller's spec
    conversion: Mapping[str, Any]  # what a model's config says about the conversion

    def has(self, role: str) -> bool:
        return role in self.arrays

    def get(self, role: str, *shape: str) -> Array:
        """The tensor with one axis per name: `get("query.weight", "out", "in")`. Raises InvalidRequest for another rank."""
        array = self.arrays[role]
        if array.ndim != len(shape):
            raise self.misfit(role, f"shape [{', '.join(shape)}]")
        return array

    def misfit(self, role: str, expected: str) -> InvalidRequest:
        """The error about the checkpoint's tensor from which the tensor of this role was made."""
        kind = role.rpartition(".")[2]
        source = next((x for x in (role, f"qkv.{kind}", f"kv.{kind}", f"up.{kind}", f"down.{kind}") if self.has(x)), None)
        if source is None:  # a tensor of another layer, or computed from several
            return InvalidRequest.where("/weights", f"{expected}, for {role}", "another")
        return InvalidRequest.where(pointer(["weights", self.names[source]]), expected, f"shape {list(self.arrays[source].shape)}")

    def number(self, name: str) -> int | None:
        """A count in the caller's spec; None if absent. Raises InvalidRequest if it is no positive integer."""
        value = whole(self.given.get(name))
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidRequest.where(f"/spec/{name}", "a positive integer", str(value)[:60])
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
    roles: Mapping[str, str]  # name below the stem -> role
    convert: Callable[[LayerTensors], Converted]
    optional: tuple[tuple[str, ...], ...] = ()  # groups of roles that may be missing, each group as a whole
    ignored: Mapping[str, int | None] = field(default_factory=dict)  # pattern of buffers -> their rank, None for any
    refused: Mapping[str, str] = field(default_factory=dict)  # name -> what is expected instead of that tensor
    assumed: Fields = field(default_factory=dict)  # defaults for fields of the spec
    required_fields: Mapping[str, str] = field(default_factory=dict)  # field of the spec, such as rope.theta -> what is expected there
    identified_under: tuple[str, ...] | None = None  # last segments of stems where the names identify the layout; None: all
    parent: str = ""  # first segment of q, k and v, if the output projection is outside of it
    excluded_by: str = ""  # a sibling of the stem that means another layout
    shared_table: Callable[[str], str] | None = None  # stem -> name of a table that several layers share, with role `shared_table`

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.roles.values()).difference(*self.optional)
