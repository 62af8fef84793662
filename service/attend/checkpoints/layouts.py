"""The table of layouts: how checkpoints of each framework, or of similar models, name and shape the tensors of an attention layer.

A model's config selects the layout of its family (`families/`), one of `configured_layouts.py`, or `gpt2` or `t5`. Files without a config
have the layouts of `NAMES`, which an explicit `layout` or the names of the tensors select:

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
"""

from functools import partial

from attend.checkpoints.configured_layouts import CONFIGURED
from attend.checkpoints.conversions import CROSS, TABLE, convert, convert_by_head, fused, grouped, t5, t5_table
from attend.checkpoints.layout import AXES, QKV_BIASES, Fields, Layout
from attend.checkpoints.matrix_names import FOUR_MATRICES, FUSED, four_names, packed_names
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

ALL_BIASES = (*QKV_BIASES, "output.bias")
OPTIONAL_BIASES = (QKV_BIASES, ("output.bias",))
OPTIONAL_PACKED_BIASES = ("qkv.bias",), ("output.bias",)
ROPE_ON_HALVES: Fields = {"rope": {"interleaved": False}}
RMS_NORMS: Fields = {"qk_norm": {"kind": "rms", "eps": 1e-6}}
INV_FREQ = {"rotary_emb.inv_freq": "inv_freq"}  # a buffer of old checkpoints: [dims / 2]

QK_NORM = ("query_norm.weight", "key_norm.weight")
ATTEND_OPTIONAL = (QK_NORM, *((role,) for role in AXES if role not in (*QK_NORM, *(f"{name}.weight" for name in PROJECTIONS))))

LLAMA_NAMES = four_names(FOUR_MATRICES["llama"])
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
T5_NAMES = four_names(FOUR_MATRICES["t5"], bias="")
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
LENS_NAMES = four_names("Q K V O", "W_{}", "b_{}") | {"rotary_sin": "rotary"}
LENS_GROUPED = {f"_{name}" if name[-1] in "KV" else name: role for name, role in LENS_NAMES.items()}
LENS = partial(
    Layout,
    "transformerlens",
    convert=partial(convert_by_head, axes=("heads", "in", "dim")),
    optional=(*OPTIONAL_BIASES, ("rotary",)),
    ignored={"mask": 2, "IGNORE": 0, "rotary_cos": 2},
)

OWN = Layout("attend", {role: role for role in AXES}, convert, optional=ATTEND_OPTIONAL)
LAYOUTS: tuple[Layout, ...] = (
    OWN,
    Layout("d2l", four_names("q k v o", "W_{}.weight", "W_{}.bias"), convert, optional=(ALL_BIASES,)),
    Layout("d2l", four_names("q k v o", "W_{}.kernel", "W_{}.bias"), KERNELS, optional=(ALL_BIASES,)),
    Layout("d2l", four_names("q k v o", "W_{}.vars.0", "W_{}.vars.1"), KERNELS, optional=(ALL_BIASES,), ignored=SEED_STATE),
    *(
        Layout(
            "mxnet",
            four_names(f"{cell}.proj_query {cell}.proj_key {cell}.proj_value {proj}"),
            convert,
            optional=OPTIONAL_BIASES,
            parent=cell,
        )
        for cell, proj in GLUON
    ),
    *(
        Layout("numpy", four_names("q k v o", *spelled), KERNELS, optional=OPTIONAL_BIASES)
        for spelled in (("W_{}", "b_{}"), ("W{}", "b{}"), ("w_{}", "b_{}"))
    ),
    Layout("bert", four_names(FOUR_MATRICES["bert"]), convert, ignored={"output.LayerNorm.*": None}),
    Layout("distilbert", four_names(FOUR_MATRICES["distilbert"]), convert),
    Layout("vit", four_names(FOUR_MATRICES["vit"]), convert, optional=(QKV_BIASES,)),
    Layout("vit", LLAMA_NAMES, convert, optional=(QKV_BIASES,), identified_under=("attention",)),
    Layout(
        "bart",
        four_names(FOUR_MATRICES["bart"]),
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
        four_names("wq wk wv wo", bias="") | INV_FREQ,
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
            four_names("query key value attention_output", "{}.kernel"),
            four_names("query key value output", "{}_dense.vars.0", "{}_dense.vars.1"),
        )
    ),
    Layout(
        "flax",
        four_names("query key value out", "{}.kernel") | {"query_ln.scale": "query_norm.weight", "key_ln.scale": "key_norm.weight"},
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
    *CONFIGURED,
)
