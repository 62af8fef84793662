"""Conversions: the tensors of a layer, in the layout of their checkpoint, to canonical weights.

`convert` passes on tensors that have canonical roles, and cuts a matrix of several projections. The layout decides how it is cut; the shape
does not show it. `convert_by_head` is for kernels with an axis for the heads. `as_configured` adds what a model's config says about the
conversion, whatever the layout; conversions below it are of layouts that only a config selects. Matrices that need no transposing stay
views of the checkpoint's memory.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attend.checkpoints.layout import AXES, INPUTS, QK_NORMS, Converted, Fields, LayerTensors, Weights
from attend.errors import InvalidRequest, pointer
from attend.spec_parts import PROJECTIONS
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


def as_configured(tensors: LayerTensors, converted: Converted) -> Converted:
    """Also repeats a gate's bias for each head (Beam), computes the weights of `relative_scores`, and applies the config's factors."""
    weights, heads = dict(converted.weights), tensors.given["num_heads"]
    if "gate.weight" in weights and len(bias := weights.get("gate.bias", ())) == heads:
        weights["gate.bias"] = np.repeat(bias, len(weights["gate.weight"]) // heads)
    scores = tensors.given.get("relative_scores")
    if scores and scores["kind"] == "disentangled":
        weights.update(_disentangled(tensors, weights, scores))
    for name, factor in tensors.conversion.get("factors", {}).items():
        for role in (f"{name}.{kind}" for kind in KINDS):
            if factor != 1 and role in weights:
                exact = _exact(weights[role])
                weights[role] = exact * exact.dtype.type(factor)
    return replace(converted, weights=weights, known=converted.known | {"num_heads": heads}, assumed={})


def _exact(array: Array) -> Array:
    """The array in float32, or as it is in float64."""
    return array if array.dtype == np.float64 else array.astype(np.float32)


def _disentangled(tensors: LayerTensors, weights: Weights, scores: Fields) -> Weights:
    """The weights of disentangled attention: products of projections and embedded distances, 2n of them.

    DeBERTa's embeddings are a table that its layers share; projections of its own, or those of queries and keys, are applied to it.
    Wav2Vec2-BERT's are vectors for all heads and distances from `left` ahead of a key to `right` behind it.
    """
    n = scores.get("buckets") or scores["max_distance"]
    if tensors.has("distances"):
        vectors = tensors.get("distances", "distances", "n")
        rows = np.clip(n - np.arange(2 * n), 1 - n, len(vectors) - n) + n - 1
        return {"position_key.weight": np.tile(vectors[rows].T, (tensors.given["num_heads"], 1))}
    if not tensors.has("distance_table"):
        raise tensors.misfit("distances", "vectors for distances")
    table, found = _table_of_distances(tensors), Weights()
    for name in ("key", "query") if scores.get("position_to_content") else ("key",):
        source = f"position_{name}" if f"position_{name}.weight" in weights else name
        matrix, bias = weights[f"{source}.weight"], tensors.arrays.get(f"{source}.bias", np.zeros(1, np.float32))
        if table.shape != (2 * n, matrix.shape[1]):
            raise tensors.misfit("distance_table", f"shape [{2 * n}, {matrix.shape[1]}], as the config has it")
        if bias.shape not in ((1,), matrix.shape[:1]):
            raise tensors.misfit(f"{source}.bias", f"shape [{len(matrix)}]")
        found[f"position_{name}.weight"] = matrix @ table.T + bias[:, None]
    return found


def _table_of_distances(tensors: LayerTensors) -> Array:
    """DeBERTa's table of distances, [distances, in], after its layer norm if it has one."""
    table = tensors.get("distance_table", "distances", "in")
    if (eps := tensors.conversion["table_eps"]) is None:
        return table
    exact = _exact(table)
    centred = exact - exact.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + exact.dtype.type(eps))
    for role in ("table_norm.weight", "table_norm.bias"):
        if tensors.arrays[role].shape != table.shape[1:]:
            raise tensors.misfit(role, f"shape {list(table.shape[1:])}")
    return np.asarray(normed * tensors.arrays["table_norm.weight"] + tensors.arrays["table_norm.bias"])


