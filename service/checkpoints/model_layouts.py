"""Layouts for models with a config, which names the family, its layers and their sizes.

So one layout here has the names of many families: the config decides which family it is, and a tensor whose name matches none of them is
refused. `separate` has four matrices [out, in], `stacked`, `grouped` and `codegen` one for queries, keys and values, and `conv` is
GPT-2's Conv1D [in, out]. Norms of queries and keys may have any of the usual names. An output gate has a matrix of its own, or shares that
of the queries (`gated queries`) or of queries, keys and values (`gated stack`). `latent` has DeepSeek's matrices in two steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from service.checkpoints.framework_layouts import packed_names
from service.checkpoints.layout import (
    INPUTS,
    Converted,
    Fields,
    LayerTensors,
    Layout,
    RowOrder,
    RowOrderOf,
    Weights,
    codegen,
    convert,
    gated_stack,
    grouped,
    split_rows,
    stacked,
)
from service.spec import LAMBDAS
from service.spec_parts import PROJECTIONS
from service.tensors import Array

SPELLINGS = {
    "query": "q_proj query self.query q attn.q q_lin Wq self.q_proj attention.query q_proj.linear query_proj linear_q self.query_proj",
    "key": "k_proj key self.key k attn.k k_lin Wk self.k_proj attention.key k_proj.linear key_proj linear_k self.key_proj",
    "value": "v_proj value self.value v attn.v v_lin Wv self.v_proj attention.value v_proj.linear value_proj linear_v self.value_proj",
    "qkv": "qkv_proj Wqkv query_key_value c_attn qkv in_proj self.Wqkv att_proj gqkv_proj attention.qkv self.in_proj",
    "output": "o_proj out_proj dense output.dense o attn.o out_lin Wo wo c_proj proj projection o_proj.linear attn_out projection_layer "
    "post_attention.conv1d linear_out",
    "query_norm": "q_norm query_layernorm q_layernorm query_norm",
    "key_norm": "k_norm key_layernorm k_layernorm key_norm",
    "gate": "gate_proj g_proj",
    "position_key": "linear_pos relative_k_proj self.pos_key_proj self.pos_proj",
    "position_query": "self.pos_query_proj self.pos_q_proj",
}
OTHER_NAMES = {
    **dict.fromkeys(("sinks", "softmax_offset", "attention_sink_bias"), "sinks"),
    "gate_bias": "gate.bias",
    **dict.fromkeys(("pos_bias_u", "bias_u"), "content_bias"),  # of Transformer-XL's scores
    **dict.fromkeys(("pos_bias_v", "bias_v"), "position_bias"),
    "distance_embedding.weight": "distances",
    "self.relative_position_bias_table": "grid_bias",  # Swin and BEiT
    "relative_position_bias.relative_position_bias_table": "grid_bias",
    "attention.relative_position_bias.relative_position_bias_table": "grid_bias",
    "rel_pos_h": "grid_rows",  # SAM
    "rel_pos_w": "grid_columns",
}
VIDEO_MAE_BIASES = {"attention.q_bias": "query.bias", "attention.v_bias": "value.bias"}
PACKED_NAMES = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "self.q_bias": "query.bias", "self.v_bias": "value.bias"}
KINDS = ("weight", "bias")
# norms of blocks, and buffers of old files
IGNORED = {"*LayerNorm.*": None, "*rotary_emb.inv_freq": None, "*relative_position_index": 2, "bias": 4, "masked_bias": 0}


def separate(tensors: LayerTensors, rows: RowOrderOf = stacked, **options: bool) -> Converted:
    """As `convert`. Also repeats a gate's bias for each head (Beam), applies factors, and computes the weights of `relative_scores`."""
    converted, heads = convert(tensors, rows, **options), tensors.given["num_heads"]
    if "gate.weight" in converted.weights and len(bias := converted.weights.get("gate.bias", ())) == heads:
        converted.weights["gate.bias"] = np.repeat(bias, len(converted.weights["gate.weight"]) // heads)
    scores = tensors.given.get("relative_scores")
    if scores and scores["kind"] == "disentangled":
        converted.weights.update(_disentangled(tensors, converted.weights, scores))
    return _scaled(tensors, converted)


def _scaled(tensors: LayerTensors, converted: Converted) -> Converted:
    """Multiplies each projection that has a factor by it, in float32 or float64."""
    for name, factor in tensors.conversion.get("factors", {}).items():
        for role in (f"{name}.{kind}" for kind in KINDS):
            if factor != 1 and role in converted.weights:
                exact = _exact(converted.weights[role])
                converted.weights[role] = exact * exact.dtype.type(factor)
    return converted


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
    table, found = _table(tensors), Weights()
    for name in ("key", "query") if scores.get("position_to_content") else ("key",):
        source = f"position_{name}" if f"position_{name}.weight" in weights else name
        matrix, bias = weights[f"{source}.weight"], tensors.arrays.get(f"{source}.bias", np.zeros(1, np.float32))
        if table.shape != (2 * n, matrix.shape[1]):
            raise tensors.misfit("distance_table", f"shape [{2 * n}, {matrix.shape[1]}], as the config has it")
        if bias.shape not in ((1,), matrix.shape[:1]):
            raise tensors.misfit(f"{source}.bias", f"shape [{len(matrix)}]")
        found[f"position_{name}.weight"] = matrix @ table.T + bias[:, None]
    return found


def _table(tensors: LayerTensors) -> Array:
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
    return separate(replace(tensors, arrays={**tensors.arrays, **dense}))


def cosine(tensors: LayerTensors) -> Converted:
    """Swin v2 (Liu et al. 2022, arXiv 2111.09883, section 3.3). Its cosines become products of normed vectors; its biases, 16 σ(network of
    logarithmic distances), become a table.
    """
    converted, grid, head_dim = separate(tensors), tensors.given["grid_bias"], tensors.given["head_dim"]
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
    """As `separate`, for rows [halves, heads, width] of queries, keys and values; the halves go into each head (DiffLlama)."""
    converted, width = separate(tensors), tensors.given["head_dim"] // 2
    for role in (f"{name}.{kind}" for name in INPUTS for kind in KINDS):
        if (rows := converted.weights.get(role)) is not None:
            if len(rows) % (2 * width):
                raise tensors.misfit(role, f"a multiple of {2 * width} rows, two halves of heads of {width} numbers")
            converted.weights[role] = np.moveaxis(rows.reshape(2, -1, width, *rows.shape[1:]), 0, 1).reshape(rows.shape)
    return converted


def gated_queries(tensors: LayerTensors) -> Converted:
    """As `separate`, for a query matrix with rows [heads, (q, gate), head_dim], and norm weights less 1 (Qwen3-Next)."""

    def query_and_gate(heads: int, kv_heads: int) -> RowOrder:
        return (heads, 2), {"query": np.s_[:, 0], "gate": np.s_[:, 1]}

    converted = separate(tensors, norms_less_one=True)
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
    return _scaled(tensors, Converted(weights))


def xlnet(tensors: LayerTensors) -> Converted:
    """XLNet's matrices are [in, heads, head_dim], and that of the output [out, heads, head_dim]."""
    matrices = {name: tensors.get(f"{name}.weight", "in", "heads", "n") for name in (*PROJECTIONS, "position_key")}
    weights = {f"{name}.weight": matrix.reshape(len(matrix), -1).T for name, matrix in matrices.items()}
    biases = {role: tensors.get(role, "heads", "n") for role in ("content_bias", "position_bias")}
    return Converted(weights | {"output.weight": weights["output.weight"].T} | biases)


def _layout(name: str, convert: Callable[[LayerTensors], Converted], *projections: str, more: Mapping[str, str] | None = None) -> Layout:
    """A layout with these matrices, that of the output, and `more`, other names and their roles.

    Biases, norms, gates, tables and sinks may be missing: the config says whether there are any.
    """
    more = more or {}
    modules = (*projections, "output", "query_norm", "key_norm", "gate", "position_key", "position_query")
    names = {f"{spelling}.{kind}": f"{module}.{kind}" for module in modules for spelling in SPELLINGS[module].split() for kind in KINDS}
    names |= {**OTHER_NAMES, **(PACKED_NAMES if "qkv" in projections else VIDEO_MAE_BIASES), **more}
    required = {f"{matrix}.weight" for matrix in (*projections, "output")} | {*more.values()}
    return Layout(name, names, convert, optional=tuple((role,) for role in {*names.values()} - required), ignored=IGNORED)


LATENT = packed_names(query_down="q_a_proj", down="kv_a_proj_with_mqa", output="o_proj") | {
    "q_proj.weight": "query.weight",
    "q_b_proj.weight": "query.weight",
    "q_a_layernorm.weight": "query_down_norm.weight",
    "kv_a_layernorm.weight": "key_value_down_norm.weight",
    "kv_b_proj.weight": "up.weight",
}
NETWORK = "self.continuous_position_bias_mlp"
COSINE = {"self.logit_scale": "logit_scale", f"{NETWORK}.2.weight": "network_out.weight"}
COSINE |= {f"{NETWORK}.0.{kind}": f"network.{kind}" for kind in KINDS}
INDEXER = packed_names(index_key_norm="indexer.k_norm") | {
    "indexer.wq_b.weight": "index_query.weight",
    "indexer.wk.weight": "index_key.weight",
    "indexer.weights_proj.weight": "index_head_weights.weight",
}
GATED = {"linear_gate.weight": "gate.weight", "learnable_sink_param": "sinks"}
CONV_CROSS = packed_names(query="q_attn", kv="c_attn", output="c_proj")
XLNET = {"q": "query.weight", "k": "key.weight", "v": "value.weight", "o": "output.weight", "r": "position_key.weight"}
XLNET |= {"r_w_bias": "content_bias", "r_r_bias": "position_bias"}
LATENT_OPTIONS = (("query_down.bias",), ("down.bias",), ("output.bias",))

MODEL_LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _layout("separate", separate, *INPUTS),
        _layout("separate, norms less 1", partial(separate, norms_less_one=True), *INPUTS),
        _layout("convolutions", convolutions, *INPUTS),
        _layout("cosine", cosine, *INPUTS, more=COSINE),
        _layout("differential", differential, *INPUTS, more={name: name for name in LAMBDAS}),
        _layout("gated queries, norms less 1", gated_queries, *INPUTS),
        _layout("stacked", separate, "qkv"),
        _layout("gated stack", partial(separate, rows=gated_stack), "qkv"),
        _layout("grouped", partial(separate, rows=grouped), "qkv"),
        _layout("codegen", partial(separate, rows=codegen), "qkv"),
        _layout("conv", partial(separate, transposed=True), "qkv"),
        Layout("conv, cross", CONV_CROSS, partial(separate, transposed=True), ignored=IGNORED),
        Layout("xlnet", XLNET, xlnet, ignored={"r_s_bias": None, "seg_embed": None, "layer_norm.*": None}),
        Layout("latent", LATENT, latent, optional=(("query_down.weight", "query_down_norm.weight"), *LATENT_OPTIONS), ignored=IGNORED),
        Layout("latent, indexed", LATENT | INDEXER, latent, optional=LATENT_OPTIONS, ignored=IGNORED),
        Layout("latent, gated, indexed", LATENT | INDEXER | GATED, partial(latent, rotated_last=True), optional=LATENT_OPTIONS),
    )
}
