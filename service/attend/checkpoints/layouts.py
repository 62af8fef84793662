"""The table of layouts: how checkpoints of each framework, or of similar models, name and shape the tensors of an attention layer.

A model's config selects the layout of its family (`families/`), of those from `separate` on, or `gpt2` or `t5`. Files without a config have
the layouts of `NAMES`, which an explicit `layout` or the names of the tensors select:

* `d2l`: W_q, W_k, W_v, W_o; [out, in] as `.weight` (torch, MXNet), [in, out] as `/kernel` (Flax) or `/vars/0` (Keras' files). Keras'
  variable paths (`dense/kernel`, `dense_1/kernel`) do not tell the matrices apart and are not read.
* `mxnet`: GluonNLP's cells as `save_parameters` writes them. The output projection is the sibling `proj` of the attention. A decoder has
  `attention_cell_in` (self-attention) and `attention_cell_inter` (to the encoder).
* `llama`: other models use the same names but rotate pairs (Cohere, GLM-4, Llama 4) or part of a head (GLM-4, Nemotron), so the spec must
  have `rope` with `theta` and `interleaved`, and `dims` if not the whole head is rotated.
* `torch_mha`: where kdim or vdim differ there are three matrices; in both cases one bias.
* `fused`, `bloom`, `neox`: the same names stand for rows [q; k; v] and for [heads, (q, k, v), head_dim], so the caller must choose. With
  fewer kv heads, `fused` has fewer rows of k and v; `neox` has those of a kv head after the queries that share it, as in Falcon-40B.
* `keras`, `flax`, `transformerlens`: kernels have an axis for the heads. Keras' files call them `query_dense/vars/0`. TransformerLens'
  grouped keys and values are under `_W_K` and `_W_V`, from which `W_K` and `W_V` are computed.
* `t5`: only the first block of each stack has the table of position biases; it is read for the other blocks too. Encoders are
  bidirectional, decoders are not; the name of the stack, or `relative_bias.bidirectional` of the spec, decides. Cross-attention has no
  table.

Head count, softcap, window, theta and scale are in no tensor: copy them from the model's config into the spec. What a layout assumes for
other fields is in its row.

The names of models' matrices stand once, in `FOUR_MATRICES` and `ONE_MATRIX`. A layout without a config has those of one row; a layout that
a config selects has them all, since the config decides which family it is, and a tensor whose name matches none of them is refused.
`separate` has four matrices [out, in], `stacked`, `grouped` and `codegen` one for queries, keys and values. Norms of queries and keys may
have any of the usual names. An output gate has a matrix of its own, or shares that of the queries (`gated queries`) or of queries, keys and
values (`gated stack`). `latent` has DeepSeek's matrices in two steps.
"""

from collections.abc import Callable, Mapping
from functools import partial

from attend.attention.operators.differential import LAMBDAS
from attend.checkpoints.conversions import (
    CROSS,
    KINDS,
    TABLE,
    codegen,
    convert,
    convert_by_head,
    convolutions,
    cosine,
    differential,
    fused,
    gated_queries,
    gated_stack,
    grouped,
    latent,
    t5,
    t5_table,
    xlnet,
)
from attend.checkpoints.layout import AXES, INPUTS, QKV_BIASES, Converted, Fields, LayerTensors, Layout
from attend.spec_parts import PROJECTIONS

