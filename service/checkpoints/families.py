"""The table of model families: `model_type` -> where its attention layers are, and how its config's fields become a LayerSpec.

Every row was compared with transformers' own eager attention; `docs/checkpoints.md` has the largest differences. A row says only what
differs from Llama: for most families that is one or two words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from service.checkpoints.config import Config, rope_fields
from service.checkpoints.layout import Fields

Traits = Callable[[Config, int, str], Fields]  # config, layer, layer type -> fields
LINEAR = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "rwkv", "minimax_linear")


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of attention layer of a family."""

    path: str = "layers.{n}.self_attn"  # the end of the layer's name in the checkpoint
    layout: str = "llama"
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    width: tuple[str, ...] = ("hidden_size",)
    head_dim: tuple[str, ...] = ("head_dim",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    rotary: bool = True
    theta: float | None = 10000.0  # None: required in the config
    partial: float = 1.0
    interleaved: bool = False
    causal: bool = True
    layer_type: Callable[[Config, int], str] = lambda config, n: "full_attention"  # where the config has no layer_types
    more: tuple[Traits, ...] = ()
    irrelevant: str = ""  # pattern of fields that sound like attention and are not about it
    tables: tuple[str, ...] = ()  # endings of tensors outside the layer that it needs


Family = Mapping[str, Attention]  # part -> attention: encoder, decoder, cross, vision, text


def layer_type(attention: Attention, config: Config, n: int) -> str:
    return config.each("layer_types", n) or attention.layer_type(config, n)


def fields_of(attention: Attention, config: Config, n: int) -> Fields:
    """Fields of LayerSpec for layer n. Raises InvalidRequest."""
    attention.layer_type(config, n)  # reads the fields that layer_types replace
    kind = layer_type(attention, config, n)
    if kind in LINEAR:
        raise config.refusal("layer_types", f"softmax attention in layer {n}", kind)
    heads = config.count(*attention.heads)
    fields: Fields = {"num_heads": heads}
    if (kv_heads := config.get(*attention.kv_heads)) is not None:
        fields["num_kv_heads"] = kv_heads
    fields["head_dim"] = config.get(*attention.head_dim) or config.count(*attention.width) // heads
    config.get(*attention.width)
    if attention.rotary:
        fields["rope"] = rope_fields(config, kind, fields["head_dim"], attention.theta, attention.partial, attention.interleaved)
    else:
        fields["rope"] = None
    for trait in attention.more:
        fields |= trait(config, n, kind)
    return fields


def window(config: Config, n: int, kind: str) -> Fields:
    """A window in layers of type sliding_attention."""
    config.ignore("sliding_window")
    return {"window": {"left": config.count("sliding_window") - 1}} if kind == "sliding_attention" else {}


def window_everywhere(config: Config, n: int, kind: str) -> Fields:
    """A window in every layer, unless the config has none."""
    return {"window": {"left": config.count("sliding_window") - 1}} if config.get("sliding_window") is not None else {}


def biased(field: str | None, projections: str, otherwise: bool = False, default: bool = False) -> Traits:
    """Biases of these projections (letters q, k, v, o) if the flag `field` is true, or always if it is None; of others `otherwise`."""

    def trait(config: Config, n: int, kind: str) -> Fields:
        on = field is None or config.flag(field, default=default)
        names = ("query", "key", "value", "output")
        return {"bias": {name: on if letter in projections else otherwise for name, letter in zip(names, "qkvo", strict=True)}}

    return trait


def scale(field: str, power: float = 1.0) -> Traits:
    """The factor of scores is a field of the config, raised to `power`."""
    return lambda config, n, kind: {"scale": config.number(field) ** power}


def capped(config: Config, n: int, kind: str) -> Fields:
    cap = config.get("attn_logit_softcapping")
    return {"softcap": None if cap is None else config.number("attn_logit_softcapping")}


def normed(eps: str = "rms_norm_eps", default: float = 1e-6, flag: str | None = None, kind: str = "rms") -> Traits:
    """A norm of queries and keys, head by head, before RoPE; only if `flag` is true, if given."""

    def trait(config: Config, n: int, _: str) -> Fields:
        on = flag is None or config.flag(flag, default=False)
        return {"qk_norm": {"kind": kind, "eps": config.number(eps, default=default)} if on else None}

    return trait


def without_rope(config: Config, n: int, kind: str) -> Fields:
    """`no_rope_layers`: 1 where a layer has RoPE, 0 where it has none; by default every fourth has none."""
    config.ignore("no_rope_layer_interval")
    flag = config.each("no_rope_layers", n)
    every = config.get("no_rope_layer_interval", default=4)
    return {} if (flag if flag is not None else (n + 1) % every) else {"rope": None}


def rope_if_sliding(config: Config, n: int, kind: str) -> Fields:
    """Only layers with a window have RoPE."""
    return {} if kind == "sliding_attention" else {"rope": None}


def every_nth_full(field: str, default: int) -> Callable[[Config, int], str]:
    """Every nth layer is full attention, n given by `field`; the others have a window."""
    return lambda config, n: "full_attention" if (n + 1) % int(config.number(field, default=default)) == 0 else "sliding_attention"


def qwen_layer_type(config: Config, n: int) -> str:
    config.ignore("max_window_layers", "sliding_window")
    sliding = config.flag("use_sliding_window", default=False) and config.get("sliding_window") is not None
    return "sliding_attention" if sliding and n >= config.number("max_window_layers", default=28) else "full_attention"


def decoder(**changes: object) -> Family:
    return {"decoder": replace(LLAMA, **changes)}  # type: ignore[arg-type]


LLAMA = Attention(more=(biased("attention_bias", "qkvo"),))
PLAIN = (biased(None, ""),)  # no biases
GEMMA = Attention(more=(biased("attention_bias", "qkvo"), scale("query_pre_attn_scalar", -0.5)))
ROWS: dict[str, Family] = {
    "llama": decoder(),
    "arcee": decoder(),
    "gemma": decoder(),
    "mistral": decoder(more=(*PLAIN, window_everywhere)),
    "mixtral": decoder(more=(*PLAIN, window_everywhere)),
    "ministral": decoder(more=(*PLAIN, window), layer_type=lambda config, n: "sliding_attention"),
    "qwen2": decoder(more=(biased(None, "qkv"), window), layer_type=qwen_layer_type),
    "qwen2_moe": decoder(more=(biased("qkv_bias", "qkv", default=True), window), layer_type=qwen_layer_type),
    "qwen3": decoder(more=(*LLAMA.more, normed(), window), layer_type=qwen_layer_type),
    "granite": decoder(more=(*LLAMA.more, scale("attention_multiplier"))),
    "granitemoe": decoder(more=(*LLAMA.more, scale("attention_multiplier"))),
    "granitemoeshared": decoder(more=(*LLAMA.more, scale("attention_multiplier"))),
    "smollm3": decoder(more=(*LLAMA.more, without_rope, window), layer_type=qwen_layer_type),
    "gemma2": decoder(more=(*GEMMA.more, capped, window), layer_type=lambda config, n: "full_attention" if n % 2 else "sliding_attention"),
}
REFUSED: dict[str, str] = {}
FAMILIES = ROWS
