"""Rows of decoders of text: Llama and those that differ from it little, GPT-2, GPT-NeoX, BLOOM, DeepSeek's latent attention.

`HYBRIDS` have softmax attention in some layers, or beside something else: Mamba, linear attention, convolutions.
"""

from dataclasses import replace
from functools import partial

from attend.checkpoints.families import decoder_traits
from attend.checkpoints.families.row import AttentionRow, Family, family
from attend.checkpoints.families.traits import (
    ALL_BIASED,
    FULL,
    LINEAR,
    NO_BIASES,
    QKV,
    SLIDING,
    alternating,
    biased,
    biased_apart,
    capped_or_null,
    chunks,
    constant,
    every_nth_full,
    from_layer,
    gated,
    latent,
    layer_thetas,
    listed_layers,
    modernbert_decoder_window,
    modernbert_type,
    no_rope_layers,
    normed,
    only,
    qwen_type,
    rope_if_sliding,
    rope_only_if_sliding,
    scale,
    window,
    window_everywhere,
    window_if_used,
)
from attend.checkpoints.rope import Rotary

LLAMA = AttentionRow(rotary=Rotary(), bias=biased("attention_bias"))
decoder = partial(family, "decoder", LLAMA)
INTERLEAVED = Rotary(interleaved=True)
THETA_10000 = Rotary(theta=10000.0)  # for configs that leave theta out
GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")  # fields of rope_parameters that `ministral3` reads
GPTJ = Rotary(theta=10000.0, fixed=True, interleaved=True, dims_field="rotary_dim")
GRANITE = scale("attention_multiplier", default=1.0)
PRE_SCALAR = scale("query_pre_attn_scalar", -0.5, default=256)
ALL_HEADS = normed(over="all", weights="own")
LAYER_NORMED = normed("qk_layernorm", kind="layer", bias=True, eps="layer_norm_eps", default=1e-5)
MODERNBERT_ROPE = Rotary(theta_fields={FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)})

gptj = partial(
    family,
    "decoder",
    AttentionRow(path="h.{n}.attn", bias=NO_BIASES, rotary=GPTJ, traits=(only("rotary", True), only("scale_attn_weights", True))),
)
NEOX = AttentionRow(path="layers.{n}.attention", layout="grouped", rotary=Rotary(partial=0.25))
GPT2 = AttentionRow(path="h.{n}.attn", layout="gpt2", kv_heads=(), bias=ALL_BIASED)
GPT2_CROSS = replace(GPT2, path="h.{n}.crossattention", causal=False, traits=(decoder_traits.gpt2_scale,), flag="add_cross_attention")
GPT_OSS = replace(LLAMA, traits=(constant(sinks=True), window), bias=biased("attention_bias", default=True), layer_type=alternating)
GEMMA3 = AttentionRow(
    layout="separate, norms less 1",
    bias=LLAMA.bias,
    traits=(PRE_SCALAR, window, normed(), only("attn_logit_softcapping", None), only("use_bidirectional_attention", False)),
    layer_type=every_nth_full("sliding_window_pattern", 6),
    rotary=Rotary(theta=1e6, theta_fields={SLIDING: ("rope_local_base_freq", 1e4)}, scaled_layer_types=(FULL,)),
)
HRM_TEXT = replace(
    LLAMA,
    path="L_module.layers.{n}.attn",
    layout="gated stack",
    kv_heads=(),
    layers=("num_layers_per_stack", "num_hidden_layers"),
    bias=NO_BIASES,
    traits=(gated(), only("attention_bias", False)),
    irrelevant="embedding_scale *_cycles prefix_lm",
)
DEEPSEEK = AttentionRow(
    layout="latent", kv_heads=(), rotary=Rotary(interleaved_field="rope_interleave"), bias=biased("attention_bias", "o"), traits=(latent,)
)
latent_decoder = partial(family, "decoder", DEEPSEEK)
LONGCAT = replace(DEEPSEEK, traits=(latent, decoder_traits.longcat), layers=("num_layers",), rotary=INTERLEAVED, irrelevant="head_dim")

