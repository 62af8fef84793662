"""A layout: the names and shapes of a layer's tensors in one framework, and their conversion to canonical weights.

A layout with several spellings (Keras has variable paths and file names) has several `Layout`s of the same name. The *stem* is the name of
the layer in its checkpoint (`encoder.layer.3.attention`); a *role* is what a tensor below the stem is (`query.weight`, `qkv.bias`),
the canonical name if there is one.

`convert` passes on tensors that have canonical roles, and cuts a matrix of several projections. The layout decides how it is cut; the shape
does not show it. `convert_by_head` is for kernels with an axis for the heads. Matrices that need no transposing stay views of the
checkpoint's memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from service.errors import InvalidRequest, pointer
from service.spec import LAMBDAS
from service.spec_parts import PROJECTIONS
from service.tensors import Array

Weights = dict[str, Array]
Fields = dict[str, Any]

INPUTS = PROJECTIONS[:3]
QKV_BIASES = tuple(f"{name}.bias" for name in INPUTS)
QK_NORMS = ("query_norm.weight", "key_norm.weight", "query_norm.bias", "key_norm.bias")
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

    arrays: Mapping[str, Array]  # role -> tensor
    names: Mapping[str, str]  # role -> its name in the checkpoint
    stem: str  # normalised: "." between the segments
    given: Mapping[str, Any]  # fields of the caller's spec
    find: Callable[[str], Array | None]  # any tensor of the checkpoint, by normalised name
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
            return InvalidRequest.where(pointer(["weights", role]), expected, "another")
        return InvalidRequest.where(pointer(["weights", self.names[source]]), expected, f"shape {list(self.arrays[source].shape)}")

    def number(self, name: str) -> int | None:
        """A count in the caller's spec; None if absent. Raises InvalidRequest if it is no positive integer."""
        value = self.given.get(name)
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

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.roles.values()).difference(*self.optional)


# The rows of several projections in one matrix: the axes of [*axes, head_dim, in], and the index of each projection in these axes.
RowOrder = tuple[tuple[int, ...], Mapping[str, Any]]
RowOrderOf = Callable[[int, int], RowOrder]  # number of heads, of kv heads -> the order


def stacked(heads: int, kv_heads: int) -> RowOrder:
    """Rows [q; k; v]."""
    return (heads + 2 * kv_heads,), {"query": np.s_[:heads], "key": np.s_[heads:-kv_heads], "value": np.s_[-kv_heads:]}


def gated_stack(heads: int, kv_heads: int) -> RowOrder:
    """Rows [gate; q; k; v] (HRM-Text)."""
    (rows,), places = stacked(heads, kv_heads)
    return (heads + rows,), {**places, "gate": np.s_[:heads], "query": np.s_[heads : 2 * heads], "key": np.s_[2 * heads : -kv_heads]}