NAMES: dict[str, str] = {  # of layouts that an explicit `layout` may be -> whose they are
    "attend": "this service's own names",
    "torch_mha": "torch.nn.MultiheadAttention, in encoder and decoder layers too; with add_zero_attn the spec says sinks",
    "bert": "BERT, RoBERTa and similar encoders",
    "distilbert": "DistilBERT",
    "vit": "ViT and similar models, with separate matrices or timm's qkv",
    "bart": "BART, OPT, Whisper, CLIP: four matrices, no RoPE",
    "gpt2": "GPT-2: Conv1D matrices",
    "llama": "Llama, Mistral, Qwen2, Qwen3, Gemma 2: norm weights as they are, one for each head; the spec says rope",
    "gemma3": "Gemma 3: as llama, norm weights less 1",
    "meta_llama": "Llama as Meta ships it: wq, wk, wv, wo, RoPE on pairs",
    "t5": "T5: relative bias, scale 1",
    "bloom": "BLOOM: one matrix, rows [heads, 3, head_dim], ALiBi",
    "neox": "GPT-NeoX: one matrix, rows [heads, 3, head_dim], RoPE on halves",
    "fused": "one matrix, rows [q; k; v]",
    "keras": "Keras MultiHeadAttention and GroupQueryAttention",
    "flax": "Flax MultiHeadDotProductAttention",
    "d2l": "Dive into Deep Learning, in any framework",
    "mxnet": "GluonNLP's Transformer cells",
    "numpy": "matrices W_q, W_k, W_v, W_o applied as x @ W",
    "transformerlens": "TransformerLens' HookedTransformer",
    "forgetting": "the Forgetting Transformer, without shifted keys, output gates and norms of the output",
}
ROPE = 'the config\'s rotary embedding, such as {"theta": 10000}, or null for none'
LLAMA_ROPE = (
    "the rotary embedding, since models with others share Llama's names: "
    '{"theta": 10000, "interleaved": false} as Llama, Mistral and Qwen have it, "interleaved": true for pairs (Cohere, GLM-4), '
    'with "dims" where only part of a head is rotated (GLM-4, Nemotron); null for none'
)


def _names(paths: str, weight: str = "{}.weight", bias: str = "{}.bias") -> dict[str, str]:
    """Names of four separate projections -> canonical names; without biases if `bias` is ""."""
    named = dict(zip(PROJECTIONS, paths.split(), strict=True))
    names = {weight.format(path): f"{name}.weight" for name, path in named.items()}
    return names | ({bias.format(path): f"{name}.bias" for name, path in named.items()} if bias else {})


def packed_names(**projections: str) -> dict[str, str]:
    """Names of matrices and their biases -> roles, for `packed_names(qkv="c_attn", output="c_proj")`."""
    return {f"{name}.{kind}": f"{projection}.{kind}" for projection, name in projections.items() for kind in ("weight", "bias")}


FOUR_MATRICES = {  # layout or model -> names of the matrices of queries, keys, values and of the output
    "llama": "q_proj k_proj v_proj o_proj",
    "bart": "q_proj k_proj v_proj out_proj",
    "bert": "self.query self.key self.value output.dense",
    "vit": "attention.query attention.key attention.value output.dense",
    "distilbert": "q_lin k_lin v_lin out_lin",
    "t5": "q k v o",
    "albert": "query key value dense",
    "ctrl": "Wq Wk Wv dense",
    "deberta-v2": "self.query_proj self.key_proj self.value_proj output.dense",
    "internvl_vision": "q_proj k_proj v_proj projection_layer",
    "modernbert-decoder": "q_proj k_proj v_proj Wo",
    "moshi": "q_proj.linear k_proj.linear v_proj.linear o_proj.linear",
    "mpnet": "attn.q attn.k attn.v attn.o",
    "prophetnet": "query_proj key_proj value_proj out_proj",
    "qwen2_5_omni": "q k v proj",
    "squeezebert": "attention.query attention.key attention.value post_attention.conv1d",
    "wav2vec2-bert": "linear_q linear_k linear_v linear_out",
    "with a prefix": "self.q_proj self.k_proj self.v_proj projection",
}
FUSED = "qkv proj", "query_key_value dense", "qkv_proj o_proj", "Wqkv out_proj", "in_proj out_proj", "c_attn c_proj"
ONE_MATRIX = (  # names of the matrix of queries, keys and values, and of that of the output
    *FUSED,
    "Wqkv Wo",  # ModernBERT
    "self.Wqkv wo",
    "att_proj attn_out",  # Molmo 2
    "attention.qkv output.dense",  # TimeSformer
    "self.in_proj output.dense",  # DeBERTa
    "gqkv_proj o_proj",  # HRM-Text
)

ALL_BIASES = (*QKV_BIASES, "output.bias")
OPTIONAL_BIASES = (QKV_BIASES, ("output.bias",))
OPTIONAL_PACKED_BIASES = ("qkv.bias",), ("output.bias",)
ROPE_ON_HALVES: Fields = {"rope": {"interleaved": False}}
RMS_NORMS: Fields = {"qk_norm": {"kind": "rms", "eps": 1e-6}}
INV_FREQ = {"rotary_emb.inv_freq": "inv_freq"}  # a buffer of old checkpoints: [dims / 2]

