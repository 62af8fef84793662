"""The table of model families: `model_type` -> where its attention layers are, and how its config's fields become a LayerSpec.

A row says only what differs from Llama, for most families one or two words. `tests/golden/generate_models.py` compares every row with
transformers' own eager attention; `docs/checkpoints.md` lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.checkpoints.config import Config
from service.checkpoints.layout import Fields
from service.checkpoints.rope import Rotary, rope_fields
from service.checkpoints.traits import (
    FULL,
    LINEAR,
    SLIDING,
    WIDEST_HEAD,
    WINDOWED,
    WITHOUT,
    LayerType,
    Trait,
    alternating,
    biased,
    biased_apart,
    bigcode,
    capped,
    capped_or_null,
    constant,
    every_nth_full,
    falcon,
    from_layer,
    gated,
    gemma4_heads,
    gemma_values,
    gpt2_scale,
    gpt_neo,
    laguna,
    layer_thetas,
    modernbert_decoder_window,
    modernbert_window,
    mpt,
    no_rope_layers,
    normed,
    only,
    original_full,
    qwen_type,
    rope_if_rotary,
    rope_if_sliding,
    rope_only_if_sliding,
    scale,
    sliding,
    t5_bias,
    window,
    window_around,
    window_everywhere,
    window_if_used,
)


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of attention layer of a family: names of the config's fields, and traits that its code has regardless of the config."""

    path: str = "layers.{n}.self_attn"  # the end of the layer's name in the checkpoint
    layout: str = "separate"
    heads: tuple[str, ...] = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    width: tuple[str, ...] = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
    head_dim: tuple[str, ...] = ("head_dim",)
    layers: tuple[str, ...] = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    rotary: Rotary | None = None
    causal: bool = True
    bias: Trait | None = None  # None: inferred from the tensors
    traits: tuple[Trait, ...] = ()
    layer_type: LayerType | None = None  # for configs without layer_types
    table: str = ""  # the end of the name of a table of relative biases
    ignored: tuple[str, ...] = ()  # patterns of tensors below the layer's name that are without effect
    irrelevant: str = ""  # pattern of fields that sound like attention and are without effect


Family = Mapping[str, Attention]  # part -> attention


def fields_of(attention: Attention, config: Config, n: int) -> Fields:
    """Fields of LayerSpec for layer n. Raises InvalidRequest."""
    layer_type, windowed = _layer_type(attention, config, n), any(trait in WINDOWED for trait in attention.traits)
    if layer_type == LINEAR:
        raise config.refusal("layer_types", f"softmax attention; layer {n} is linear attention, which has no attention weights", layer_type)
    if layer_type != FULL and not (layer_type == SLIDING and windowed):
        raise config.refusal("layer_types", f"{FULL}{f' or {SLIDING}' if windowed else ''} in layer {n}", layer_type)
    heads, width = config.count(*attention.heads), config.get(*attention.width)
    head_dim = (
        config.count(*attention.head_dim) if config.get(*attention.head_dim) else config.count(*attention.width) // heads if width else 1
    )
    if not 0 < head_dim <= WIDEST_HEAD:
        raise config.refusal(attention.head_dim[0], f"heads of 1 to {WIDEST_HEAD} numbers", head_dim)
    fields: Fields = {"num_heads": heads, "head_dim": head_dim, "sinks": False, "qk_norm": None, "relative_bias": None, "rope": None}
    fields["output_gate"] = None
    if attention.kv_heads and config.get(*attention.kv_heads) is not None:
        fields["num_kv_heads"] = config.count(*attention.kv_heads)
    for trait in attention.traits:
        fields |= trait(config, n, layer_type)
    if attention.rotary:
        rope = rope_fields(config, attention.rotary, layer_type, fields["head_dim"])
        fields["rope"] = fields["rope"] if fields["rope"] == WITHOUT else rope
    fields["rope"] = None if fields["rope"] == WITHOUT else fields["rope"]
    return fields | (attention.bias(config, n, layer_type) if attention.bias else {})


LLAMA = Attention(rotary=Rotary(), bias=biased("attention_bias"))


def _layer_type(attention: Attention, config: Config, n: int) -> str:
    """By `layer_types`, or by the family's rule for configs without them."""
    ruled = attention.layer_type(config, n) if attention.layer_type else None
    listed = config.each("layer_types", n)
    if listed is None and ruled is None and any(trait in WINDOWED for trait in attention.traits):
        raise config.refusal("layer_types", "the type of each layer", None)
    return str(listed or ruled or FULL)