DECODERS: dict[str, Family] = {
    "llama": decoder(rotary=THETA_10000),
    "arcee gemma aria_text jais2 iquestcoder higgs_audio_v2": decoder(),
    "granite granitemoe granitemoeshared": decoder(GRANITE),
    "granite_swa granitemoe_swa": decoder(GRANITE, window, layer_thetas, constant(sinks=True)),
    "mistral mixtral": decoder(window_everywhere, bias=NO_BIASES),
    "ministral cwm": decoder(window, bias=NO_BIASES),
    "qwen2": decoder(window, bias=QKV, layer_type=qwen_type),
    "qwen2_vl_text qwen2_5_vl_text": decoder(window, bias=QKV, layer_type=qwen_type, rotary=Rotary(sections="blocks")),
    "qwen2_moe": decoder(window, bias=biased("qkv_bias", "qkv", default=True), layer_type=qwen_type),
    "qwen3": decoder(normed(), window, layer_type=qwen_type),
    "hyperclovax granite_docling_text": decoder(scale("attention_multiplier")),
    "qwen3_moe": decoder(normed(), window_if_used),
    "qwen3_vl_text": decoder(normed(), rotary=Rotary(sections="thirds")),
    "qwen3_vl_moe_text": decoder(normed(), rotary=Rotary(sections="thirds"), irrelevant="sliding_window max_window_layers"),
    "mllama_text_model": {
        "decoder": replace(LLAMA, traits=(decoder_traits.mllama("decoder"),), bias=NO_BIASES),
        "cross": replace(
            LLAMA,
            path="layers.{n}.cross_attn",
            causal=False,
            rotary=None,
            bias=NO_BIASES,
            traits=(normed(default=1e-5), decoder_traits.mllama("cross")),
            irrelevant="rope_*",
        ),
    },
    "seed_oss": decoder(bias=biased_apart(("attention_bias",), ("attention_out_bias",))),
    "internlm3": decoder(bias=biased_apart(("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))),
    "smollm3": decoder(no_rope_layers, window, layer_type=qwen_type),
    "starcoder2": decoder(window_everywhere, bias=biased("use_bias", default=True)),
    "dots1": decoder(normed(), window, layer_type=from_layer("max_window_layers", "sliding_window")),
    "apertus hy_v3": decoder(normed()),
    "mellum": decoder(normed(), window, rotary=Rotary(partial=1.0)),
    "flint": decoder(normed(), window, rope_if_sliding, constant(sinks=True)),
    "exaone4 exaone_moe kolibri1": decoder(normed(), window, rope_if_sliding, bias=NO_BIASES, irrelevant="sliding_window_pattern"),
    "olmo": decoder(only("clip_qkv", None)),
    "olmo3": decoder(ALL_HEADS, window, layer_type=every_nth_full("sliding_window_pattern", 4), rotary=Rotary(scaled_layer_types=(FULL,))),
    "olmoe": decoder(ALL_HEADS, only("clip_qkv", None)),
    "olmo2 flex_olmo": decoder(ALL_HEADS),
    "minimax_m2": decoder(
        ALL_HEADS,
        only("use_qk_norm", True),
        only("qk_norm_type", "per_layer"),
        decoder_traits.softmax_in_each_layer,
        bias=NO_BIASES,
        rotary=Rotary(partial=1.0, old_dims_field="rotary_dim"),
        irrelevant="layernorm_*_beta",
    ),
    "solar_open": decoder(bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=1.0)),
    "cohere": decoder(
        normed("use_qk_norm", kind="layer", weights="own", eps="layer_norm_eps", default=1e-5), rotary=INTERLEAVED, irrelevant="logit_scale"
    ),
    "cohere2 cohere2_moe": decoder(
        window,
        rope_if_sliding,
        rotary=INTERLEAVED,
        layer_type=every_nth_full("sliding_window_pattern", 4),
        irrelevant="logit_scale prefix_dense_sliding_window_pattern",
    ),
    "ernie4_5 ernie4_5_moe": decoder(bias=biased("use_bias"), rotary=INTERLEAVED),
    "glm glm4": decoder(bias=biased("attention_bias", "qkv"), rotary=Rotary(interleaved=True, partial=0.5)),
    "glm4_moe": decoder(normed("use_qk_norm"), bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=0.5)),
    "glm4v_text": decoder(bias=QKV, rotary=Rotary(interleaved=True, partial=1.0, sections="blocks")),
    "glm_ocr_text": decoder(bias=NO_BIASES, rotary=Rotary(interleaved=True, partial=1.0, sections="blocks")),
    "glm4v_moe_text": decoder(bias=biased("attention_bias", "qkv", default=True), rotary=Rotary(partial=0.5, sections="blocks")),
    "glm_image_text": decoder(bias=biased("attention_bias", "qkv", default=True), rotary=Rotary(partial=1.0, sections="blocks")),
    "helium": decoder(bias=biased("attention_bias", "qkv"), rotary=INTERLEAVED),
    "nemotron": decoder(rotary=Rotary(partial=0.5)),
    "nanochat": decoder(normed(weights="none", after_rope=True), rotary=Rotary(negate_angles=True)),
    "hunyuan_v1_dense hunyuan_v1_moe": decoder(normed(after_rope=True)),
    "stablelm": decoder(only("qk_layernorm", False), bias=biased("use_qkv_bias", "qkv"), rotary=Rotary(partial=0.25)),
    "phimoe": decoder(window_everywhere),
    "phi": decoder(LAYER_NORMED, bias=ALL_BIASED, rotary=Rotary(partial=0.5)),
    "phi3": decoder(window_everywhere, bias=NO_BIASES, layout="stacked", rotary=Rotary(partial=1.0)),
    "persimmon": decoder(LAYER_NORMED, bias=ALL_BIASED, layout="grouped", rotary=Rotary(partial=0.5)),
    "gpt_oss": {"decoder": GPT_OSS},
    "gemma2 vaultgemma": decoder(PRE_SCALAR, capped_or_null, window, layer_type=alternating),
    "gemma3_text": {"decoder": GEMMA3},
    "gemma3n_text": {"decoder": replace(GEMMA3, layout="separate", layer_type=None, traits=(window, decoder_traits.gemma_values))},
    "gemma4_text gemma4_unified_text": decoder(
        decoder_traits.gemma4_heads,
        window,
        decoder_traits.gemma_values,
        only("use_bidirectional_attention", None, "vision"),  # vision: among tokens of images
    ),
    "llama4_text": decoder(chunks, decoder_traits.llama4, rotary=INTERLEAVED, layer_type=decoder_traits.llama4_type),
    "ministral3": decoder(window_everywhere, decoder_traits.ministral3, bias=NO_BIASES, rotary=Rotary(trait_fields=GROWTH)),
    "mimo_v2_flash": decoder(decoder_traits.mimo, window, bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=0.334)),
    "minimax_m3_vl_text": decoder(
        normed(), bias=NO_BIASES, layout="separate, norms less 1", rotary=Rotary(partial=1.0), irrelevant="index_* rotary_dim"
    ),
    "molmo2_text": decoder(decoder_traits.molmo2, layout="stacked", bias=biased("attention_bias", "qkv"), irrelevant="norm_after"),
    "moshi": decoder(bias=NO_BIASES, irrelevant="sliding_window"),
    "muse_glimmer_text": decoder(
        normed(weights="none", default=1e-5),
        gated(),
        window,
        layer_thetas,
        decoder_traits.muse_glimmer,
        irrelevant="output_multiplier post_norm_eps",
    ),
    "afmoe": decoder(
        normed(default=1e-5),
        gated(),
        window,
        rope_only_if_sliding,
        layer_type=every_nth_full("global_attn_every_n_layers", 4),
        irrelevant="mup_enabled",
    ),
    "laguna": decoder(normed(), decoder_traits.laguna, window, rotary=Rotary(partial=1.0)),
    "beam": decoder(decoder_traits.beam, normed(), window),
    "step3p5": decoder(
        normed(default=1e-5),
        gated("headwise"),
        window,
        scale("query_pre_attn_scalar", -0.5),
        only("gating", True),
        only("use_bidirectional_attention", False),
        layout="separate, norms less 1",
        rotary=Rotary(partial=1.0),
        irrelevant="num_sliding_attention_heads",  # which per_layer_config repeats
    ),
    "diffllama": decoder(decoder_traits.diffllama, layout="differential"),
    "deepseek_v3 glm4_moe_lite youtu axk1": latent_decoder(),
    "deepseek_v32": latent_decoder(decoder_traits.indexed(interleaved=False), rotary=INTERLEAVED, layout="latent, indexed"),
    "glm_moe_dsa": latent_decoder(decoder_traits.indexed(interleaved=True), rotary=INTERLEAVED, layout="latent, indexed"),
    "hy_v4": latent_decoder(
        decoder_traits.indexed(interleaved=False, eps="rms_norm_eps", every_nth=4),
        gated(),
        constant(sinks=True),
        rotary=Rotary(),
        layout="latent, gated, indexed",
        irrelevant="learnable_sink_init hc_*",
    ),
    "deepseek_v2": latent_decoder(rotary=INTERLEAVED),
    "minicpm3": latent_decoder(rotary=Rotary(), irrelevant="scale_emb scale_depth"),
    "longcat_flash": {part: replace(LONGCAT, path=f"layers.{{n}}.self_attn.{i}") for i, part in enumerate(("first", "second"))},
    "mistral4": latent_decoder(
        decoder_traits.mistral4,
        decoder_traits.ministral3,
        rotary=Rotary(interleaved_field="rope_interleave", dims_field="qk_rope_head_dim", partial=1.0, trait_fields=GROWTH),
    ),
    "hrm_text": {"low": HRM_TEXT, "high": replace(HRM_TEXT, path="H_module.layers.{n}.attn")},
    "gpt_neox": family("decoder", NEOX, bias=biased("attention_bias", default=True)),
    "gpt_neox_japanese": family("decoder", NEOX, rotary=Rotary(partial=1.0), bias=NO_BIASES),
    "gptj": gptj(),
    "codegen": gptj(layout="codegen"),
    "gpt2": {"decoder": replace(GPT2, traits=(decoder_traits.gpt2_scale,)), "cross": GPT2_CROSS},
    "imagegpt": family("decoder", GPT2, decoder_traits.gpt2_scale),
    "openai-gpt": {"decoder": GPT2},
    "gpt_bigcode": family("decoder", GPT2, decoder_traits.bigcode, layout="grouped"),
    "gpt_neo": decoder(constant(scale=1.0), decoder_traits.gpt_neo, path="h.{n}.attn.attention", rotary=None, bias=biased(letters="o")),
    "bloom": decoder(
        constant(alibi=True),
        path="h.{n}.self_attention",
        layout="grouped",
        rotary=None,
        bias=ALL_BIASED,
        width=("n_embed", "hidden_size"),
        irrelevant="*_fusion offset_alibi skip_bias_add*",
    ),
    "falcon": decoder(decoder_traits.falcon, rotary=THETA_10000, path="h.{n}.self_attention", layout="grouped", bias=biased("bias")),
    "mpt": decoder(decoder_traits.mpt, path="blocks.{n}.attn", layout="stacked", rotary=None, bias=NO_BIASES, irrelevant="logit_scale"),
    "opt": decoder(path="decoder.layers.{n}.self_attn", rotary=None, bias=biased("enable_bias", default=True)),
    "xglm": decoder(rotary=None, bias=ALL_BIASED, heads=("attention_heads",)),
    "biogpt": decoder(rotary=None, bias=ALL_BIASED),
    "ctrl": decoder(path="h.{n}.multi_head_attention", rotary=None, bias=ALL_BIASED),
    "modernbert-decoder": decoder(
        modernbert_decoder_window,
        bias=biased("attention_bias"),
        path="layers.{n}.attn",
        rotary=MODERNBERT_ROPE,
        layer_type=modernbert_type,
    ),
}

