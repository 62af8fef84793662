"""Layouts for models with a config, which names the family, its layers and their sizes.

So a layout here has the names of many families at once: a name that means something else elsewhere is no danger, and a tensor that is left
over is refused. `separate` has four matrices [out, in], `stacked`, `grouped` and `codegen` one for queries, keys and values, and `conv` is
GPT-2's Conv1D [in, out]. Norms of queries and keys may have any of the usual names. An output gate has a matrix of its own, or shares that
of the queries (`gated queries`) or of queries, keys and values (`gated stack`). `latent` has DeepSeek's matrices in two steps.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from service.checkpoints.layout import ALL_BIASES, Converted, Fields, LayerTensors, Layout, Weights
from service.errors import InvalidRequest
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
DISTANCES = {  # vectors for distances, and of Transformer-XL's biases
    **dict.fromkeys(("pos_bias_u", "bias_u"), "content_bias"),
    **dict.fromkeys(("pos_bias_v", "bias_v"), "position_bias"),
    "distance_embedding.weight": "distances",
}
GRIDS = {  # tables of relative positions in a grid: Swin and BEiT, SAM
    "self.relative_position_bias_table": "grid_bias",
    "relative_position_bias.relative_position_bias_table": "grid_bias",
    "attention.relative_position_bias.relative_position_bias_table": "grid_bias",
    "rel_pos_h": "grid_rows",
    "rel_pos_w": "grid_columns",
}
KINDS, SINKS = ("weight", "bias"), ("sinks", "softmax_offset", "attention_sink_bias")
IGNORED = {
    "*LayerNorm.*": None,
    "*rotary_emb.inv_freq": None,
    "*relative_position_index": 2,
    "bias": 4,
    "masked_bias": 0,
}  # norms of blocks, buffers of old files
Take = Callable[[LayerTensors, Array], tuple[Array, ...]]


def _names(*parts: str) -> dict[str, str]:
    """Name below the stem -> part, for each spelling of these parts."""
    names = {f"{spelling}.{kind}": f"{part}.{kind}" for part in parts for spelling in SPELLINGS[part].split() for kind in KINDS}
    packed = {f"in_proj_{kind}": f"qkv.{kind}" for kind in KINDS} if "qkv" in parts else {}
    packed |= {"attention.q_bias": "query.bias", "attention.v_bias": "value.bias"} if "query" in parts else {}  # VideoMAE
    packed |= {"self.q_bias": "query.bias", "self.v_bias": "value.bias"} if "qkv" in parts else {}  # DeBERTa
    return names | packed | dict.fromkeys(SINKS, "sinks") | {"gate_bias": "gate.bias"} | GRIDS | DISTANCES


def _norms(tensors: LayerTensors, one_plus: bool = False) -> Weights:
    """Weights and biases of norms: [head_dim], or [heads, head_dim] where each head has its own. `one_plus`: weights are stored less 1."""
    own, found = (tensors.given.get("qk_norm") or {}).get("weights") == "own", Weights()
    for part in (f"{name}_norm.{kind}" for kind in ("weight", "bias") for name in ("query", "key")):
        if tensors.has(part):
            array = tensors.arrays[part]
            if own and array.size % tensors.given["head_dim"]:
                raise tensors.misfit(part, f"a multiple of head_dim {tensors.given['head_dim']} numbers")
            array = array.reshape(-1, tensors.given["head_dim"]) if own else tensors.get(part, "n")
            found[part] = array.astype(np.float32) + np.float32(1) if one_plus else array
    return found


def _extras(tensors: LayerTensors) -> Weights:
    found = {part: tensors.get(part, "n") for part in (*ALL_BIASES, "gate.bias", "sinks") if tensors.has(part)}
    found |= {"gate.weight": tensors.get("gate.weight", "out", "in")} if tensors.has("gate.weight") else {}
    if "gate.bias" in found and "gate.weight" in found and len(found["gate.bias"]) == tensors.given["num_heads"]:
        found["gate.bias"] = np.repeat(found["gate.bias"], len(found["gate.weight"]) // tensors.given["num_heads"])  # one for each head
    found |= {part: tensors.get(part, "places", "n") for part in GRIDS.values() if tensors.has(part)}
    has_biases = tensors.has("relative_bias") and not tensors.given.get("relative_scores")  # rather than vectors
    return found | ({"relative_bias": tensors.get("relative_bias", "buckets", "heads")} if has_biases else {})


def _relative_scores(tensors: LayerTensors, weights: Weights) -> Weights:
    """The weights of `relative_scores`. Those of disentangled attention are products of projections and embedded distances, 2n of them.

    DeBERTa's embeddings are a table that its layers share; projections of its own, or those of queries and keys, are applied to it.
    Wav2Vec2-BERT's are vectors for all heads and distances from `left` ahead of a key to `right` behind it.
    """
    given, heads = tensors.given.get("relative_scores"), tensors.given["num_heads"]
    found = {part: tensors.get(part, "heads", "n") for part in ("content_bias", "position_bias") if tensors.has(part)}
    own = [name for name in ("key", "query") if tensors.has(f"position_{name}.weight")]
    found |= {f"position_{name}.weight": tensors.get(f"position_{name}.weight", "out", "in") for name in own}
    if not given or given["kind"] == "transformer_xl":
        return found
    n = given.get("buckets") or given["max_distance"]
    if tensors.has("distances"):
        vectors = tensors.get("distances", "distances", "n")
        rows = np.clip(n - np.arange(2 * n), 1 - n, len(vectors) - n) + n - 1
        return {"position_key.weight": np.tile(vectors[rows].T, (heads, 1))}
    table = tensors.get("relative_bias", "distances", "in")
    for name in ("key", "query") if given.get("position_to_content") else ("key",):
        source = f"position_{name}" if name in own else name
        matrix, bias = {**weights, **found}[f"{source}.weight"], tensors.arrays.get(f"{source}.bias", np.zeros(1, np.float32))
        if table.shape != (2 * n, matrix.shape[1]):
            raise tensors.misfit("relative_bias", f"shape [{2 * n}, {matrix.shape[1]}], as the config has it")
        found[f"position_{name}.weight"] = matrix @ table.T + bias[:, None]
    return found


def _converted(tensors: LayerTensors, weights: Weights, one_plus: bool = False) -> Converted:
    extras = _extras(tensors) | _relative_scores(tensors, weights)
    known: Fields = {"num_heads": tensors.given["num_heads"]}
    known |= {"relative_bias": {"buckets": len(extras["relative_bias"])}} if "relative_bias" in extras else {}
    return Converted(weights | extras | _norms(tensors, one_plus), known)


def separate(tensors: LayerTensors, one_plus: bool = False) -> Converted:
    return _converted(tensors, {f"{name}.weight": tensors.get(f"{name}.weight", "out", "in") for name in PROJECTIONS}, one_plus)


def one_plus(tensors: LayerTensors) -> Converted:
    """As `separate`, for norm weights stored less 1: adds 1 in float32, as Gemma does."""
    return separate(tensors, one_plus=True)


def cosine(tensors: LayerTensors) -> Converted:
    """Swin v2 (Liu et al. 2022, arXiv 2111.09883, section 3.3): a cosine is the product of normed vectors, and 16 σ(a network of the
    distances on a logarithmic scale) is a table.
    """
    converted, grid, head_dim = separate(tensors), tensors.given["grid_bias"], tensors.given["head_dim"]
    scales = np.exp(np.minimum(tensors.get("logit_scale", "heads", "1", "1"), math.log(100))).reshape(-1, 1)
    norms = {"query": scales * head_dim**-0.5, "key": np.full_like(scales, head_dim**-0.5)}
    sides = [np.arange(1 - n, n) * 8 / max(n - 1, 1) for n in (grid["height"], grid["width"])]
    places = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)
    places = np.sign(places) * np.log2(np.abs(places) + 1) / 3
    hidden = np.maximum(places @ tensors.get("network.weight", "out", "in").T + tensors.get("network.bias", "n"), 0)
    table = 16 / (1 + np.exp(-hidden @ tensors.get("network_out.weight", "heads", "in").T))
    made = {f"{name}_norm.weight": np.repeat(norm, head_dim, axis=1) for name, norm in norms.items()} | {"grid_bias": table}
    return replace(converted, weights=converted.weights | {name: x.astype(np.float32) for name, x in made.items()})


def differential(tensors: LayerTensors) -> Converted:
    """As `separate`, for rows [halves, heads, width] of queries, keys and values; the halves go into each head (DiffLlama)."""
    converted = separate(tensors)
    width = tensors.given["head_dim"] // 2
    for name in PROJECTIONS[:3]:
        for part in (f"{name}.weight", f"{name}.bias"):
            if (rows := converted.weights.get(part)) is not None:
                if len(rows) % (2 * width):
                    raise tensors.misfit(part, f"a multiple of {2 * width} rows, two halves of heads of {width} numbers")
                converted.weights[part] = np.moveaxis(rows.reshape(2, -1, width, *rows.shape[1:]), 0, 1).reshape(rows.shape)
    converted.weights.update({name: tensors.get(name, "n") for name in LAMBDAS})
    return converted


def gated_queries(tensors: LayerTensors) -> Converted:
    """As `one_plus`, with the gate's rows among the queries': [heads, (q, gate), head_dim] (Qwen3-Next)."""
    converted, heads = one_plus(tensors), tensors.given["num_heads"]
    for kind in ("weight", "bias"):
        if (rows := converted.weights.get(f"query.{kind}")) is not None:
            if len(rows) % (2 * heads):
                raise tensors.misfit(f"query.{kind}", f"a multiple of {2 * heads} rows, a query and a gate for each of {heads} heads")
            cut = rows.reshape(heads, 2, -1, *rows.shape[1:])
            for i, name in enumerate(("query", "gate")):
                converted.weights[f"{name}.{kind}"] = cut[:, i].reshape(-1, *rows.shape[1:])
    return converted


def packed(take: Take, transposed: bool = False, gated: bool = False) -> Callable[[LayerTensors], Converted]:
    """Queries, keys, values and, if `gated`, gates from the rows of one matrix and of its bias; `transposed`: matrices are [in, out]."""
    names = ("query", "key", "value", "gate")

    def convert(tensors: LayerTensors) -> Converted:
        axes = ("in", "out") if transposed else ("out", "in")
        matrices = {part: tensors.get(f"{part}.weight", *axes) for part in ("qkv", "output")}
        if transposed:
            matrices = {part: matrix.T for part, matrix in matrices.items()}
        weights: Weights = {"output.weight": matrices["output"]}
        arrays = {"weight": matrices["qkv"]} | ({"bias": tensors.get("qkv.bias", "n")} if tensors.has("qkv.bias") else {})
        for kind, array in arrays.items():
            heads, kv_heads, head_dim = _sizes(tensors)
            if len(array) != (rows := (heads + 2 * kv_heads + heads * gated) * head_dim) or heads % kv_heads:
                raise tensors.misfit(f"qkv.{kind}", f"{rows} rows of {', '.join(names[: 3 + gated])}, as the config has them")
            weights |= {f"{name}.{kind}": rows for name, rows in zip(names, take(tensors, array), strict=False)}
        return _converted(tensors, weights)

    return convert


def _sizes(tensors: LayerTensors) -> tuple[int, int, int]:
    """Heads, kv heads and head_dim, as the config has them. Raises InvalidRequest."""
    heads, head_dim = tensors.number("num_heads"), tensors.number("head_dim")
    if heads is None or head_dim is None:
        raise InvalidRequest.where("/config", "the number and width of heads", "nothing")
    return heads, tensors.number("num_kv_heads") or heads, head_dim


def stacked_rows(tensors: LayerTensors, array: Array) -> tuple[Array, ...]:
    """Rows [q; k; v]."""
    heads, kv_heads, head_dim = _sizes(tensors)
    return tuple(np.split(array, [heads * head_dim, (heads + kv_heads) * head_dim]))


def gated_stack_rows(tensors: LayerTensors, array: Array) -> tuple[Array, ...]:
    """Rows [gate; q; k; v] (HRM-Text)."""
    heads, _, head_dim = _sizes(tensors)
    return *stacked_rows(tensors, array[heads * head_dim :]), array[: heads * head_dim]


LATENT_NAMES = {
    "q_proj.weight": "query.weight",
    "q_b_proj.weight": "query.weight",
    "q_a_proj.weight": "query_down.weight",
    "q_a_proj.bias": "query_down.bias",
    "q_a_layernorm.weight": "query_down_norm.weight",
    "kv_a_proj_with_mqa.weight": "kv.weight",
    "kv_a_proj_with_mqa.bias": "kv.bias",
    "kv_a_layernorm.weight": "key_value_down_norm.weight",
    "kv_b_proj.weight": "kv_up.weight",
    "o_proj.weight": "output.weight",
    "o_proj.bias": "output.bias",
}


NETWORK = "self.continuous_position_bias_mlp"
COSINE = {"self.logit_scale": "logit_scale", f"{NETWORK}.2.weight": "network_out.weight"}
COSINE |= {f"{NETWORK}.0.{kind}": f"network.{kind}" for kind in KINDS}


def latent(tensors: LayerTensors) -> Converted:
    """DeepSeek's multi-head latent attention: the shared part of the keys goes from the end of each head to its beginning.

    Queries have rows [heads, (own, shared), in], keys and values [rank + shared, in] in the first step, and [heads, (key, value), rank] in
    the second.
    """
    heads, _, head_dim = _sizes(tensors)
    rank, shared = (tensors.given["latent"][name] for name in ("key_value_rank", "rope_key_dim"))
    own, value_dim = head_dim - shared, tensors.given["value_head_dim"]
    matrices = {part: tensors.get(f"{part}.weight", "out", "in") for part in ("query", "kv", "kv_up", "output")}
    for part, rows in (("query", heads * head_dim), ("kv", rank + shared), ("kv_up", heads * (own + value_dim))):
        if len(matrices[part]) != rows:
            raise tensors.misfit(f"{part}.weight", f"{rows} rows, as the config has them")
    query = np.roll(matrices["query"].reshape(heads, head_dim, -1), shared, axis=1)
    up = matrices["kv_up"].reshape(heads, own + value_dim, -1)
    weights: Weights = {"output.weight": matrices["output"], "query.weight": query.reshape(heads * head_dim, -1)}
    weights |= {f"{name}.weight": rows.reshape(-1, up.shape[2]) for name, rows in (("key", up[:, :own]), ("value", up[:, own:]))}
    weights |= {part: tensors.arrays[part] for part in ("query_down.weight", "query_down.bias") if tensors.has(part)}
    weights |= {
        f"{part}_norm.weight": tensors.get(f"{part}_norm.weight", "n")
        for part in ("query_down", "key_value_down")
        if tensors.has(f"{part}_norm.weight")
    }
    for kind in ("weight", "bias"):
        if tensors.has(f"kv.{kind}"):
            weights[f"key_value_down.{kind}"], weights[f"rope_key.{kind}"] = np.split(tensors.arrays[f"kv.{kind}"], [rank])
    return _converted(tensors, weights)


def xlnet(tensors: LayerTensors) -> Converted:
    """XLNet's matrices are [in, heads, head_dim], and that of the output [out, heads, head_dim]."""
    matrices = {part: tensors.get(f"{part}.weight", "in", "heads", "n") for part in (*PROJECTIONS, "position_key")}
    weights = {f"{part}.weight": matrix.reshape(len(matrix), -1).T for part, matrix in matrices.items()}
    biases = {part: tensors.get(part, "heads", "n") for part in ("content_bias", "position_bias")}
    return Converted(weights | {"output.weight": weights["output.weight"].T} | biases, {"num_heads": tensors.given["num_heads"]})