def decoder(*traits: Trait, **changes: Any) -> Family:
    """Llama's attention with these traits and changes."""
    return {"decoder": replace(LLAMA, traits=traits, **changes)}


def encoder(*traits: Trait, rotary: Rotary | None = None, **changes: Any) -> Family:
    """BERT's attention with these traits and changes: all biases, RoPE only if `rotary` is given, both directions."""
    positions = ABSOLUTE_OR_ROTARY if rotary else ABSOLUTE
    return {"encoder": replace(BERT, traits=(positions, *traits), rotary=rotary, **changes)}


ALL_BIASED, NO_BIASES, QKV = biased(None), biased(None, ""), biased(None, "qkv")  # biases of projections
ABSOLUTE = only("position_embedding_type", "absolute")  # positions that are added to the model's input
ABSOLUTE_OR_ROTARY = only("position_embedding_type", "absolute", "rotary", "rope")  # families that rotate whichever it is
BERT = Attention(path="encoder.layer.{n}.attention", kv_heads=(), causal=False, bias=ALL_BIASED, traits=(ABSOLUTE,))
INTERLEAVED = Rotary(interleaved=True)
THETA_10000 = Rotary(theta=10000.0)  # of files that leave theta out
GPTJ = Rotary(theta=10000.0, interleaved=True, dims_field="rotary_dim")
GRANITE = scale("attention_multiplier", default=1.0)
PRE_SCALAR = scale("query_pre_attn_scalar", -0.5, default=256)
ALL_HEADS = normed(over="all", weights="own")
LAYER_NORMED = normed("qk_layernorm", kind="layer", bias=True, eps="layer_norm_eps", default=1e-5)
MODERNBERT_ROPE = Rotary(theta_fields={FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)})
MODERNBERT_LAYER_TYPE: LayerType = lambda config, n: SLIDING if n % int(config.number("global_attn_every_n_layers", default=3)) else FULL  # noqa: E731

NEOX = Attention(path="layers.{n}.attention", layout="grouped", rotary=Rotary(partial=0.25))
GPT2 = Attention(path="h.{n}.attn", layout="conv", kv_heads=(), bias=ALL_BIASED)
GPT_OSS = replace(LLAMA, traits=(constant(sinks=True), window), bias=biased("attention_bias", default=True), layer_type=alternating)
EXAONE = decoder(normed(), window, rope_if_sliding, bias=NO_BIASES, irrelevant="sliding_window_pattern")
GEMMA3 = Attention(
    layout="separate, norms less 1",
    bias=LLAMA.bias,
    traits=(PRE_SCALAR, capped, window, normed(), only("use_bidirectional_attention", False)),
    layer_type=every_nth_full("sliding_window_pattern", 6),
    rotary=Rotary(theta=1e6, theta_fields={SLIDING: ("rope_local_base_freq", 1e4)}, scaled_layer_types=(FULL,)),
)
QWEN_GATED = decoder(
    normed(),
    gated(bias="attention_bias"),
    layout="gated queries, norms less 1",
    rotary=Rotary(partial=0.25),
    layer_type=every_nth_full("full_attention_interval", 4, other=LINEAR),
    irrelevant="^linear_",
)
HRM_TEXT = replace(
    LLAMA,
    path="L_module.layers.{n}.attn",
    layout="gated stack",
    kv_heads=(),
    layers=("num_layers_per_stack", "num_hidden_layers"),
    bias=NO_BIASES,
    traits=(gated(), only("attention_bias", False)),
    irrelevant="^embedding_scale$",
)

