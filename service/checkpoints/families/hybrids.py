"""Rows of decoders that have softmax attention in some layers, or beside something else: Mamba, linear attention, convolutions."""

from service.checkpoints.families import decoder_traits
from service.checkpoints.families.decoders import ALL_HEADS, GRANITE, decoder, latent_decoder
from service.checkpoints.families.layer_types import (
    LINEAR,
    every_nth_full,
    jamba_type,
    kimi_linear_type,
    listed,
    recurrent_gemma_type,
)
from service.checkpoints.families.row import Family
from service.checkpoints.families.traits import NO_BIASES, biased, gated, normed, only, window, window_everywhere
from service.checkpoints.rope import Rotary

QWEN_GATED = decoder(
    normed(),
    gated(bias="attention_bias"),
    layout="gated queries, norms less 1",
    rotary=Rotary(partial=0.25, sections="thirds"),
    layer_type=every_nth_full("full_attention_interval", 4, other=LINEAR),
    irrelevant="^linear_",
)
LFM2_NORM = normed(eps="norm_eps", default=1e-5)
MAMBA = "mamba|conv|ssm|^chunk_size$|multipliers?$|projectors_bias|^linear_|^use_bias$|variance_scale"  # fields of other kinds of layers
HYBRIDS: dict[str, Family] = {
    "qwen3_next qwen3_5_text qwen3_5_moe_text": QWEN_GATED,
    "kimi_linear": latent_decoder(
        only("mla_use_nope", True), only("rope_scaling", None), rotary=None, layer_type=kimi_linear_type, irrelevant="^linear_"
    ),
    "minimax": decoder(window_everywhere, bias=NO_BIASES, irrelevant="_(alpha|beta)_factor$"),
    "falcon_h1": decoder(decoder_traits.key_multiplier, irrelevant=MAMBA),
    "bamba": decoder(rotary=Rotary(partial=0.5), layer_type=listed("attn_layer_indices", "mamba"), irrelevant=MAMBA),
    "jamba": decoder(rotary=None, bias=NO_BIASES, layer_type=jamba_type, irrelevant=MAMBA),
    "granitemoehybrid": decoder(GRANITE, decoder_traits.rope_if_named, irrelevant=MAMBA),
    "lfm2": decoder(LFM2_NORM, bias=NO_BIASES, layer_type=listed("full_attn_idxs", "conv", True), irrelevant=MAMBA),
    "lfm2_moe": decoder(LFM2_NORM, bias=NO_BIASES, irrelevant=MAMBA),
    "nemotron_h": decoder(path="layers.{n}.mixer", rotary=None, types_field="layers_block_type", irrelevant=f"{MAMBA}|^sliding_window$"),
    "lfm3": decoder(normed(), window, gated("headwise", flag="use_attention_gate"), irrelevant=f"{MAMBA}|sandwich_norm"),
    "olmo_hybrid": decoder(ALL_HEADS, decoder_traits.rope_if_any, irrelevant=MAMBA),
    "recurrent_gemma": decoder(
        decoder_traits.recurrent_gemma_window,
        path="layers.{n}.temporal_block",
        bias=biased("attention_bias", "qkv", always="o"),
        rotary=Rotary(partial=0.5),
        layer_type=recurrent_gemma_type,
        irrelevant=MAMBA,
    ),
}
