"""The table of model families: `model_type` -> where its attention layers are, and how its config's fields become a LayerSpec.

A row says only what differs from Llama, for most families one or two words. `tests/golden/generate_models.py` compares every row with
transformers' own eager attention; `docs/checkpoints.md` lists them.
"""

from dataclasses import replace
from typing import Any

from service.checkpoints.family import Attention, Family
from service.checkpoints.media_families import AUDIO, VISION
from service.checkpoints.rope import Rotary
from service.checkpoints.traits import (
    FULL,
    LINEAR,
    SLIDING,
    LayerType,
    Trait,
    alternating,
    biased,
    biased_apart,
    bigcode,
    capped,
    capped_or_null,
    chunks,
    constant,
    every_nth_full,
    falcon,
    from_layer,
    gated,
    gemma4_heads,
    gemma_values,
    gpt2_scale,
    gpt_neo,
    jamba_type,
    key_multiplier,
    kimi_linear_type,
    laguna,
    latent,
    layer_thetas,
    lfm3,
    listed,
    llama4,
    llama4_type,
    mimo,
    ministral3,
    mistral4,
    mobilebert,
    modernbert_decoder_window,
    modernbert_window,
    molmo2,
    mpt,
    muse_glimmer,
    no_rope_layers,
    normed,
    only,
    original_full,
    qwen_type,
    recurrent_gemma_type,
    recurrent_gemma_window,
    repmixer,
    rope_if_any,
    rope_if_named,
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

LLAMA = Attention(rotary=Rotary(), bias=biased("attention_bias"))


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
GEMMA4 = decoder(gemma4_heads, window, gemma_values, only("use_bidirectional_attention", None, "vision"))  # among images' tokens
ESMC_NORM = {"kind": "layer", "over": "all", "weights": "own", "eps": 1e-5}
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
LATENT = decoder(
    latent,
    layout="latent",
    kv_heads=(),
    rotary=Rotary(interleaved_field="rope_interleave"),
    bias=biased("attention_bias", "o"),
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
    **dict.fromkeys(("hyperclovax", "granite_docling_text"), decoder(scale("attention_multiplier"))),
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
    "glm4v_text": decoder(bias=QKV, rotary=Rotary(interleaved=True, partial=1.0)),
    "glm_ocr_text": decoder(bias=NO_BIASES, rotary=Rotary(interleaved=True, partial=1.0)),
    "glm4v_moe_text": decoder(bias=biased("attention_bias", "qkv", default=True), rotary=Rotary(partial=0.5)),
    "glm_image_text": decoder(bias=biased("attention_bias", "qkv", default=True), rotary=Rotary(partial=1.0)),
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
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4),
    "llama4_text": decoder(chunks, llama4, rotary=INTERLEAVED, layer_type=llama4_type),
    "ministral3": decoder(
        window_everywhere, ministral3, bias=NO_BIASES, rotary=Rotary(others=("llama_4_scaling_beta", "max_position_embeddings"))
    ),
    "mimo_v2_flash": decoder(mimo, window, bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=0.334)),
    "minimax": decoder(window_everywhere, bias=NO_BIASES, irrelevant="_(alpha|beta)_factor$"),
    "minimax_m3_vl_text": decoder(
        normed(), bias=NO_BIASES, layout="separate, norms less 1", rotary=Rotary(partial=1.0), irrelevant="^index_|^rotary_dim$"
    ),
    "molmo2_text": decoder(molmo2, layout="stacked", bias=biased("attention_bias", "qkv"), irrelevant="^norm_after$"),
    "moshi": decoder(bias=NO_BIASES, irrelevant="sliding_window"),
    "muse_glimmer_text": decoder(
        normed(weights="none", default=1e-5), gated(), window, layer_thetas, muse_glimmer, irrelevant="^output_multiplier$|^post_norm_eps$"
    ),
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
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu", "axk1"), LATENT),
    "deepseek_v2": {"decoder": replace(LATENT["decoder"], rotary=INTERLEAVED)},
    "minicpm3": {"decoder": replace(LATENT["decoder"], rotary=Rotary(), irrelevant="^scale_(emb|depth)$")},
    "kimi_linear": {
        "decoder": replace(
            LATENT["decoder"],
            rotary=None,
            traits=(latent, only("mla_use_nope", True), only("rope_scaling", None)),
            layer_type=kimi_linear_type,
            irrelevant="^linear_",
        )
    },
    "mistral4": {
        "decoder": replace(
            LATENT["decoder"],
            traits=(latent, mistral4, ministral3),
            rotary=Rotary(
                interleaved_field="rope_interleave",
                dims_field="qk_rope_head_dim",
                partial=1.0,
                others=("llama_4_scaling_beta", "max_position_embeddings"),
            ),
        )
    },
    "hrm_text": {"low": HRM_TEXT, "high": replace(HRM_TEXT, path="H_module.layers.{n}.attn")},
    "gpt_neox": {"decoder": replace(NEOX, bias=biased("attention_bias", default=True))},
    "gpt_neox_japanese": {"decoder": replace(NEOX, rotary=Rotary(partial=1.0), bias=NO_BIASES)},
    "gptj": decoder(path="h.{n}.attn", bias=NO_BIASES, rotary=GPTJ),
    "codegen": decoder(path="h.{n}.attn", bias=NO_BIASES, rotary=GPTJ, layout="codegen"),
    **{name: {"decoder": replace(GPT2, traits=(gpt2_scale,))} for name in ("gpt2", "imagegpt")},
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
LFM2_NORM = normed(eps="norm_eps", default=1e-5)
MAMBA = "mamba|conv|ssm|^chunk_size$|multipliers?$|projectors_bias|^linear_|^use_bias$|variance_scale"  # fields about other kinds of layers
HYBRIDS: dict[str, Family] = {  # which have attention in some layers, or beside something else
    "falcon_h1": decoder(key_multiplier, irrelevant=MAMBA),
    "bamba": decoder(rotary=Rotary(partial=0.5), layer_type=listed("attn_layer_indices", "mamba"), irrelevant=MAMBA),
    "jamba": decoder(rotary=None, bias=NO_BIASES, layer_type=jamba_type, irrelevant=MAMBA),
    "granitemoehybrid": decoder(GRANITE, rope_if_named, irrelevant=MAMBA),
    "lfm2": decoder(LFM2_NORM, bias=NO_BIASES, layer_type=listed("full_attn_idxs", "conv", True), irrelevant=MAMBA),
    "lfm2_moe": decoder(LFM2_NORM, bias=NO_BIASES, irrelevant=MAMBA),
    "nemotron_h": decoder(path="layers.{n}.mixer", rotary=None, types_field="layers_block_type", irrelevant=f"{MAMBA}|^sliding_window$"),
    "lfm3": decoder(normed(), window, lfm3, irrelevant=f"{MAMBA}|sandwich_norm"),
    "olmo_hybrid": decoder(ALL_HEADS, rope_if_any, irrelevant=MAMBA),
    "recurrent_gemma": decoder(
        recurrent_gemma_window,
        path="layers.{n}.temporal_block",
        bias=None,
        rotary=Rotary(partial=0.5),
        layer_type=recurrent_gemma_type,
        irrelevant=MAMBA,
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
            "dpr",
        ],
        encoder(),
    ),
    "xlm-roberta-xl": encoder(ignored=("self_attn_layer_norm.*",)),
    "megatron-bert": encoder(ignored=("ln.*",)),
    "big_bird": encoder(original_full),
    "distilbert": encoder(path="transformer.layer.{n}.attention"),
    "albert": encoder(path="albert_layer_groups.0.albert_layers.0.attention"),
    "xmod": encoder(irrelevant="adapter"),
    "mobilebert": encoder(mobilebert, irrelevant="normalization_type"),
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
    "esmc": {"encoder": replace(LLAMA, causal=False, traits=(constant(qk_norm=ESMC_NORM),))},
    "embedding_gemma2_text": {"encoder": replace(LLAMA, causal=False, traits=(gemma4_heads, window_around, gemma_values))},
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
    "siglip_text_model": {"text": replace(BERT, path="encoder.layers.{n}.self_attn")},
    "tipsv2_text_model": {"text": replace(BERT, path="transformer.resblocks.{n}.attn", layout="stacked", irrelevant="^scale_sqrt_depth$")},
    "sam3_lite_text_text_model": {
        "text": replace(BERT, path="layers.{n}.self_attn", layer_type=repmixer, irrelevant="^layer_scale|^repmixer_kernel")
    },
    "git": {"decoder": replace(BERT, causal=True, irrelevant="num_image_with_embedding")},
    "xlm": encoder(only("causal", False), path="attentions.{n}"),
    "flaubert": encoder(only("causal", False), path="attentions.{n}"),
}