CONV_CROSS = {
    f"{name}.{kind}": f"{part}.{kind}" for name, part in (("q_attn", "query"), ("c_attn", "kv"), ("c_proj", "output")) for kind in KINDS
}


def conv_cross(tensors: LayerTensors) -> Converted:
    """GPT-2's cross-attention: matrices [in, out], one for queries and one for keys and values."""
    weights = {f"{part}.weight": tensors.get(f"{part}.weight", "in", "out").T for part in ("query", "output")}
    for kind, rows in (("weight", tensors.get("kv.weight", "in", "out").T), ("bias", tensors.get("kv.bias", "n"))):
        if len(rows) % 2:
            raise tensors.misfit(f"kv.{kind}", "an even number of keys and values")
        weights |= {f"{name}.{kind}": half for name, half in zip(("key", "value"), np.split(rows, 2), strict=True)}
    return _converted(tensors, weights)


INDEXER_NAMES = {
    "indexer.wq_b.weight": "index_query.weight",
    "indexer.wk.weight": "index_key.weight",
    "indexer.k_norm.weight": "index_key_norm.weight",
    "indexer.k_norm.bias": "index_key_norm.bias",
    "indexer.weights_proj.weight": "index_head_weights.weight",
}


def latent_indexed(tensors: LayerTensors) -> Converted:
    """As `latent`, with an indexer."""
    converted = latent(tensors)
    converted.weights.update({part: tensors.arrays[part] for part in INDEXER_NAMES.values()})
    return converted


