"""The layouts that a model's config selects: those of `families/`, besides `gpt2` and `t5`.

Each has the matrices' names of all models (`matrix_names.py`), since the config decides which family it is, and a tensor whose name matches
none of them is refused. `separate` has four matrices [out, in], `stacked`, `grouped` and `codegen` one for queries, keys and values. Norms
of queries and keys may have any of the usual names. An output gate has a matrix of its own, or shares that of the queries (`gated queries`)
or of queries, keys and values (`gated stack`). `latent` has DeepSeek's matrices in two steps.
"""

from collections.abc import Callable, Mapping
from functools import partial

from attend.attention.operators.differential import LAMBDAS
from attend.checkpoints.configured_conversions import (
    codegen,
    convolutions,
    cosine,
    differential,
    gated_queries,
    gated_stack,
    latent,
    xlnet,
)
from attend.checkpoints.conversions import KINDS, convert, grouped
from attend.checkpoints.layout import INPUTS, Converted, LayerTensors, Layout
from attend.checkpoints.matrix_names import FOUR_MATRICES, ONE_MATRIX, packed_names

MODULES = {  # what a module is -> its names
    "qkv": [row.split()[0] for row in ONE_MATRIX],
    **{name: [row.split()[i] for row in FOUR_MATRICES.values()] for i, name in enumerate(INPUTS)},
    "output": [row.split()[-1] for row in (*FOUR_MATRICES.values(), *ONE_MATRIX)],
    "query_norm": ["q_norm", "query_layernorm", "q_layernorm", "query_norm"],
    "key_norm": ["k_norm", "key_layernorm", "k_layernorm", "key_norm"],
    "gate": ["gate_proj", "g_proj"],
    "position_key": ["linear_pos", "relative_k_proj", "self.pos_key_proj", "self.pos_proj"],
    "position_query": ["self.pos_query_proj", "self.pos_q_proj"],
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
# norms of blocks, and buffers of old files
IGNORED = {"*LayerNorm.*": None, "*rotary_emb.inv_freq": None, "*relative_position_index": 2, "bias": 4, "masked_bias": 0}


def _by_config(name: str, convert: Callable[[LayerTensors], Converted], *projections: str, more: Mapping[str, str] | None = None) -> Layout:
    """A layout that a config selects, with these matrices, that of the output, and `more`, other names and their roles.

    Biases, norms, gates, tables and sinks may be missing: the config says whether there are any.
    """
    more = more or {}
    modules = (*projections, "output", "query_norm", "key_norm", "gate", "position_key", "position_query")
    names = {f"{spelling}.{kind}": f"{module}.{kind}" for module in modules for spelling in MODULES[module] for kind in KINDS}
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
XLNET = {"q": "query.weight", "k": "key.weight", "v": "value.weight", "o": "output.weight", "r": "position_key.weight"}
XLNET |= {"r_w_bias": "content_bias", "r_r_bias": "position_bias"}
LATENT_OPTIONS = (("query_down.bias",), ("down.bias",), ("output.bias",))

CONFIGURED: tuple[Layout, ...] = (
    _by_config("separate", convert, *INPUTS),
    _by_config("separate, norms less 1", partial(convert, norms_less_one=True), *INPUTS),
    _by_config("convolutions", convolutions, *INPUTS),
    _by_config("cosine", cosine, *INPUTS, more=COSINE),
    _by_config("differential", differential, *INPUTS, more={name: name for name in LAMBDAS}),
    _by_config("gated queries, norms less 1", gated_queries, *INPUTS),
    _by_config("stacked", convert, "qkv"),
    _by_config("gated stack", partial(convert, rows=gated_stack), "qkv"),
    _by_config("grouped", partial(convert, rows=grouped), "qkv"),
    _by_config("codegen", partial(convert, rows=codegen), "qkv"),
    Layout("xlnet", XLNET, xlnet, ignored={"r_s_bias": None, "seg_embed": None, "layer_norm.*": None}),
    Layout("latent", LATENT, latent, optional=(("query_down.weight", "query_down_norm.weight"), *LATENT_OPTIONS), ignored=IGNORED),
    Layout("latent, indexed", LATENT | INDEXER, latent, optional=LATENT_OPTIONS, ignored=IGNORED),
    Layout("latent, gated, indexed", LATENT | INDEXER | GATED, partial(latent, rotated_last=True), optional=LATENT_OPTIONS),
)
