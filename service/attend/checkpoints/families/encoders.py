"""Rows of encoders of text: BERT and those that differ from it little, encoders made of Llama's layers, text towers.

`ENCODER_DECODERS` also have a decoder with cross-attention: BART and T5, and those that differ from them little.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from attend.checkpoints.config import Config
from attend.checkpoints.families.decoder_traits import gemma4_heads, gemma_values
from attend.checkpoints.families.decoders import GPT_OSS, INTERLEAVED, LLAMA, MODERNBERT_ROPE, THETA_10000
from attend.checkpoints.families.row import AttentionRow, Family, family
from attend.checkpoints.families.traits import (
    ALL_BIASED,
    CONVERSION,
    FULL,
    NO_BIASES,
    NO_ROPE,
    WITHOUT_KEY_BIAS,
    Trait,
    biased,
    constant,
    modernbert_type,
    modernbert_window,
    only,
    require_present,
    sliding,
    window_around,
    with_options,
)
from attend.checkpoints.layout import Fields
from attend.checkpoints.rope import Rotary
from attend.spec_parts import whole

ABSOLUTE = only("position_embedding_type", "absolute")  # positions that are added to the model's input
ABSOLUTE_OR_ROTARY = only("position_embedding_type", "absolute", "rotary", "rope")  # families that rotate whichever it is
BERT = AttentionRow(path="encoder.layer.{n}.attention", kv_heads=(), causal=False, bias=ALL_BIASED, traits=(ABSOLUTE,))
ESMC_NORM = {"kind": "layer", "over": "all", "weights": "own", "eps": 1e-5}


def encoder(*traits: Trait, rotary: Rotary | None = None, **changes: Any) -> Family:
    """BERT's attention with these traits and changes: all biases, RoPE only if `rotary` is given, both directions."""
    positions = ABSOLUTE_OR_ROTARY if rotary else ABSOLUTE
    return {"encoder": replace(BERT, traits=(positions, *traits), rotary=rotary, **changes)}


llama_encoder = partial(family, "encoder", replace(LLAMA, causal=False))


