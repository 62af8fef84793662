"""The table of model families: `model_type` -> where its attention layers are, and how its config's fields become a LayerSpec.

A row says only what differs from Llama, for most families one or two words. `tests/golden/generate_models.py` compares every row with
transformers' own eager attention; `docs/checkpoints.md` lists them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.checkpoints.config import Config
from service.checkpoints.layout import Fields
from service.checkpoints.rope import Rotary, rope_fields
from service.spec import PROJECTIONS

Trait = Callable[[Config, int, str], Fields]  # config, number of the layer, layer type -> fields of LayerSpec
LayerType = Callable[[Config, int], str]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of attention layer of a family: names of the config's fields, and traits that its code has whatever the config says."""

    path: str = "layers.{n}.self_attn"  # the end of the layer's name in the checkpoint
    layout: str = "separate"
    heads: tuple[str, ...] = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    width: tuple[str, ...] = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
    head_dim: tuple[str, ...] = ("head_dim",)
    layers: tuple[str, ...] = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    rotary: Rotary | None = None
    causal: bool = True
    bias: Trait | None = None  # None: the tensors tell
    traits: tuple[Trait, ...] = ()
    layer_type: LayerType | None = None  # for configs without layer_types
    types: tuple[str, ...] = (FULL, SLIDING)  # that are computed
    table: str = ""  # the end of the name of a table of relative biases
    ignored: tuple[str, ...] = ()  # patterns of tensors below the layer's name that are without effect
    irrelevant: str = ""  # pattern of fields that sound like attention and are without effect


Family = Mapping[str, Attention]  # part -> attention