QK_NORM = ("query_norm.weight", "key_norm.weight")
ATTEND_OPTIONAL = (QK_NORM, *((role,) for role in AXES if role not in (*QK_NORM, *(f"{name}.weight" for name in PROJECTIONS))))

LLAMA_NAMES = _names(FOUR_MATRICES["llama"])
NORMS = {"q_norm.weight": "query_norm.weight", "k_norm.weight": "key_norm.weight"}
LLAMA = partial(
    Layout,
    "llama",
    convert=convert,
    optional=(*OPTIONAL_BIASES, ("sinks",), ("inv_freq",)),
    assumed=ROPE_ON_HALVES | RMS_NORMS,
    required_fields=dict.fromkeys(("rope", "rope.theta", "rope.interleaved"), LLAMA_ROPE),
    identified_under=("self_attn",),
)
T5_NAMES = _names(FOUR_MATRICES["t5"], bias="")
T5 = partial(Layout, "t5", convert=t5, assumed={"scale": 1.0}, shared_table=t5_table)

KV_BIAS = "no bias_k and bias_v (add_bias_kv): attention weights have no column for such keys"
TORCH = partial(
    Layout,
    "torch_mha",
    convert=partial(convert, square=True),
    optional=(("qkv.bias", "output.bias"),),
    refused={"bias_k": KV_BIAS, "bias_v": KV_BIAS},
)
TORCH_OUT = {"out_proj.weight": "output.weight", "out_proj.bias": "output.bias", "in_proj_bias": "qkv.bias"}
TORCH_SEPARATE = {f"{name[0]}_proj_weight": f"{name}.weight" for name in PROJECTIONS[:3]}

MASK_BUFFERS = {"bias": 4, "masked_bias": 0}  # buffers of old GPT-2 and NeoX checkpoints: the causal mask and its fill value
GPT2 = partial(Layout, "gpt2", convert=partial(convert, transposed=True, square=True), ignored=MASK_BUFFERS)
PACKED_BY_HEAD = partial(Layout, roles=packed_names(qkv="query_key_value", output="dense"), convert=partial(convert, rows=grouped))
HEAD_COUNT = {"num_heads": "the number of heads, which splits the rows"}

KERNELS = partial(convert, transposed=True)
SEED_STATE = {"*seed_generator*": None}  # the state of a layer with dropout
GLUON = (("attention_cell", "proj"), ("attention_cell_in", "proj_in"), ("attention_cell_inter", "proj_inter"))
LENS_NAMES = _names("Q K V O", "W_{}", "b_{}") | {"rotary_sin": "rotary"}
LENS_GROUPED = {f"_{name}" if name[-1] in "KV" else name: role for name, role in LENS_NAMES.items()}
LENS = partial(
    Layout,
    "transformerlens",
    convert=partial(convert_by_head, axes=("heads", "in", "dim")),
    optional=(*OPTIONAL_BIASES, ("rotary",)),
    ignored={"mask": 2, "IGNORE": 0, "rotary_cos": 2},
)