def mobilebert(config: Config) -> Fields:
    """Attention in a bottleneck, whose values may come from outside of it."""
    config.ignore("key_query_shared_bottleneck", "use_bottleneck_attention", "intra_bottleneck_size")
    width = config.count("intra_bottleneck_size" if config.flag("use_bottleneck", default=True) else "hidden_size")
    return {"head_dim": width // config.count("num_attention_heads")}


def original_full(config: Config) -> Fields:
    """BigBird: sparse blocks of keys are another operator."""
    config.ignore("block_size", "num_random_blocks", "use_bias")
    if config.get("attention_type", default="block_sparse") != "original_full":
        raise config.refusal("attention_type", '"original_full"', config.get("attention_type"))
    return {}


def squeezebert(config: Config) -> Fields:
    """Projections are convolutions of width 1 in groups."""
    fields = {"query": "q_groups", "key": "k_groups", "value": "v_groups", "output": "post_attention_groups"}
    config.ignore("output_groups")
    return {CONVERSION: {"groups": {projection: config.count(field) for projection, field in fields.items()}}}


def luke(config: Config) -> Fields:
    """Entities have queries of their own, unless the config says otherwise."""
    require_present(config, "use_entity_aware_attention")
    config.expect("use_entity_aware_attention", False)
    return {}


def rope_if_rotary(config: Config) -> Fields:
    """ESM: RoPE only with `position_embedding_type` rotary; its absolute positions are added to the model's input."""
    config.expect("position_embedding_type", "absolute", "rotary")
    return {} if config.get("position_embedding_type") == "rotary" else NO_ROPE


def every_nth_cross(config: Config) -> Fields:
    """BLIP-2: every second layer, or as the config says, attends to the image."""
    config.ignore("encoder_hidden_size", "use_qformer_text_input")
    if config.layer % (every := config.count("cross_attention_frequency", default=2)):
        raise config.refusal("cross_attention_frequency", f"a divisor of the layer's number {config.layer}", every)
    return {}


def repmixer(config: Config) -> str:
    """MobileCLIP's text encoder: its first and last layers are convolutions."""
    ends = config.flag("use_repmixer_blocks", default=True) and config.layer in (0, config.count("num_hidden_layers") - 1)
    return "conv" if ends else FULL


def _bound(config: Config, field: str) -> int | None:
    """A positive integer; None if the field is absent, 0 or negative."""
    value = whole(config.get(field, default=-1))
    return None if type(value) is int and value <= 0 else config.count(field)


def xlnet(config: Config) -> Fields:
    """Without tokens' types: those would add scores between segments."""
    config.expect("attn_type", "bi")
    config.expect("bi_data", False)
    config.ignore("same_length", "mem_len", "reuse_len")  # of masks and memories in training
    return {"relative_scores": {"kind": "transformer_xl", "max_distance": _bound(config, "clamp_len")}}


@with_options
def deberta(config: Config, width_field: str = "") -> Fields:
    """DeBERTa of all versions. Terms without `pos_att_type` c2p, and layers without relative attention, are refused."""
    config.ignore("position_biased_input", "conv_kernel_size", "legacy")
    if not config.flag("relative_attention", default=False):
        raise config.refusal("relative_attention", "true", False)
    config.expect("talking_head", False)
    terms = config.get("pos_att_type", default=[])
    terms = [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else terms
    if terms not in (["c2p"], ["c2p", "p2c"], ["p2c", "c2p"]):
        raise config.refusal("pos_att_type", "c2p, or c2p and p2c", terms)
    width = config.count("hidden_size") // config.count("num_attention_heads")
    width = config.count(width_field, default=width) if width_field else width
    scores: Fields = {"kind": "disentangled", "position_to_content": "p2c" in terms}
    scores["max_distance"] = _bound(config, "max_relative_positions") or config.count("max_position_embeddings")
    if (buckets := _bound(config, "position_buckets")) is not None:
        scores["buckets"] = buckets
    norms = str(config.get("norm_rel_ebd", default="none")).lower().split("|")
    eps = config.number("layer_norm_eps", default=1e-7) if "layer_norm" in [name.strip() for name in norms] else None
    if eps is not None and not 0 <= eps <= 1:
        raise config.refusal("layer_norm_eps", "a number from 0 to 1", eps)
    conversion = {"table_eps": eps, "projects_table": not config.flag("share_att_key", default=False)}
    return {"scale": (width * (1 + len(terms))) ** -0.5, "relative_scores": scores, CONVERSION: conversion}


DEBERTA = replace(BERT, traits=(deberta(),), table="encoder.rel_embeddings.weight", table_role="distance_table")
LIKE_BERT = "layoutlm markuplm splinter visual_bert tapas dpr"
WITH_CROSS = "bert roberta xlm-roberta camembert electra ernie data2vec-text roberta-prelayernorm roc_bert rembert bert-generation"
CROSS = family("cross", BERT, path="encoder.layer.{n}.crossattention", flag="add_cross_attention")
ENCODERS: dict[str, Family] = {
    LIKE_BERT: encoder(),
    WITH_CROSS: {**encoder(), **CROSS},
    "blip_2_qformer": {
        **encoder(irrelevant="cross_attention_frequency encoder_hidden_size use_qformer_text_input"),
        "cross": replace(BERT, path="encoder.layer.{n}.crossattention", traits=(every_nth_cross,)),
    },
    "xlm-roberta-xl": encoder(ignored=("self_attn_layer_norm.*",)),
    "megatron-bert": encoder(ignored=("ln.*",)),
    "big_bird": encoder(original_full),
    "distilbert": encoder(path="transformer.layer.{n}.attention", irrelevant="hidden_dim"),
    "albert": encoder(
        path="albert_layer_groups.0.albert_layers.0.attention", irrelevant="down_scale_factor gap_size net_structure_type num_memory_blocks"
    ),
    "canine": encoder(irrelevant="local_transformer_stride num_hash_*"),  # its characters attend to blocks, which is not among its parts
    "ibert": encoder(
        only("quant_mode", False), irrelevant="force_dequant", ignored=("*_integer", "*scaling_factor", "*.x_m??", "output.LayerNorm.*")
    ),
    "luke": encoder(luke),
    "squeezebert": encoder(
        squeezebert,
        path="encoder.layers.{n}",
        layout="convolutions",
        ignored=("intermediate.*", "output.*", "post_attention.layernorm.*"),
    ),
    "xmod": encoder(irrelevant="adapter_*"),
    "mobilebert": encoder(mobilebert, irrelevant="normalization_type"),
    "mpnet": encoder(
        constant(relative_bias={"max_distance": 128, "bidirectional": True}),
        only("relative_attention_num_buckets", 32),  # transformers counts 32 buckets regardless of the config
        table="encoder.relative_attention_bias.weight",
    ),
    "deberta": family("encoder", DEBERTA, layout="grouped", bias=WITHOUT_KEY_BIAS),
    "deberta-v2": {"encoder": replace(DEBERTA, traits=(deberta("attention_head_size"),), head_dim=("attention_head_size",))},
    "xlnet": {"encoder": AttentionRow("layer.{n}.rel_attn", "xlnet", head_dim=("d_head",), causal=False, bias=NO_BIASES, traits=(xlnet,))},
    "esm": encoder(rope_if_rotary, rotary=THETA_10000),
    "roformer": encoder(only("rotary_value", False), rotary=replace(INTERLEAVED, theta=10000.0, fixed=True)),
    "nomic_bert": encoder(path="encoder.layers.{n}.attn", layout="stacked", rotary=Rotary(), bias=NO_BIASES),
    "gte": encoder(path="encoder.layer.{n}.attention", layout="stacked", rotary=Rotary()),
    "jina_embeddings_v3": encoder(path="encoder.layers.{n}.mixer", layout="stacked", rotary=Rotary()),
    "esmc": llama_encoder(constant(qk_norm=ESMC_NORM)),
    "embedding_gemma2_text": llama_encoder(gemma4_heads, window_around, gemma_values),
    "eurobert": llama_encoder(),
    "ultrabert": llama_encoder(window_around),
    "modernbert": encoder(
        modernbert_window,
        path="layers.{n}.attn",
        layout="stacked",
        bias=biased("attention_bias"),
        rotary=MODERNBERT_ROPE,
        layer_type=modernbert_type,
    ),
    "openai_privacy_filter": {
        "encoder": replace(GPT_OSS, causal=False, traits=(constant(sinks=True), window_around), layer_type=sliding, rotary=INTERLEAVED)
    },
    "clip_text_model": family("text", BERT, causal=True, path="encoder.layers.{n}.self_attn"),
    "siglip_text_model": family("text", BERT, path="encoder.layers.{n}.self_attn"),
    "tipsv2_text_model": family("text", BERT, path="transformer.resblocks.{n}.attn", layout="stacked", irrelevant="scale_sqrt_depth"),
    "sam3_lite_text_text_model": family("text", BERT, path="layers.{n}.self_attn", layer_type=repmixer),
    "git": family("decoder", BERT, causal=True),
    "xlm flaubert": encoder(only("causal", False), path="attentions.{n}"),
}


@with_options
def t5_bias(config: Config, bidirectional: bool) -> Fields:
    """T5's table of relative biases, and scale 1."""
    distance = config.get("relative_attention_max_distance", default=128)
    config.ignore("relative_attention_num_buckets")  # the table's length
    return {"relative_bias": {"max_distance": distance, "bidirectional": bidirectional}, "scale": 1.0}


def bart(
    cross: str = "encoder_attn",
    *traits: Trait,
    tower: str = "",
    heads: str = "{side}_attention_heads",
    kv_heads: str = "",
    layers: str = "{side}_layers",
    rotary: Rotary | None = None,
    bias: Trait = ALL_BIASED,
    irrelevant: str = "",
) -> Family:
    """BART's encoder, decoder and cross-attention. `tower` precedes their names; `rotary` is that of self-attention."""
    parts = {"encoder": ("encoder", "self_attn"), "decoder": ("decoder", "self_attn"), "cross": ("decoder", cross)}
    return {
        part: replace(
            BERT,
            path=f"{tower}{side}.layers.{{n}}.{name}",
            heads=(heads.format(side=side),),
            kv_heads=(kv_heads.format(side=side),) if kv_heads else (),
            layers=(layers.format(side=side),),
            causal=part == "decoder",
            bias=bias,
            rotary=None if part == "cross" else rotary,
            traits=traits or BERT.traits,
            irrelevant=f"num_hidden_layers encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads {irrelevant}",
        )
        for part, (side, name) in parts.items()
    }


def t5(table_of_each_block: bool = False) -> Family:
    """T5's encoder, decoder and cross-attention, whose first block has the table of biases for all, unless each has its own."""
    common = AttentionRow(
        layout="t5",
        heads=("num_heads",),
        head_dim=("d_kv",),
        kv_heads=(),
        causal=False,
        bias=NO_BIASES,
        irrelevant="num_decoder_layers is_gated_act scale_decoder_outputs",
    )
    own = "block.{n}.layer.0.SelfAttention"
    tables = {stack: f"{stack}.{own}.relative_attention_bias.weight" if table_of_each_block else "" for stack in ("encoder", "decoder")}
    decoder_layers = ("num_decoder_layers", "num_layers")
    return {
        "encoder": replace(common, path=f"encoder.{own}", traits=(t5_bias(True),), table=tables["encoder"]),
        "decoder": replace(
            common, path=f"decoder.{own}", traits=(t5_bias(False),), table=tables["decoder"], layers=decoder_layers, causal=True
        ),
        "cross": replace(
            common,
            path="decoder.block.{n}.layer.1.EncDecAttention",
            traits=(constant(scale=1.0),),
            layers=decoder_layers,
            irrelevant="num_decoder_layers relative_attention_* is_gated_act scale_decoder_outputs",
        ),
    }


def without(part: str, family: Family) -> Family:
    return {other: attention for other, attention in family.items() if other != part}


SEAMLESS = """t2u_* speech_* conv_* num_conv_* position_embeddings_type rotary_embedding_base
left_max_position_embeddings right_max_position_embeddings"""  # of its other towers
LONGT5_FIELDS = " encoder_attention_type global_block_size local_radius"  # of its encoder, which has a window

ENCODER_DECODERS: dict[str, Family] = {
    "bart mbart marian pegasus plbart blenderbot blenderbot-small m2m_100 fsmt": bart(),
    "speech_to_text": bart(irrelevant="conv_* num_conv_layers"),
    "mvp": bart("encoder_attn", ABSOLUTE, only("use_prompt", False), irrelevant="prompt_*"),  # keys of prompts
    "moonshine": bart(
        "encoder_attn",
        only("pad_head_dim_to_multiple_of", None),
        heads="{side}_num_attention_heads",
        kv_heads="{side}_num_key_value_heads",
        layers="{side}_num_hidden_layers",
        rotary=Rotary(interleaved=True, partial=0.9),
        bias=biased("attention_bias", "qkv"),
        irrelevant="encoder_num_* decoder_num_* rope_parameters",
    ),
    "whisper": bart(bias=WITHOUT_KEY_BIAS),
    "trocr": without("encoder", bart(irrelevant="use_learned_position_embeddings layernorm_embedding")),
    "seamless_m4t seamless_m4t_v2": bart("cross_attention", irrelevant=SEAMLESS, tower="text_"),
    "prophetnet": without(  # its decoder attends to several streams
        "decoder",
        bart(
            "cross_attn",
            heads="num_{side}_attention_heads",
            layers="num_{side}_layers",
            irrelevant="num_*_layers num_*_attention_heads num_buckets relative_max_distance ngram eps",
        ),
    ),
    "nllb-moe": bart("cross_attention"),
    "bigbird_pegasus": without(
        "encoder", bart(irrelevant="attention_type block_size num_random_blocks", bias=biased("use_bias"))
    ),  # it attends to blocks
    "pegasus_x": without("encoder", bart(irrelevant="num_global_tokens block_size stagger_local_blocks", bias=NO_BIASES)),
    "led": without("encoder", bart(irrelevant="attention_window")),  # it has a window and global tokens
    "t5 mt5 switch_transformers": t5(),
    "umt5": t5(table_of_each_block=True),
    "longt5": {part: replace(a, irrelevant=a.irrelevant + LONGT5_FIELDS) for part, a in without("encoder", t5()).items()},
}