def fields_of(attention: Attention, config: Config, n: int) -> Fields:
    """Fields of LayerSpec for layer n. Raises InvalidRequest."""
    kind = attention.layer_type(config, n) if attention.layer_type else FULL
    kind = config.each("layer_types", n) or kind
    if kind not in attention.types:
        raise config.refusal("layer_types", f"{' or '.join(attention.types)} in layer {n}", kind)
    heads, width = config.count(*attention.heads), config.get(*attention.width)
    head_dim = config.get(*attention.head_dim) or (config.count(*attention.width) // heads if width else None)
    fields: Fields = {"num_heads": heads, "head_dim": head_dim, "sinks": False, "qk_norm": None, "relative_bias": None, "rope": None}
    if (kv_heads := config.get(*attention.kv_heads) if attention.kv_heads else None) is not None:
        fields["num_kv_heads"] = kv_heads
    for trait in attention.traits:
        fields |= trait(config, n, kind)
    if attention.rotary:
        rope = rope_fields(config, attention.rotary, kind, fields["head_dim"])
        fields["rope"] = fields["rope"] if fields["rope"] == WITHOUT else rope
    fields["rope"] = None if fields["rope"] == WITHOUT else fields["rope"]
    return fields | (attention.bias(config, n, kind) if attention.bias else {})


# --- traits ---

WITHOUT: Fields = {"dims": 0}  # marks a layer without RoPE in a model with it


def constant(**fields: Any) -> Trait:
    return lambda config, n, kind: fields


def biased(field: str | None, letters: str = "qkvo", default: bool = False) -> Trait:
    """Biases of the projections in `letters` if the flag `field` is true, or in any case if it is None."""

    def trait(config: Config, n: int, kind: str) -> Fields:
        on = field is None or config.flag(field, default=default)
        return {"bias": {name: on and letter in letters for name, letter in zip(PROJECTIONS, "qkvo", strict=True)}}

    return trait


def window(config: Config, n: int, kind: str) -> Fields:
    """A window in layers of type sliding_attention."""
    config.ignore("sliding_window")
    return {"window": {"left": config.count("sliding_window") - 1}} if kind == SLIDING else {}


def window_everywhere(config: Config, n: int, kind: str) -> Fields:
    """A window in every layer, unless the config has none."""
    return {"window": {"left": config.count("sliding_window") - 1}} if config.get("sliding_window") is not None else {}


def window_around(config: Config, n: int, kind: str, field: str = "sliding_window", half: bool = False) -> Fields:
    """A window to both sides in layers of type sliding_attention; `half`: the field is the width of both sides together."""
    reach = config.count(field) // 2 if half else config.count(field) - 1
    return {"window": {"left": reach, "right": reach}} if kind == SLIDING else {}


def scale(field: str, power: float = 1.0, default: float | None = None) -> Trait:
    """The factor of scores is a field of the config, raised to `power`."""
    return lambda config, n, kind: {"scale": config.number(field, default=default) ** power}


def capped(config: Config, n: int, kind: str) -> Fields:
    cap = config.get("attn_logit_softcapping")
    return {"softcap": None if cap is None else config.number("attn_logit_softcapping")}


def normed(flag: str | None = None, *, eps: str = "rms_norm_eps", default: float = 1e-6, on: bool = False, **norm: Any) -> Trait:
    """A norm of queries and keys; if `flag` is given, only where that field is true (by default `on`)."""

    def trait(config: Config, n: int, kind: str) -> Fields:
        there = flag is None or config.flag(flag, default=on)
        return {"qk_norm": {"kind": "rms", **norm, "eps": config.number(eps, default=default)} if there else None}

    return trait


def no_rope_layers(config: Config, n: int, kind: str) -> Fields:
    """`no_rope_layers`: 1 where a layer has RoPE, 0 where it has none; by default every fourth has none."""
    flag, every = config.each("no_rope_layers", n), config.get("no_rope_layer_interval", default=4)
    return {} if (flag if flag is not None else (n + 1) % every) else {"rope": WITHOUT}


def rope_if_sliding(config: Config, n: int, kind: str) -> Fields:
    """Where some layers have a window, only those have RoPE."""
    return {} if kind == SLIDING or config.get("sliding_window") is None else {"rope": WITHOUT}


def refused(field: str, *values: Any) -> Trait:
    """Other values of this field than these are refused."""

    def trait(config: Config, n: int, kind: str) -> Fields:
        config.expect(field, *values)
        return {}

    return trait


def kv_heads(field: str, default: int | None = None) -> Trait:
    return lambda config, n, kind: {"num_kv_heads": config.get(field, default=default) or config.count("num_attention_heads", "n_head")}


# --- layer types of configs that do not list them ---


def every_nth_full(field: str, default: int) -> LayerType:
    return lambda config, n: FULL if (n + 1) % int(config.number(field, default=default)) == 0 else SLIDING


def alternating(config: Config, n: int) -> str:
    return FULL if n % 2 else SLIDING


def qwen_type(config: Config, n: int) -> str:
    config.ignore("max_window_layers", "sliding_window")
    sliding = config.flag("use_sliding_window", default=False) and config.get("sliding_window") is not None
    return SLIDING if sliding and n >= config.number("max_window_layers", default=28) else FULL


def sliding(config: Config, n: int) -> str:
    return SLIDING


# --- the table ---

LLAMA = Attention(rotary=Rotary(), bias=biased("attention_bias"))


def decoder(*traits: Trait, **changes: Any) -> Family:
    """Llama's attention with these traits and changes."""
    return {"decoder": replace(LLAMA, traits=traits, **changes)}


def encoder(path: str = "encoder.layer.{n}.attention", *traits: Trait, **changes: Any) -> Family:
    """BERT's attention: all biases, no RoPE, both directions."""
    return {"encoder": replace(BERT, path=path, traits=traits, **changes)}


BERT = Attention(kv_heads=(), causal=False, bias=biased(None))
PLAIN, QKV = biased(None, ""), biased(None, "qkv")
PAIRS = Rotary(interleaved=True)
ABSOLUTE = refused("position_embedding_type", "absolute")
GRANITE = scale("attention_multiplier", default=1.0)
PRE_SCALAR = scale("query_pre_attn_scalar", -0.5, default=256)
ALL_HEADS = normed(over="all", weights="own")

DECODERS: dict[str, Family] = {
    **dict.fromkeys(("llama", "arcee", "gemma", "aria_text", "csm", "jais2", "iquestcoder", "higgs_audio_v2"), decoder()),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "hyperclovax"), decoder(GRANITE)),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), decoder(GRANITE, window)),
    **dict.fromkeys(("mistral", "mixtral"), decoder(window_everywhere, bias=PLAIN)),
    "ministral": decoder(window, bias=PLAIN, layer_type=sliding),
    "cwm": decoder(window, bias=PLAIN, layer_type=sliding),
    "qwen2": decoder(window, bias=QKV, layer_type=qwen_type),
    "qwen2_moe": decoder(window, bias=biased("qkv_bias", "qkv", default=True), layer_type=qwen_type),
    "qwen3": decoder(normed(), window, layer_type=qwen_type),
    "qwen3_moe": decoder(normed(), window_everywhere, irrelevant="use_sliding_window|max_window_layers"),
    "seed_oss": decoder(bias=biased("attention_bias", "qkv", default=True)),
    "smollm3": decoder(no_rope_layers, window, layer_type=qwen_type),
    "starcoder2": decoder(window_everywhere, bias=biased("use_bias", default=True)),
    "dots1": decoder(normed(), window, layer_type=lambda config, n: FULL),
    "apertus": decoder(normed()),
    "mellum": decoder(normed(), window),
    "hy_v3": decoder(normed()),
    "exaone4": decoder(normed(), window, rope_if_sliding, bias=PLAIN, irrelevant="sliding_window_pattern"),
    "exaone_moe": decoder(normed(), window, rope_if_sliding, bias=PLAIN, irrelevant="sliding_window_pattern"),
    "olmo": decoder(refused("clip_qkv", None)),
    "olmo2": decoder(ALL_HEADS),
    "olmo3": decoder(ALL_HEADS, window, layer_type=every_nth_full("sliding_window_pattern", 4), rotary=Rotary(scaled=(FULL,))),
    "olmoe": decoder(ALL_HEADS, refused("clip_qkv", None)),
    "flex_olmo": decoder(ALL_HEADS),
    "minimax_m2": decoder(ALL_HEADS, bias=PLAIN),
    "cohere": decoder(normed("use_qk_norm", kind="layer", weights="own", eps="layer_norm_eps", default=1e-5), rotary=PAIRS),
    "cohere2": decoder(window, rope_if_sliding, rotary=PAIRS, layer_type=every_nth_full("sliding_window_pattern", 4)),
    "ernie4_5": decoder(bias=biased("use_bias"), rotary=PAIRS),
    "ernie4_5_moe": decoder(bias=biased("use_bias"), rotary=PAIRS),
    **dict.fromkeys(("glm", "glm4"), decoder(bias=biased("attention_bias", "qkv"), rotary=Rotary(interleaved=True, partial=0.5))),
    "glm4_moe": decoder(normed("use_qk_norm"), bias=biased("attention_bias", "qkv"), rotary=Rotary(partial=0.5)),
    "helium": decoder(bias=biased("attention_bias", "qkv"), rotary=PAIRS),
    "internlm3": decoder(bias=biased("qkv_bias", "qkv"), rotary=Rotary()),
    "nemotron": decoder(rotary=Rotary(partial=0.5)),
    "nanochat": decoder(normed(weights="none", after_rope=True), rotary=Rotary(backwards=True)),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), decoder(normed(after_rope=True))),
    "stablelm": decoder(refused("qk_layernorm", False), bias=biased("use_qkv_bias", "qkv"), rotary=Rotary(partial=0.25)),
    "phimoe": decoder(window_everywhere),
    "phi": decoder(
        normed("qk_layernorm", kind="layer", bias=True, eps="layer_norm_eps", default=1e-5), bias=biased(None), rotary=Rotary(partial=0.5)
    ),
    "phi3": decoder(window_everywhere, bias=PLAIN, layout="stacked"),
    "persimmon": decoder(
        normed("qk_layernorm", kind="layer", bias=True, eps="layer_norm_eps", default=1e-5, on=True),
        bias=biased(None),
        layout="grouped",
        rotary=Rotary(theta=25000.0, partial=0.5),
    ),
    "gpt_oss": decoder(constant(sinks=True), window, bias=biased("attention_bias", default=True), layer_type=alternating),
    "gemma2": decoder(PRE_SCALAR, capped, window, layer_type=alternating),
    "vaultgemma": decoder(PRE_SCALAR, capped, window, layer_type=alternating),
    "gemma3_text": decoder(
        PRE_SCALAR,
        capped,
        window,
        normed(),
        refused("use_bidirectional_attention", False),
        layout="separate, norms less 1",
        layer_type=every_nth_full("sliding_window_pattern", 6),
        rotary=Rotary(theta=1e6, thetas={SLIDING: "rope_local_base_freq"}, scaled=(FULL,)),
    ),
    "gpt_neox": decoder(
        path="layers.{n}.attention", layout="grouped", bias=biased("attention_bias", default=True), rotary=Rotary(partial=0.25)
    ),
    "gptj": decoder(path="h.{n}.attn", bias=PLAIN, rotary=PAIRS),
    "codegen": decoder(path="h.{n}.attn", bias=PLAIN, rotary=PAIRS, layout="codegen"),
    **dict.fromkeys(("gpt2", "gpt-sw3"), decoder(path="h.{n}.attn", layout="conv", rotary=None, bias=biased(None))),
    "openai-gpt": decoder(path="h.{n}.attn", layout="conv", rotary=None, bias=biased(None)),
    "gpt_bigcode": decoder(path="h.{n}.attn", layout="stacked", rotary=None, bias=biased(None)),
    "gpt_neo": decoder(path="h.{n}.attn.attention", rotary=None, bias=biased(None, "o")),
    "bloom": decoder(constant(alibi=True), path="h.{n}.self_attention", layout="grouped", rotary=None, bias=biased(None)),
    "falcon": decoder(path="h.{n}.self_attention", layout="grouped", bias=biased("bias")),
    "mpt": decoder(path="blocks.{n}.attn", layout="stacked", rotary=None, bias=PLAIN),
    "opt": decoder(path="decoder.layers.{n}.self_attn", rotary=None, bias=biased("enable_bias", default=True)),
    "xglm": decoder(rotary=None, bias=biased(None), heads=("attention_heads",)),
    "biogpt": decoder(rotary=None, bias=biased(None)),
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
            "xlm-roberta-xl",
            "roc_bert",
            "layoutlm",
            "markuplm",
            "splinter",
            "visual_bert",
            "rembert",
            "bert-generation",
            "tapas",
            "big_bird",
            "megatron-bert",
        ],
        encoder(),
    ),
    "distilbert": encoder("transformer.layer.{n}.attention"),
    "albert": encoder("albert_layer_groups.0.albert_layers.0.attention"),
    "mpnet": encoder(
        "encoder.layer.{n}.attention",
        constant(relative_bias={"max_distance": 128, "bidirectional": True}),
        table="encoder.relative_attention_bias.weight",
    ),
    "esm": encoder("encoder.layer.{n}.attention", rotary=Rotary()),
    "roformer": encoder("encoder.layer.{n}.attention", rotary=PAIRS),
    "nomic_bert": encoder("layers.{n}.attn", rotary=Rotary()),
    "eurobert": {"encoder": replace(LLAMA, causal=False)},
    "modernbert": encoder("layers.{n}.attn", layout="stacked", rotary=Rotary()),
    "clip_text_model": {"text": replace(BERT, causal=True, path="encoder.layers.{n}.self_attn")},
}
REFUSED: dict[str, str] = {}
FAMILIES: dict[str, Family] = DECODERS | ENCODERS