DECODERS: dict[str, Family] = {
    "llama": decoder(rotary=THETA_10000),
    **dict.fromkeys(("arcee", "gemma", "aria_text", "jais2", "iquestcoder", "higgs_audio_v2"), decoder()),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), decoder(GRANITE)),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), decoder(GRANITE, window, layer_thetas, constant(sinks=True))),
    **dict.fromkeys(("mistral", "mixtral"), decoder(window_everywhere, bias=NO_BIASES)),
    **dict.fromkeys(("ministral", "cwm"), decoder(window, bias=NO_BIASES)),
    "qwen2": decoder(window, bias=QKV, layer_type=qwen_type),
    "qwen2_moe": decoder(window, bias=biased("qkv_bias", "qkv", default=True), layer_type=qwen_type),
    "qwen3": decoder(normed(), window, layer_type=qwen_type),
    "hyperclovax": decoder(scale("attention_multiplier")),
    "qwen2_vl_text": decoder(window, bias=QKV, layer_type=qwen_type),
    "qwen2_5_vl_text": decoder(window, bias=QKV, layer_type=qwen_type),
    "qwen3_moe": decoder(normed(), window_if_used),
    "qwen3_vl_text": decoder(normed()),
    "qwen3_vl_moe_text": decoder(normed(), irrelevant="sliding_window|max_window_layers"),
    "seed_oss": decoder(bias=biased_apart),
    "smollm3": decoder(no_rope_layers, window, layer_type=qwen_type),
    "starcoder2": decoder(window_everywhere, bias=biased("use_bias", default=True)),
    "dots1": decoder(normed(), window, layer_type=from_layer("max_window_layers", "sliding_window")),
    **dict.fromkeys(("apertus", "hy_v3"), decoder(normed())),
    "mellum": decoder(normed(), window, rotary=Rotary(partial=1.0)),
    "flint": decoder(normed(), window, rope_if_sliding, constant(sinks=True)),
    **dict.fromkeys(("exaone4", "exaone_moe", "kolibri1"), EXAONE),
    "olmo": decoder(only("clip_qkv", None)),
    "olmo2": decoder(ALL_HEADS),
    "olmo3": decoder(ALL_HEADS, window, layer_type=every_nth_full("sliding_window_pattern", 4), rotary=Rotary(scaled_layer_types=(FULL,))),
    "olmoe": decoder(ALL_HEADS, only("clip_qkv", None)),
    "flex_olmo": decoder(ALL_HEADS),
    "minimax_m2": decoder(ALL_HEADS, bias=NO_BIASES, rotary=Rotary(partial=1.0)),
    "solar_open": decoder(bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=1.0)),
    "cohere": decoder(normed("use_qk_norm", kind="layer", weights="own", eps="layer_norm_eps", default=1e-5), rotary=INTERLEAVED),
    "cohere2": decoder(window, rope_if_sliding, rotary=INTERLEAVED, layer_type=every_nth_full("sliding_window_pattern", 4)),
    "cohere2_moe": decoder(window, rope_if_sliding, rotary=INTERLEAVED, layer_type=every_nth_full("sliding_window_pattern", 4)),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), decoder(bias=biased("use_bias"), rotary=INTERLEAVED)),
    **dict.fromkeys(("glm", "glm4"), decoder(bias=biased("attention_bias", "qkv"), rotary=Rotary(interleaved=True, partial=0.5))),
    "glm4_moe": decoder(normed("use_qk_norm"), bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=0.5)),
    "helium": decoder(bias=biased("attention_bias", "qkv"), rotary=INTERLEAVED),
    "internlm3": decoder(bias=biased_apart),
    "nemotron": decoder(rotary=Rotary(partial=0.5)),
    "nanochat": decoder(normed(weights="none", after_rope=True), capped, rotary=Rotary(negate_angles=True)),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), decoder(normed(after_rope=True))),
    "stablelm": decoder(only("qk_layernorm", False), bias=biased("use_qkv_bias", "qkv"), rotary=Rotary(partial=0.25)),
    "phimoe": decoder(window_everywhere),
    "phi": decoder(LAYER_NORMED, bias=ALL_BIASED, rotary=Rotary(partial=0.5)),
    "phi3": decoder(window_everywhere, bias=NO_BIASES, layout="stacked", rotary=Rotary(partial=1.0)),
    "persimmon": decoder(LAYER_NORMED, bias=ALL_BIASED, layout="grouped", rotary=Rotary(partial=0.5)),
    "gpt_oss": {"decoder": GPT_OSS},
    **dict.fromkeys(("gemma2", "vaultgemma"), decoder(PRE_SCALAR, capped_or_null, window, layer_type=alternating)),
    "gemma3_text": {"decoder": GEMMA3},
    "gemma3n_text": {"decoder": replace(GEMMA3, layout="separate", layer_type=None, traits=(window, gemma_values))},
    "gemma4_text": {
        "decoder": replace(
            GEMMA3,
            layout="separate",
            layer_type=None,
            rotary=Rotary(),
            traits=(gemma4_heads, window, gemma_values, only("use_bidirectional_attention", None)),
        )
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN_GATED),
    "afmoe": decoder(
        normed(default=1e-5),
        gated(),
        window,
        rope_only_if_sliding,
        layer_type=every_nth_full("global_attn_every_n_layers", 4),
        irrelevant="^mup_enabled$",
    ),
    "laguna": decoder(normed(), laguna, window, rotary=Rotary(partial=1.0)),
    "step3p5": decoder(
        normed(default=1e-5),
        gated("headwise"),
        window,
        scale("query_pre_attn_scalar", -0.5),
        only("gating", True),
        only("use_bidirectional_attention", False),
        layout="separate, norms less 1",
        rotary=Rotary(partial=1.0),
        irrelevant="^num_sliding_attention_heads$",  # which per_layer_config repeats
    ),
    "hrm_text": {"low": HRM_TEXT, "high": replace(HRM_TEXT, path="H_module.layers.{n}.attn")},
    "gpt_neox": {"decoder": replace(NEOX, bias=biased("attention_bias", default=True))},
    "gptj": decoder(path="h.{n}.attn", bias=NO_BIASES, rotary=GPTJ),
    "codegen": decoder(path="h.{n}.attn", bias=NO_BIASES, rotary=GPTJ, layout="codegen"),
    "gpt2": {"decoder": replace(GPT2, traits=(gpt2_scale,))},
    "openai-gpt": {"decoder": GPT2},
    "gpt_bigcode": {"decoder": replace(GPT2, layout="grouped", traits=(gpt2_scale, bigcode))},
    "gpt_neo": decoder(constant(scale=1.0), gpt_neo, path="h.{n}.attn.attention", rotary=None, bias=biased(None, "o")),
    "bloom": decoder(constant(alibi=True), path="h.{n}.self_attention", layout="grouped", rotary=None, bias=ALL_BIASED),
    "falcon": decoder(falcon, rotary=THETA_10000, path="h.{n}.self_attention", layout="grouped", bias=biased("bias")),
    "mpt": decoder(mpt, path="blocks.{n}.attn", layout="stacked", rotary=None, bias=NO_BIASES),
    "opt": decoder(path="decoder.layers.{n}.self_attn", rotary=None, bias=biased("enable_bias", default=True)),
    "xglm": decoder(rotary=None, bias=ALL_BIASED, heads=("attention_heads",)),
    "biogpt": decoder(rotary=None, bias=ALL_BIASED),
    "ctrl": decoder(path="h.{n}.multi_head_attention", rotary=None, bias=ALL_BIASED),
    "modernbert-decoder": decoder(
        modernbert_decoder_window,
        bias=biased("attention_bias"),
        path="layers.{n}.attn",
        rotary=MODERNBERT_ROPE,
        layer_type=MODERNBERT_LAYER_TYPE,
    ),
}
ENCODERS: dict[str, Family] = {
    **dict.fromkeys(
        [
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "electra",
            "ernie",
            "data2vec-text",
            "roberta-prelayernorm",
            "roc_bert",
            "layoutlm",
            "markuplm",
            "splinter",
            "visual_bert",
            "rembert",
            "bert-generation",
            "tapas",
        ],
        encoder(),
    ),
    "xlm-roberta-xl": encoder(ignored=("self_attn_layer_norm.*",)),
    "megatron-bert": encoder(ignored=("ln.*",)),
    "big_bird": encoder(original_full),
    "distilbert": encoder(path="transformer.layer.{n}.attention"),
    "albert": encoder(path="albert_layer_groups.0.albert_layers.0.attention"),
    "mpnet": encoder(
        constant(relative_bias={"max_distance": 128, "bidirectional": True}),
        only("relative_attention_num_buckets", 32),  # transformers counts 32 buckets regardless of the config
        table="encoder.relative_attention_bias.weight",
    ),
    "esm": encoder(rope_if_rotary, rotary=THETA_10000),
    "roformer": encoder(only("rotary_value", False), rotary=replace(INTERLEAVED, theta=10000.0)),
    "nomic_bert": encoder(path="encoder.layers.{n}.attn", layout="stacked", rotary=Rotary(), bias=NO_BIASES),
    "gte": encoder(path="encoder.layer.{n}.attention", layout="stacked", rotary=Rotary()),
    "jina_embeddings_v3": encoder(path="encoder.layers.{n}.mixer", layout="stacked", rotary=Rotary()),
    "eurobert": {"encoder": replace(LLAMA, causal=False)},
    "ultrabert": {"encoder": replace(LLAMA, causal=False, traits=(window_around,))},
    "modernbert": encoder(
        modernbert_window,
        path="layers.{n}.attn",
        layout="stacked",
        bias=biased("attention_bias"),
        rotary=MODERNBERT_ROPE,
        layer_type=MODERNBERT_LAYER_TYPE,
    ),
    "openai_privacy_filter": {
        "encoder": replace(GPT_OSS, causal=False, traits=(constant(sinks=True), window_around), layer_type=sliding, rotary=INTERLEAVED)
    },
    "clip_text_model": {"text": replace(BERT, causal=True, path="encoder.layers.{n}.self_attn")},
    "xlm": encoder(only("causal", False), path="attentions.{n}"),
    "flaubert": encoder(only("causal", False), path="attentions.{n}"),
}