def grouped_rows(tensors: LayerTensors, array: Array) -> tuple[Array, ...]:
    """Rows [kv heads, queries of each + 2, head_dim] (Falcon-40B); with kv heads = heads, [heads, (q, k, v), head_dim] (GPT-NeoX)."""
    heads, kv_heads, head_dim = _sizes(tensors)
    cut = array.reshape(kv_heads, heads // kv_heads + 2, head_dim, *array.shape[1:])
    return tuple(part.reshape(-1, *array.shape[1:]) for part in (cut[:, :-2], cut[:, -2], cut[:, -1]))


def codegen_rows(tensors: LayerTensors, array: Array) -> tuple[Array, ...]:
    """Rows in four blocks, one for each TPU core of its training, of [q; v; k] each."""
    if len(array) % 12:
        raise tensors.misfit("qkv.weight", "a multiple of 12 rows, four blocks of queries, values and keys")
    query, value, key = (part.reshape(-1, *array.shape[1:]) for part in np.split(array.reshape(4, -1, *array.shape[1:]), 3, axis=1))
    return query, key, value


def _layout(name: str, convert: Callable[[LayerTensors], Converted], *parts: str, more: dict[str, str] | None = None) -> Layout:
    """Biases, norms, gates, tables and sinks may be missing: the config says whether there are any. `more`: other names and parts."""
    names = _names(*parts, "output", "query_norm", "key_norm", "gate", "position_key", "position_query") | (more or {})
    needed = {f"{part}.weight" for part in (*parts, "output")} | set((more or {}).values())
    return Layout(name, names, convert, optional=tuple((part,) for part in {*names.values()} - needed), ignored=IGNORED)


MODEL_LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _layout("separate", separate, "query", "key", "value"),
        _layout("separate, norms less 1", one_plus, "query", "key", "value"),
        _layout("cosine", cosine, "query", "key", "value", more=COSINE),
        _layout("differential", differential, "query", "key", "value", more={name: name for name in LAMBDAS}),
        _layout("gated queries, norms less 1", gated_queries, "query", "key", "value"),
        _layout("stacked", packed(stacked_rows), "qkv"),
        _layout("gated stack", packed(gated_stack_rows, gated=True), "qkv"),
        _layout("grouped", packed(grouped_rows), "qkv"),
        _layout("codegen", packed(codegen_rows), "qkv"),
        Layout("conv, cross", CONV_CROSS, conv_cross, ignored=IGNORED),
        _layout("conv", packed(stacked_rows, transposed=True), "qkv"),
        Layout(
            "xlnet",
            dict(zip("qkvor", (f"{part}.weight" for part in (*PROJECTIONS, "position_key")), strict=True))
            | {"r_w_bias": "content_bias", "r_r_bias": "position_bias"},
            xlnet,
            ignored={"r_s_bias": None, "seg_embed": None, "layer_norm.*": None},
        ),
        Layout(
            "latent",
            LATENT_NAMES,
            latent,
            optional=(("query_down.weight", "query_down_norm.weight"), ("query_down.bias",), ("kv.bias",), ("output.bias",)),
            ignored=IGNORED,
        ),
        Layout(
            "latent, indexed",
            LATENT_NAMES | INDEXER_NAMES,
            latent_indexed,
            optional=(("query_down.bias",), ("kv.bias",), ("output.bias",)),
            ignored=IGNORED,
        ),
    )
}