def bart(cross: str = "encoder_attn", irrelevant: str = "$.", bias: Trait = ALL_BIASED, tower: str = "") -> Family:
    """BART's encoder, decoder and cross-attention; `tower` precedes their names."""
    parts = {"encoder": ("encoder", "self_attn"), "decoder": ("decoder", "self_attn"), "cross": ("decoder", cross)}
    return {
        part: replace(
            BERT,
            path=f"{tower}{side}.layers.{{n}}.{name}",
            heads=(f"{side}_attention_heads",),
            layers=(f"{side}_layers",),
            causal=part == "decoder",
            bias=bias,
            irrelevant=f"coder_attention_heads|coder_layers|{irrelevant}",
        )
        for part, (side, name) in parts.items()
    }


def moonshine() -> Family:
    """BART's parts with grouped heads, and RoPE in self-attention."""
    rotary = Rotary(interleaved=True, partial=0.9)
    return {
        part: replace(
            attention,
            heads=(f"{side}_num_attention_heads",),
            kv_heads=(f"{side}_num_key_value_heads",),
            layers=(f"{side}_num_hidden_layers",),
            bias=biased("attention_bias", "qkv"),
            rotary=None if part == "cross" else rotary,
            traits=(only("pad_head_dim_to_multiple_of", None),),
            irrelevant="coder_num_|^rope_parameters$" if part == "cross" else "coder_num_",
        )
        for part, attention in bart().items()
        for side in (attention.path.partition(".")[0],)
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


def _prophetnet(part: str, side: str, name: str) -> Attention:
    heads, layers = (f"num_{side}_attention_heads",), (f"num_{side}_layers",)
    return replace(
        BERT, path=f"{side}.layers.{{n}}.{name}", heads=heads, layers=layers, irrelevant="num_(en|de)coder_|num_buckets|relative"
    )


PROPHETNET = (("encoder", "encoder", "self_attn"), ("cross", "decoder", "cross_attn"))  # whose decoder attends to several streams
SEAMLESS = "^t2u_|^speech_|^vocoder|conv|position_embeddings_type|rotary_embedding_base|variance_predictor|^unit_"  # of its other towers
LONGT5_FIELDS = "|encoder_attention_type|global_block|local_radius"  # of its encoder, which has a window

ENCODER_DECODERS: dict[str, Family] = {
    **dict.fromkeys(["bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small", "m2m_100", "mvp"], bart()),
    "fsmt": bart(),
    "moonshine": moonshine(),
    "whisper": bart(bias=biased(None, "qvo"), irrelevant="^mask_"),
    "speech_to_text": bart(),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), bart("cross_attention", irrelevant=SEAMLESS, tower="text_")),
    "prophetnet": {part: _prophetnet(part, side, name) for part, side, name in PROPHETNET},
    "nllb-moe": bart("cross_attention"),
    "bigbird_pegasus": without_encoder(bart(irrelevant="attention_type|block", bias=biased("use_bias"))),  # whose encoder attends to blocks
    "pegasus_x": without_encoder(bart(irrelevant="num_global_tokens|block|stagger", bias=NO_BIASES)),
    "led": without_encoder(bart(irrelevant="attention_window")),  # whose encoder has a window and global tokens
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), t5()),
    "umt5": t5(table_of_each_block=True),
    "longt5": {part: replace(a, irrelevant=a.irrelevant + LONGT5_FIELDS) for part, a in without_encoder(t5()).items()},
}
REASONS = {  # what the layer cannot compute -> model types that need it
    "keys selected by an indexer": "deepseek_v32 deepseek_v4 glm_moe_dsa axk2 hy_v4",
    "factors on latent vectors": "longcat_flash",
    "code that transformers does not have": "kimi_k2",
    "queries scaled by a power of their position": "beam",
    "a norm of head outputs": "muse_spark_text bitnet",
    "scores from relative positions by content": """deberta deberta-v2 xlnet funnel wav2vec2-conformer fastspeech2_conformer
        parakeet_encoder nemotron_asr_streaming_encoder vits sam_vision_model sam_hq_vision_model vitdet""",
    "relative biases with a gate, or between segments": "wavlm cpmant",
    "positions in two dimensions": "dinov3_vit mlcd mlcd_vision_model sam3_vit_model",
    "attention to keys that the layer chooses": "doge",
    "experts among its projections": "jetmoe",
    "attention over time and space by turns": "timesformer",
    "attention to blocks, buckets or global tokens": "longformer reformer yoso mra nystromformer canine",
    "differential attention": "diffllama",
    "layers without a softmax": "mamba mamba2 falcon_mamba rwkv xlstm fnet",
    "convolutions in its attention": "convbert squeezebert zaya inkling_text inkling2_text",
    "queries of their own for entities": "luke",
    "quantised arithmetic": "ibert",
}
REFUSED: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}
FAMILIES: dict[str, Family] = DECODERS | HYBRIDS | ENCODERS | ENCODER_DECODERS | VISION | AUDIO
COMPOSITES = """aria audioflamingo3 clip embedding_gemma2 exaone4_5 fuyu gemma3 gemma4 gemma4_unified glm46v glm4v glm4v_moe glm_ocr
glmga got_ocr2 granite_speech granite_speech_plus hyperclovax_vision_v2 idefics3 internvl lighton_ocr llama4 llava
llava_next llava_onevision minimax_m3_vl mistral3 musicflamingo ovis2 qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr
qwen3_vl siglip smolvlm step3p7 vipllava"""  # model types with images or sounds, described in sections
