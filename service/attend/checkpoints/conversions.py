"""Conversions: the tensors of a layer, in the layout of their checkpoint, to canonical weights.

`convert` passes on tensors that have canonical roles, and cuts a matrix of several projections. The layout decides how it is cut; the shape
does not show it. `convert_by_head` is for kernels with an axis for the heads. What a model's config says about the conversion, and the
conversions of layouts that only a config selects, are in `configured_conversions.py`. Matrices that need no transposing stay views of the
checkpoint's memory.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attend.checkpoints.layout import AXES, INPUTS, QK_NORMS, Converted, LayerTensors, Weights
from attend.errors import InvalidRequest, pointer
from attend.tensors import Array

KINDS = ("weight", "bias")
TABLE = "relative_attention_bias.weight"
CROSS = "EncDecAttention"

# The rows of several projections in one matrix: the axes of [*axes, head_dim, in], and the index of each projection in these axes.
RowOrder = tuple[tuple[int, ...], Mapping[str, Any]]
RowOrderOf = Callable[[int, int], RowOrder]  # number of heads, of kv heads -> the order


def stacked(heads: int, kv_heads: int) -> RowOrder:
    """Rows [q; k; v]."""
    return (heads + 2 * kv_heads,), {"query": np.s_[:heads], "key": np.s_[heads:-kv_heads], "value": np.s_[-kv_heads:]}


def grouped(heads: int, kv_heads: int) -> RowOrder:
    """Rows [kv heads, queries of each + 2, head_dim] (Falcon-40B); for kv heads = heads [heads, (q, k, v), head_dim] (BLOOM, GPT-NeoX)."""
    return (kv_heads, heads // kv_heads + 2), {"query": np.s_[:, :-2], "key": np.s_[:, -2], "value": np.s_[:, -1]}


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


def fused(tensors: LayerTensors) -> Converted:
    """Rows [q; k; v], unless the names are those of models that group their rows by kv head."""
    heads, kv_heads = tensors.number("num_heads") or 1, tensors.number("num_kv_heads") or 1
    if 1 < kv_heads < heads and "query_key_value" in tensors.names["qkv.weight"]:
        expected = (
            f"{heads} or 1: with other numbers of kv heads, rows under query_key_value may be grouped by kv head (Falcon-40B, Falcon 2)"
        )
        expected += ", which layout neox reads. If they are [q; k; v], name the tensors qkv_proj and o_proj"
        raise InvalidRequest.where("/spec/num_kv_heads", expected, str(kv_heads))
    return convert(tensors)


def t5_table(stem: str) -> str:
    """The name of the table of position biases that a stack's layers share: it is in the stack's first block."""
    stack = re.sub(r"(^|\.)block\.\d+\.layer\.\d+\.\w+$", r"\1block.0.layer.0.SelfAttention", stem)
    return f"{stack}.{TABLE}".lstrip(".")


def t5(tensors: LayerTensors) -> Converted:
    """With the table of position biases, the layer's own or the shared one."""
    converted = convert(tensors)
    table = next((tensors.get(role, "buckets", "heads") for role in ("relative_bias", "shared_table") if tensors.has(role)), None)
    known = {} if table is None else {"num_heads": table.shape[1]}
    no_table = "relative_bias" in tensors.given and tensors.given["relative_bias"] is None and not tensors.has("relative_bias")
    if tensors.stem.endswith(CROSS) or no_table:
        return Converted(converted.weights, known)
    if table is None:
        name = pointer(["weights", t5_table(tensors.stem)])
        raise InvalidRequest.where(name, "the stack's table of position biases, [buckets, heads]", "nothing")
    assumed = {"relative_bias": {"max_distance": 128, "bidirectional": _bidirectional(tensors)}}
    return Converted(converted.weights | {"relative_bias": table}, known, assumed)


def _bidirectional(tensors: LayerTensors) -> bool:
    stacks = [segment for segment in tensors.stem.split(".") if segment in ("encoder", "decoder")]
    if stacks:
        return stacks[-1] == "encoder"
    given = tensors.given.get("relative_bias")
    if not isinstance(given, Mapping) or type(given.get("bidirectional")) is not bool:
        raise InvalidRequest.where("/spec/relative_bias/bidirectional", "true for an encoder, false for a decoder", "nothing")
    return bool(given["bidirectional"])