def grouped(heads: int, kv_heads: int) -> RowOrder:
    """Rows [kv heads, queries of each + 2, head_dim] (Falcon-40B); for kv heads = heads [heads, (q, k, v), head_dim] (BLOOM, GPT-NeoX)."""
    return (kv_heads, heads // kv_heads + 2), {"query": np.s_[:, :-2], "key": np.s_[:, -2], "value": np.s_[:, -1]}


def codegen(heads: int, kv_heads: int) -> RowOrder:
    """Rows in four blocks, one for each TPU core of CodeGen's training, of [q; v; k] each."""
    return (4, 3), {"query": np.s_[:, 0], "value": np.s_[:, 1], "key": np.s_[:, 2]}


def halves(heads: int, kv_heads: int) -> RowOrder:
    """Rows [k; v]."""
    return (2,), {"key": 0, "value": 1}


def convert(
    tensors: LayerTensors, rows: RowOrderOf = stacked, *, transposed: bool = False, square: bool = False, norms_less_one: bool = False
) -> Converted:
    """The tensors with canonical roles, and the rows of `qkv` and `kv`. Raises InvalidRequest for shapes that do not fit.

    `transposed`: matrices are [in, out], applied as x @ W. `square`: the matrix qkv is three square ones. `norms_less_one`: the weights of
    norms on queries and keys are stored less 1, which is added in float32, as Gemma does.
    """
    weights = {role: _matrix(tensors, role, transposed) for role in tensors.arrays if role in AXES and role not in QK_NORMS}
    for packed, order in (("qkv", rows), ("kv", halves)):
        if tensors.has(f"{packed}.weight"):
            matrix = _matrix(tensors, f"{packed}.weight", transposed)
            if square and packed == "qkv" and len(matrix) != 3 * matrix.shape[1]:
                shape = [3 * matrix.shape[1], matrix.shape[1]][:: -1 if transposed else 1]
                hint = ", as a Conv1D has it (a Linear is layout fused)" if transposed else ""
                raise tensors.misfit("qkv.weight", f"shape {shape}, three square matrices{hint}")
            weights |= split_rows(tensors, f"{packed}.weight", matrix, order)
        if tensors.has(f"{packed}.bias"):
            bias = tensors.get(f"{packed}.bias", "n")
            if tensors.has(f"{packed}.weight") and len(bias) != len(matrix):
                raise tensors.misfit(f"{packed}.bias", f"shape [{len(matrix)}]")
            weights |= split_rows(tensors, f"{packed}.bias", bias, order)
    for role in QK_NORMS:
        if tensors.has(role):
            norm = _norm(tensors, role)
            weights[role] = norm.astype(np.float32) + np.float32(1) if norms_less_one and role.endswith("weight") else norm
    return Converted(weights, {"rope": {"dims": 2 * len(tensors.get("inv_freq", "n"))}} if tensors.has("inv_freq") else {})


def _matrix(tensors: LayerTensors, role: str, transposed: bool) -> Array:
    """The tensor with the axes of a canonical weight, [out, in] where it is a matrix."""
    axes = AXES.get(role, ("out", "in"))
    return tensors.get(role, "in", "out").T if transposed and axes == ("out", "in") else tensors.get(role, *axes)


def _norm(tensors: LayerTensors, role: str) -> Array:
    """Weights or biases of a norm: [head_dim], or [heads, head_dim] where each head has its own."""
    section = tensors.given.get("qk_norm")
    if not isinstance(section, Mapping) or section.get("weights") != "own":
        return tensors.get(role, "n")
    head_dim = tensors.number("head_dim") or tensors.arrays[role].shape[-1]
    if tensors.arrays[role].size % head_dim:
        raise tensors.misfit(role, f"a multiple of head_dim {head_dim} numbers")
    return tensors.arrays[role].reshape(-1, head_dim)


def split_rows(tensors: LayerTensors, role: str, array: Array, rows: RowOrderOf) -> Weights:
    """Canonical weights from the rows of a matrix [out, in], or a bias [out], of several projections."""
    heads = tensors.number("num_heads") or 1
    kv_heads = tensors.number("num_kv_heads") or heads
    axes, places = rows(heads, kv_heads)
    if len(array) % math.prod(axes) or heads % kv_heads:
        expected = f"a multiple of {math.prod(axes)} rows of {', '.join(places)}, for {heads} heads and {kv_heads} of keys and values"
        raise tensors.misfit(role, expected)
    split, kind = array.reshape(*axes, -1, *array.shape[1:]), role.rpartition(".")[2]
    return {f"{name}.{kind}": split[place].reshape(-1, *array.shape[1:]) for name, place in places.items()}


def convert_by_head(tensors: LayerTensors, axes: Sequence[str] = ("in", "heads", "dim")) -> Converted:
    """Kernels of queries, keys and values with these axes, biases [heads, dim], the output's kernel [heads, dim, out].

    The shapes show the numbers and widths of heads. Raises InvalidRequest if they disagree.
    """
    order = [axes.index(axis) for axis in ("heads", "dim", "in")]
    kernels = {name: tensors.get(f"{name}.weight", *axes).transpose(order) for name in INPUTS}
    (heads, dim, _), (kv_heads, key_dim, _), (_, value_dim, _) = (kernel.shape for kernel in kernels.values())
    output = tensors.get("output.weight", "heads", "dim", "out")
    if key_dim != dim:
        raise tensors.misfit("key.weight", f"heads of width {dim}, as the queries have")
    if not kv_heads or heads % kv_heads:
        raise tensors.misfit("key.weight", f"a number of heads that divides {heads}, the queries'")
    if len(kernels["value"]) != kv_heads:
        raise tensors.misfit("value.weight", f"{kv_heads} heads, as the keys have")
    if output.shape[:2] != (heads, value_dim):
        raise tensors.misfit("output.weight", f"shape [{heads}, {value_dim}, out]")
    weights: Weights = {f"{name}.weight": kernel.reshape(-1, kernel.shape[2]) for name, kernel in kernels.items()}
    weights["output.weight"] = output.reshape(-1, output.shape[2]).T
    for name, kernel in kernels.items():
        if tensors.has(f"{name}.bias"):
            if tensors.arrays[f"{name}.bias"].shape != kernel.shape[:2]:
                raise tensors.misfit(f"{name}.bias", f"shape {list(kernel.shape[:2])}")
            weights[f"{name}.bias"] = tensors.arrays[f"{name}.bias"].reshape(-1)
    weights |= {role: tensors.get(role, "n") for role in ("output.bias", *QK_NORMS) if tensors.has(role)}
    return Converted(weights, {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "value_head_dim": value_dim})