MODULES = {  # of layouts that a config selects: what a module is -> its names
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

LAYOUTS: tuple[Layout, ...] = (
    Layout("attend", {role: role for role in AXES}, convert, optional=ATTEND_OPTIONAL),
    Layout("d2l", _names("q k v o", "W_{}.weight", "W_{}.bias"), convert, optional=(ALL_BIASES,)),
    Layout("d2l", _names("q k v o", "W_{}.kernel", "W_{}.bias"), KERNELS, optional=(ALL_BIASES,)),
    Layout("d2l", _names("q k v o", "W_{}.vars.0", "W_{}.vars.1"), KERNELS, optional=(ALL_BIASES,), ignored=SEED_STATE),
    *(
        Layout(
            "mxnet", _names(f"{cell}.proj_query {cell}.proj_key {cell}.proj_value {proj}"), convert, optional=OPTIONAL_BIASES, parent=cell
        )
        for cell, proj in GLUON
    ),
    *(
        Layout("numpy", _names("q k v o", *spelled), KERNELS, optional=OPTIONAL_BIASES)
        for spelled in (("W_{}", "b_{}"), ("W{}", "b{}"), ("w_{}", "b_{}"))
    ),
    Layout("bert", _names(FOUR_MATRICES["bert"]), convert, ignored={"output.LayerNorm.*": None}),
    Layout("distilbert", _names(FOUR_MATRICES["distilbert"]), convert),
    Layout("vit", _names(FOUR_MATRICES["vit"]), convert, optional=(QKV_BIASES,)),
    Layout("vit", LLAMA_NAMES, convert, optional=(QKV_BIASES,), identified_under=("attention",)),
    Layout(
        "bart",
        _names(FOUR_MATRICES["bart"]),
        convert,
        optional=(("query.bias", "value.bias", "output.bias"), ("key.bias",)),
        identified_under=("self_attn", "encoder_attn"),
    ),
    LLAMA(LLAMA_NAMES | {"sinks": "sinks"} | INV_FREQ),
    LLAMA(LLAMA_NAMES | {"sinks": "sinks"} | INV_FREQ | NORMS, excluded_by="pre_feedforward_layernorm.weight"),  # Gemma 3
    Layout(
        "gemma3",
        LLAMA_NAMES | NORMS,
        partial(convert, norms_less_one=True),
        optional=(ALL_BIASES,),
        assumed=ROPE_ON_HALVES | RMS_NORMS,
        required_fields={"rope": ROPE},
        identified_under=(),
    ),
    Layout(
        "meta_llama",
        _names("wq wk wv wo", bias="") | INV_FREQ,
        convert,
        optional=(("inv_freq",),),
        assumed={"rope": {"interleaved": True}},
        required_fields={"rope": ROPE},
    ),
    T5(T5_NAMES | {TABLE: "relative_bias"}, optional=(("relative_bias",),), identified_under=("SelfAttention",)),
    T5(T5_NAMES, ignored={TABLE: 2}, identified_under=(CROSS,)),  # a table of old decoders, without effect
    TORCH({"in_proj_weight": "qkv.weight"} | TORCH_OUT),
    TORCH(TORCH_SEPARATE | TORCH_OUT),
    GPT2(packed_names(qkv="c_attn", output="c_proj")),
    GPT2(packed_names(query="q_attn", kv="c_attn", output="c_proj")),
    Layout("vit", packed_names(qkv="qkv", output="proj"), convert, optional=OPTIONAL_PACKED_BIASES),
    Layout(  # CaiT
        "vit",
        packed_names(qkv="qkv", output="proj", score_mixing="proj_l", weight_mixing="proj_w"),
        convert,
        optional=OPTIONAL_PACKED_BIASES,
    ),
    PACKED_BY_HEAD("bloom", assumed={"alibi": True}, required_fields=HEAD_COUNT, identified_under=()),
    PACKED_BY_HEAD(
        "neox",
        roles=packed_names(qkv="query_key_value", output="dense") | INV_FREQ,
        optional=(("qkv.bias", "output.bias"), ("inv_freq",)),
        ignored=MASK_BUFFERS,
        assumed=ROPE_ON_HALVES,
        required_fields={"rope": ROPE, "rope.dims": "how many dims are rotated, rotary_pct x head_dim", **HEAD_COUNT},
        identified_under=(),
    ),
    *(
        Layout(
            "fused",
            packed_names(qkv=spelled.split()[0], output=spelled.split()[1]) | INV_FREQ,
            fused,
            optional=(*OPTIONAL_PACKED_BIASES, ("inv_freq",)),
            ignored=MASK_BUFFERS,
            identified_under=(),
        )
        for spelled in FUSED
    ),
    *(
        Layout("keras", names, convert_by_head, optional=(ALL_BIASES,), ignored=SEED_STATE)
        for names in (
            _names("query key value attention_output", "{}.kernel"),
            _names("query key value output", "{}_dense.vars.0", "{}_dense.vars.1"),
        )
    ),
    Layout(
        "flax",
        _names("query key value out", "{}.kernel") | {"query_ln.scale": "query_norm.weight", "key_ln.scale": "key_norm.weight"},
        convert_by_head,
        optional=(ALL_BIASES, QK_NORM),
        assumed={"qk_norm": {"kind": "layer", "eps": 1e-6}},  # norms of normalize_qk
    ),
    *(
        Layout("forgetting", LLAMA_NAMES | packed_names(forget_gate=gate), convert, optional=OPTIONAL_BIASES)
        for gate in ("fgate_proj", "f_proj")  # the authors', flash-linear-attention's
    ),
    LENS(LENS_NAMES),
    LENS(LENS_GROUPED),
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