def bart(cross: str = "encoder_attn", irrelevant: str = "$.", bias: Trait = ALL_BIASED) -> Family:
    """BART's encoder, decoder and cross-attention."""
    parts = {"encoder": ("encoder", "self_attn"), "decoder": ("decoder", "self_attn"), "cross": ("decoder", cross)}
    return {
        part: replace(
            BERT,
            path=f"{side}.layers.{{n}}.{name}",
            heads=(f"{side}_attention_heads",),
            layers=(f"{side}_layers",),
            causal=part == "decoder",
            bias=bias,
            irrelevant=f"coder_attention_heads|coder_layers|{irrelevant}",
        )
        for part, (side, name) in parts.items()
    }


def t5(table_of_each_block: bool = False) -> Family:
    """T5's encoder, decoder and cross-attention, whose first block has the table of biases for all, unless each has its own."""
    common = Attention(
        heads=("num_heads",), head_dim=("d_kv",), kv_heads=(), causal=False, bias=NO_BIASES, irrelevant="is_gated_act|scale_decoder"
    )
    block = "{n}" if table_of_each_block else "0"
    own, table = "block.{n}.layer.0.SelfAttention", f"block.{block}.layer.0.SelfAttention.relative_attention_bias.weight"
    decoder_layers = ("num_decoder_layers", "num_layers")
    return {
        "encoder": replace(common, path=f"encoder.{own}", traits=(t5_bias(True),), table=f"encoder.{table}"),
        "decoder": replace(
            common, path=f"decoder.{own}", traits=(t5_bias(False),), table=f"decoder.{table}", layers=decoder_layers, causal=True
        ),
        "cross": replace(
            common,
            path="decoder.block.{n}.layer.1.EncDecAttention",
            traits=(constant(scale=1.0),),
            layers=decoder_layers,
            irrelevant="relative_attention|is_gated_act|scale_decoder",
            ignored=("relative_attention_bias.weight",),  # old files have one there, without effect
        ),
    }