def convolutions(tensors: LayerTensors) -> Converted:
    """Projections that are convolutions [n, n / groups, 1] of width 1: their groups are blocks on a matrix's diagonal (SqueezeBERT)."""
    dense = {}
    for name, groups in tensors.conversion["groups"].items():
        role = f"{name}.weight"
        array = tensors.get(role, "n", "n / groups", "1")
        n = len(array)
        if n % groups or array.shape != (n, n // groups, 1):
            raise tensors.misfit(role, f"shape [n, n / {groups}, 1], for {groups} groups")
        matrix = np.zeros((groups, n // groups, groups, n // groups), array.dtype)
        matrix[np.arange(groups), :, np.arange(groups)] = array.reshape(groups, n // groups, n // groups)
        dense[role] = matrix.reshape(n, n)
    return convert(replace(tensors, arrays={**tensors.arrays, **dense}))


def cosine(tensors: LayerTensors) -> Converted:
    """Swin v2 (Liu et al. 2022, arXiv 2111.09883, section 3.3). Its cosines become products of normed vectors; its biases, 16 σ(network of
    logarithmic distances), become a table.
    """
    converted, grid, head_dim = convert(tensors), tensors.given["grid_bias"], tensors.given["head_dim"]
    scales = np.exp(np.minimum(tensors.get("logit_scale", "heads", "1", "1"), math.log(100))).reshape(-1, 1)
    norms = {"query": scales * head_dim**-0.5, "key": np.full_like(scales, head_dim**-0.5)}
    sides = [np.arange(1 - n, n) * 8 / max(n - 1, 1) for n in (grid["height"], grid["width"])]
    places = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)
    places = np.sign(places) * np.log2(np.abs(places) + 1) / 3
    first, bias = tensors.get("network.weight", "n", "2"), tensors.get("network.bias", "n")
    last = tensors.get("network_out.weight", "heads", "n")
    if not first.shape[::-1] == (2, len(bias)) == (2, last.shape[1]):
        raise tensors.misfit("network.weight", f"shape [{len(bias)}, 2], as the network's other tensors have it")
    table = 16 / (1 + np.exp(-np.maximum(places @ first.T + bias, 0) @ last.T))
    made = {f"{name}_norm.weight": np.repeat(norm, head_dim, axis=1) for name, norm in norms.items()} | {"grid_bias": table}
    return replace(converted, weights=converted.weights | {name: x.astype(np.float32) for name, x in made.items()})


def differential(tensors: LayerTensors) -> Converted:
    """As `convert`, for rows [halves, heads, width] of queries, keys and values; the halves go into each head (DiffLlama)."""
    converted, width = convert(tensors), tensors.given["head_dim"] // 2
    for role in (f"{name}.{kind}" for name in INPUTS for kind in KINDS):
        if (rows := converted.weights.get(role)) is not None:
            if len(rows) % (2 * width):
                raise tensors.misfit(role, f"a multiple of {2 * width} rows, two halves of heads of {width} numbers")
            converted.weights[role] = np.moveaxis(rows.reshape(2, -1, width, *rows.shape[1:]), 0, 1).reshape(rows.shape)
    return converted


def gated_queries(tensors: LayerTensors) -> Converted:
    """As `convert`, for a query matrix with rows [heads, (q, gate), head_dim], and norm weights less 1 (Qwen3-Next)."""

    def query_and_gate(heads: int, kv_heads: int) -> RowOrder:
        return (heads, 2), {"query": np.s_[:, 0], "gate": np.s_[:, 1]}

    converted = convert(tensors, norms_less_one=True)
    for role in ("query.weight", "query.bias"):
        if role in converted.weights:
            converted.weights.update(split_rows(tensors, role, converted.weights[role], query_and_gate))
    return converted


def latent(tensors: LayerTensors, rotated_last: bool = False) -> Converted:
    """DeepSeek's multi-head latent attention: the numbers that RoPE rotates go from the end of each head to its beginning.

    `rotated_last`: those of the indexer's heads are at the end too (HYV4).

    Queries have rows [heads, (nope, rope), in], keys and values [rank + rope, in] in the first step, and [heads, (key, value), rank] in
    the second.
    """
    heads, head_dim, value_dim = (tensors.given[name] for name in ("num_heads", "head_dim", "value_head_dim"))
    rank, rope = (tensors.given["latent"][name] for name in ("key_value_rank", "rope_key_dim"))
    nope, weights = head_dim - rope, convert(tensors).weights
    matrices = {name: tensors.get(f"{name}.weight", "out", "in") for name in ("query", "down", "up")}
    for name, rows in (("query", heads * head_dim), ("down", rank + rope), ("up", heads * (nope + value_dim))):
        if len(matrices[name]) != rows:
            raise tensors.misfit(f"{name}.weight", f"{rows} rows, as the config has them")
    query = np.roll(matrices["query"].reshape(heads, head_dim, -1), rope, axis=1)
    up = matrices["up"].reshape(heads, nope + value_dim, -1)
    weights["query.weight"] = query.reshape(heads * head_dim, -1)
    weights |= {f"{name}.weight": rows.reshape(-1, up.shape[2]) for name, rows in (("key", up[:, :nope]), ("value", up[:, nope:]))}
    for kind in KINDS:
        if tensors.has(f"down.{kind}"):
            weights[f"key_value_down.{kind}"], weights[f"rope_key.{kind}"] = np.split(tensors.arrays[f"down.{kind}"], [rank])
    for role in ("index_query.weight", "index_key.weight", "index_key_norm.weight", "index_key_norm.bias") if rotated_last else ():
        rows, width = tensors.arrays[role], tensors.given["indexer"]["head_dim"]
        if len(rows) % width:
            raise tensors.misfit(role, f"a multiple of {width} rows, the index_head_dim of the config")
        weights[role] = np.roll(rows.reshape(-1, width, *rows.shape[1:]), rope, axis=1).reshape(rows.shape)
    return Converted(weights)


def xlnet(tensors: LayerTensors) -> Converted:
    """XLNet's matrices are [in, heads, head_dim], and that of the output [out, heads, head_dim]."""
    matrices = {name: tensors.get(f"{name}.weight", "in", "heads", "n") for name in (*PROJECTIONS, "position_key")}
    weights = {f"{name}.weight": matrix.reshape(len(matrix), -1).T for name, matrix in matrices.items()}
    biases = {role: tensors.get(role, "heads", "n") for role in ("content_bias", "position_bias")}
    return Converted(weights | {"output.weight": weights["output.weight"].T} | biases)