QWEN_GATED = decoder(
    normed(),
    gated(bias="attention_bias"),
    layout="gated queries, norms less 1",
    rotary=Rotary(partial=0.25, sections="thirds"),
    layer_type=every_nth_full("full_attention_interval", 4, other=LINEAR),
    irrelevant="linear_*",
)
LFM2_NORM = normed(eps="norm_eps", default=1e-5)
MAMBA = "mamba_* conv_* ssm_*"  # fields of other kinds of layers
HYBRIDS: dict[str, Family] = {
    "qwen3_next qwen3_5_text qwen3_5_moe_text": QWEN_GATED,
    "kimi_linear": latent_decoder(
        only("mla_use_nope", True),
        only("rope_scaling", None),
        rotary=None,
        layer_type=decoder_traits.kimi_linear_type,
        irrelevant="linear_*",
    ),
    "minimax": decoder(window_everywhere, bias=NO_BIASES, irrelevant="*_alpha_factor *_beta_factor block_size"),
    "falcon_h1": decoder(
        decoder_traits.key_multiplier, irrelevant=f"{MAMBA} attention_in_multiplier attention_out_multiplier projectors_bias"
    ),
    "bamba": decoder(rotary=Rotary(partial=0.5), layer_type=listed_layers("attn_layer_indices", "mamba"), irrelevant=MAMBA),
    "jamba": decoder(rotary=None, bias=NO_BIASES, layer_type=decoder_traits.jamba_type, irrelevant=MAMBA),
    "granitemoehybrid": decoder(GRANITE, decoder_traits.rope_if_named, irrelevant=MAMBA),
    "lfm2": decoder(LFM2_NORM, bias=NO_BIASES, layer_type=listed_layers("full_attn_idxs", "conv", True), irrelevant=MAMBA),
    "lfm2_moe": decoder(LFM2_NORM, bias=NO_BIASES, irrelevant=MAMBA),
    "nemotron_h": decoder(
        path="layers.{n}.mixer",
        rotary=None,
        types_field="layers_block_type",
        irrelevant=f"{MAMBA} chunk_size use_bias use_conv_bias sliding_window",
    ),
    "lfm3": decoder(LFM2_NORM, window, gated("headwise", flag="use_attention_gate"), irrelevant=f"{MAMBA} use_sandwich_norm"),
    "olmo_hybrid": decoder(ALL_HEADS, decoder_traits.rope_if_any, irrelevant="linear_*"),
    "recurrent_gemma": decoder(
        decoder_traits.recurrent_gemma_window,
        path="layers.{n}.temporal_block",
        bias=biased("attention_bias", "qkv", always="o"),
        rotary=Rotary(partial=0.5),
        layer_type=decoder_traits.recurrent_gemma_type,
        irrelevant="*w_init_variance_scale logits_soft_cap",  # of the model's output
    ),
}