def without_encoder(family: Family) -> Family:
    return {part: attention for part, attention in family.items() if part != "encoder"}


LONGT5_FIELDS = "|encoder_attention_type|global_block|local_radius"  # of its encoder, which has a window

ENCODER_DECODERS: dict[str, Family] = {
    **dict.fromkeys(["bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small", "m2m_100", "mvp"], bart()),
    "nllb-moe": bart("cross_attention"),
    "bigbird_pegasus": without_encoder(bart(irrelevant="attention_type|block", bias=biased("use_bias"))),  # whose encoder attends to blocks
    "pegasus_x": without_encoder(bart(irrelevant="num_global_tokens|block|stagger", bias=NO_BIASES)),
    "led": without_encoder(bart(irrelevant="attention_window")),  # whose encoder has a window and global tokens
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), t5()),
    "umt5": t5(table_of_each_block=True),
    "longt5": {part: replace(a, irrelevant=a.irrelevant + LONGT5_FIELDS) for part, a in without_encoder(t5()).items()},
}
REASONS = {  # what the layer cannot compute -> model types that need it
    "multi-head latent attention": """deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 kimi_k2 minicpm3 glm4_moe_lite glm_moe_dsa
        longcat_flash mistral4 youtu axk1 axk2""",
    "a norm of head outputs": "muse_spark_text",
    "scores from relative positions by content": "deberta deberta-v2 xlnet funnel wav2vec2-conformer",
    "attention to blocks, buckets or global tokens": "longformer reformer yoso mra nystromformer",
    "differential attention": "diffllama",
    "layers without a softmax": "mamba mamba2 falcon_mamba rwkv xlstm fnet",
    "convolutions in its attention": "convbert squeezebert zaya inkling_text inkling2_text",
    "queries of their own for entities": "luke",
    "quantised arithmetic": "ibert",
    "a factor on values": "mimo_v2_flash",
    "queries scaled by position, or chunks": "llama4_text ministral3 beam",
}
REFUSED: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}
FAMILIES: dict[str, Family] = DECODERS | ENCODERS | ENCODER_DECODERS
COMPOSITES = """aria gemma3 gemma4 got_ocr2 idefics3 internvl llava llava_next llava_onevision mistral3 qwen2_vl qwen2_5_vl qwen3_vl
qwen3_5 qwen3_5_moe step3p7 smolvlm vipllava"""  # model types with images or sounds, whose decoder is described in `text_config`
