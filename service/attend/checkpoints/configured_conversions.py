"""Conversions of tensors by a model's config: what it says about the weights of any layout, and the layouts that only a config selects."""

import math
from dataclasses import replace

import numpy as np

from attend.checkpoints.conversions import KINDS, RowOrder, convert, split_rows, stacked
from attend.checkpoints.layout import INPUTS, Converted, Fields, LayerTensors, Weights
from attend.checkpoints.powers import powers
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array


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
    table, products = _table_of_distances(tensors), Weights()
    for name in ("key", "query") if scores.get("position_to_content") else ("key",):
        source = f"position_{name}" if f"position_{name}.weight" in weights else name
        matrix, bias = weights[f"{source}.weight"], tensors.arrays.get(f"{source}.bias", np.zeros(1, np.float32))
        if table.shape != (2 * n, matrix.shape[1]):
            raise tensors.misfit("distance_table", f"shape [{2 * n}, {matrix.shape[1]}], as the config has it")
        if bias.shape not in ((1,), matrix.shape[:1]):
            raise tensors.misfit(f"{source}.bias", f"shape [{len(matrix)}]")
        products[f"position_{name}.weight"] = matrix @ table.T + bias[:, None]
    return products


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


def gated_stack(heads: int, kv_heads: int) -> RowOrder:
    """Rows [gate; q; k; v] (HRM-Text)."""
    (rows,), places = stacked(heads, kv_heads)
    return (heads + rows,), {**places, "gate": np.s_[:heads], "query": np.s_[heads : 2 * heads], "key": np.s_[2 * heads : -kv_heads]}


def codegen(heads: int, kv_heads: int) -> RowOrder:
    """Rows in four blocks, one for each TPU core of CodeGen's training, of [q; v; k] each."""
    return (4, 3), {"query": np.s_[:, 0], "value": np.s_[:, 1], "key": np.s_[:, 2]}


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
    scales = powers(math.e, np.minimum(tensors.get("logit_scale", "heads", "1", "1"), math.log(100))).reshape(-1, 1)
    norms = {"query": scales * head_dim**-0.5, "key": np.full_like(scales, head_dim**-0.5)}
    distances = (np.arange(1 - n, n) * 8 / max(n - 1, 1) for n in (grid["height"], grid["width"]))
    sides = [[math.copysign(math.log2(abs(x) + 1) / 3, x) for x in of_side] for of_side in distances]
    places = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)
    first, bias = tensors.get("network.weight", "n", "2"), tensors.get("network.bias", "n")
    last = tensors.get("network_out.weight", "heads", "n")
    if not first.shape[::-1] == (2, len(bias)) == (2, last.shape[1]):
        raise tensors.misfit("network.weight", f"shape [{len(bias)}, 2], as the network's other tensors have it")
    table = 16 / (1 + powers(math.e, -np.maximum(places @ first.T + bias, 0) @ last.T))
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
