"""Rows of models with an encoder, a decoder and cross-attention: BART and T5, and those that differ from them little."""

from dataclasses import replace

from service.checkpoints.config import Config
from service.checkpoints.families.encoders import BERT
from service.checkpoints.families.row import Attention, Family
from service.checkpoints.families.traits import ALL_BIASED, NO_BIASES, WITHOUT_KEY_BIAS, Trait, biased, constant, only
from service.checkpoints.layout import Fields
from service.checkpoints.rope import Rotary


def t5_bias(bidirectional: bool) -> Trait:
    """T5's table of relative biases, and scores as they are."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        distance = config.get("relative_attention_max_distance", default=128)
        config.ignore("relative_attention_num_buckets")  # the table's length
        return {"relative_bias": {"max_distance": distance, "bidirectional": bidirectional}, "scale": 1.0}

    return trait


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
    **dict.fromkeys(["bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small", "m2m_100"], bart()),
    "fsmt": bart(),
    "mvp": {part: replace(a, traits=(*a.traits, only("use_prompt", False))) for part, a in bart().items()},  # keys of prompts
    "moonshine": moonshine(),
    "whisper": bart(bias=WITHOUT_KEY_BIAS, irrelevant="^mask_"),
    "speech_to_text": bart(),
    "trocr": without_encoder(bart(irrelevant="learned_position|layernorm_embedding")),
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
