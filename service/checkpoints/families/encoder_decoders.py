"""Rows of models with an encoder, a decoder and cross-attention: BART and T5, and those that differ from them little."""

from dataclasses import replace

from service.checkpoints.config import Config
from service.checkpoints.families.encoders import ABSOLUTE, BERT
from service.checkpoints.families.row import AttentionRow, Family
from service.checkpoints.families.traits import ALL_BIASED, NO_BIASES, WITHOUT_KEY_BIAS, Trait, biased, constant, only, with_options
from service.checkpoints.layout import Fields
from service.checkpoints.rope import Rotary


@with_options
def t5_bias(config: Config, bidirectional: bool) -> Fields:
    """T5's table of relative biases, and scores as they are."""
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
    irrelevant: str = "$.",
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
            irrelevant=f"coder_attention_heads|coder_layers|{irrelevant}",
        )
        for part, (side, name) in parts.items()
    }


def t5(table_of_each_block: bool = False) -> Family:
    """T5's encoder, decoder and cross-attention, whose first block has the table of biases for all, unless each has its own."""
    common = AttentionRow(
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


def without(part: str, family: Family) -> Family:
    return {other: attention for other, attention in family.items() if other != part}


SEAMLESS = "^t2u_|^speech_|^vocoder|conv|position_embeddings_type|rotary_embedding_base|variance_predictor|^unit_"  # of its other towers
LONGT5_FIELDS = "|encoder_attention_type|global_block|local_radius"  # of its encoder, which has a window

ENCODER_DECODERS: dict[str, Family] = {
    "bart mbart marian pegasus plbart blenderbot blenderbot-small m2m_100 fsmt speech_to_text": bart(),
    "mvp": bart("encoder_attn", ABSOLUTE, only("use_prompt", False)),  # keys of prompts
    "moonshine": bart(
        "encoder_attn",
        only("pad_head_dim_to_multiple_of", None),
        heads="{side}_num_attention_heads",
        kv_heads="{side}_num_key_value_heads",
        layers="{side}_num_hidden_layers",
        rotary=Rotary(interleaved=True, partial=0.9),
        bias=biased("attention_bias", "qkv"),
        irrelevant="coder_num_|^rope_parameters$",
    ),
    "whisper": bart(bias=WITHOUT_KEY_BIAS, irrelevant="^mask_"),
    "trocr": without("encoder", bart(irrelevant="learned_position|layernorm_embedding")),
    "seamless_m4t seamless_m4t_v2": bart("cross_attention", irrelevant=SEAMLESS, tower="text_"),
    "prophetnet": without(  # its decoder attends to several streams
        "decoder", bart("cross_attn", heads="num_{side}_attention_heads", layers="num_{side}_layers", irrelevant="num_buckets|relative")
    ),
    "nllb-moe": bart("cross_attention"),
    "bigbird_pegasus": without("encoder", bart(irrelevant="attention_type|block", bias=biased("use_bias"))),  # it attends to blocks
    "pegasus_x": without("encoder", bart(irrelevant="num_global_tokens|block|stagger", bias=NO_BIASES)),
    "led": without("encoder", bart(irrelevant="attention_window")),  # it has a window and global tokens
    "t5 mt5 switch_transformers": t5(),
    "umt5": t5(table_of_each_block=True),
    "longt5": {part: replace(a, irrelevant=a.irrelevant + LONGT5_FIELDS) for part, a in without("encoder", t5()).items()},
}
