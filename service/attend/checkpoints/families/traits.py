"""Traits: functions from a layer's config to fields of LayerSpec, for what the fields of a row cannot say.

A trait reads every field that it depends on, or marks it as ignored, since `Config.require_all_read` refuses the others. Traits of a single
family are beside its row, for decoders in `decoder_traits.py`. Rules for the types of layers are at the end.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from attend.checkpoints.config import Config
from attend.checkpoints.layout import Fields
from attend.checkpoints.rope import score_mscale
from attend.spec_parts import PROJECTIONS

P = ParamSpec("P")
Trait = Callable[[Config], Fields]  # config of a layer -> fields of LayerSpec
LayerType = Callable[[Config], str]  # config of a layer -> its type
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
WIDEST_HEAD = 1 << 16
# Among the fields that traits give: how tensors are converted. `factors`: projection or norm -> factor of its weights; `groups`: projection
# -> groups of its convolution of width 1; `table_eps`: of the layer norm of a table of distances; `projects_table`: if it is projected.
CONVERSION = "conversion"
STAGE = "stage"  # among the fields of a config: the number of a layer's stage, in families with stages
NO_ROPE: Fields = {"rope": None}  # of a layer without RoPE in a model with it


def with_options(trait: Callable[Concatenate[Config, P], Fields]) -> Callable[P, Trait]:
    """A decorator for traits with options: `scale("field")` is then a trait, a function of the config alone."""
    return lambda *args, **options: lambda config: trait(config, *args, **options)


@with_options
def constant(config: Config, /, **fields: Any) -> Fields:
    return fields


@with_options
def only(config: Config, field: str, *values: Any) -> Fields:
    """Refuses every value of this field but these."""
    config.expect(field, *values)
    return {}


def require_present(config: Config, field: str) -> None:
    """Raises InvalidRequest if the field is left out, where null has a meaning and transformers' default is another."""
    if field not in config.fields:
        raise config.refusal(field, "a value, or null", None)


# --- biases of projections ---


@with_options
def biased(config: Config, flag: str | None = None, letters: str = "qkvo", *, always: str = "", default: bool = False) -> Fields:
    """Biases of the projections in `letters` if the field `flag` is true, or in any case if it is None; and of those in `always`."""
    with_bias = always + (letters if flag is None or config.flag(flag, default=default) else "")
    return {"bias": {name: letter in with_bias for name, letter in zip(PROJECTIONS, "qkvo", strict=True)}}


@with_options
def biased_apart(config: Config, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Fields:
    """Biases of queries, keys and values by one flag, of the output by another; each may have several names."""
    qkv, output = config.flag(*inputs, default=False), config.flag(*outputs, default=False)
    return {"bias": dict(zip(PROJECTIONS, (qkv, qkv, qkv, output), strict=True))}


ALL_BIASED, NO_BIASES, QKV, WITHOUT_KEY_BIAS = biased(), biased(letters=""), biased(letters="qkv"), biased(letters="qvo")


# --- windows and chunks ---


def window(config: Config) -> Fields:
    """A window in layers of type sliding_attention."""
    config.ignore("sliding_window")
    return {"window": {"left": config.count("sliding_window") - 1}} if config.layer_type == SLIDING else {}


def window_everywhere(config: Config) -> Fields:
    """A window in every layer, unless `sliding_window` is null; it may not be left out."""
    require_present(config, "sliding_window")
    return {"window": {"left": config.count("sliding_window") - 1}} if config.get("sliding_window") is not None else {}


def window_around(config: Config) -> Fields:
    """A window of sliding_window keys to both sides in layers of type sliding_attention."""
    reach = config.count("sliding_window")
    return {"window": {"left": reach, "right": reach}} if config.layer_type == SLIDING else {}


def window_if_used(config: Config) -> Fields:
    """A window in every layer if `use_sliding_window` is true."""
    config.ignore("max_window_layers", "sliding_window")
    return window_everywhere(config) if config.flag("use_sliding_window", default=False) else {}


def modernbert_window(config: Config) -> Fields:
    """A window of half of local_attention to both sides."""
    config.ignore("decoder_bias", "deterministic_flash_attn", "sliding_window", "reference_compile")
    reach = config.number("local_attention", default=128) // 2
    return {"window": {"left": int(reach), "right": int(reach)}} if config.layer_type == SLIDING else {}


def modernbert_decoder_window(config: Config) -> Fields:
    """The last keys up to the query itself: sliding_window of them, or else half of local_attention."""
    reach = config.number("sliding_window", default=config.number("local_attention", default=128) // 2)
    config.ignore("decoder_bias", "deterministic_flash_attn")
    return {"window": {"left": int(reach) - 1}} if config.layer_type == SLIDING else {}


def chunks(config: Config) -> Fields:
    """Chunks in layers of type chunked_attention."""
    config.ignore("attention_chunk_size")
    return {"chunk_size": config.count("attention_chunk_size")} if config.layer_type == CHUNKED else {}


WINDOWED = (window, window_around, modernbert_window, modernbert_decoder_window)  # traits that need layers' types


# --- scores ---


@with_options
def scale(config: Config, field: str, power: float = 1.0, default: float | None = None) -> Fields:
    """The factor of scores is a field of the config, raised to `power`."""
    return {"scale": config.number(field, default=default) ** power}


def capped(config: Config) -> Fields:
    """A softcap, unless the field is null or left out."""
    cap = config.get("attn_logit_softcapping")
    return {"softcap": None if cap is None else config.number("attn_logit_softcapping")}


def capped_or_null(config: Config) -> Fields:
    """A softcap that may be null, but not left out."""
    require_present(config, "attn_logit_softcapping")
    return capped(config)


# --- norms, gates, latent vectors ---


@with_options
def normed(
    config: Config, /, flag: str | None = None, *, eps: str = "rms_norm_eps", default: float = 1e-6, on: bool = False, **norm: Any
) -> Fields:
    """A norm of queries and keys; if `flag` is given, only where that field is true (by default `on`)."""
    has_norm = flag is None or config.flag(flag, default=on)
    return {"qk_norm": {"kind": "rms", **norm, "eps": config.number(eps, default=default)} if has_norm else None}


@with_options
def gated(config: Config, granularity: str = "elementwise", *, bias: str = "", flag: str = "") -> Fields:
    """A sigmoid gate on head outputs. `bias`: the flag of its projection's bias, "" for none; `flag`: that of the gate, by default true."""
    if not flag:
        config.expect("attn_output_gate", True)
    elif not config.flag(flag, default=True):
        return {"output_gate": None}
    has_bias = bool(bias) and config.flag(bias, default=False)
    return {"output_gate": {"granularity": granularity, "activation": "sigmoid", "bias": has_bias}}


def latent(config: Config) -> Fields:
    """DeepSeek's multi-head latent attention. The norms of its latents have eps 1e-6 regardless of the config."""
    nope, rope = (config.count(f"qk_{kind}_head_dim", most=WIDEST_HEAD) for kind in ("nope", "rope"))
    config.expect("qk_head_dim", nope + rope)
    config.expect("num_key_value_heads", config.count("num_attention_heads"))
    ranks = {"query_rank": config.get("q_lora_rank") and config.count("q_lora_rank"), "key_value_rank": config.count("kv_lora_rank")}
    section = ranks | {"rope_key_dim": rope, "eps": 1e-6, "bias": config.flag("attention_bias", default=False)}
    scale = (nope + rope) ** -0.5 * score_mscale(config, config.layer_type)
    return {"head_dim": nope + rope, "value_head_dim": config.count("v_head_dim", most=WIDEST_HEAD), "scale": scale, "latent": section}


# --- which layers have RoPE ---


def no_rope_layers(config: Config) -> Fields:
    """`no_rope_layers`: 1 where a layer has RoPE, 0 where it has none; by default every fourth has none."""
    flag, every = config.of_layer("no_rope_layers"), config.get("no_rope_layer_interval", default=4)
    return {} if (flag if flag is not None else (config.layer + 1) % every) else NO_ROPE


def rope_if_sliding(config: Config) -> Fields:
    """Where some layers have a window, only those have RoPE."""
    require_present(config, "sliding_window")
    return {} if config.layer_type == SLIDING or config.get("sliding_window") is None else NO_ROPE


def rope_only_if_sliding(config: Config) -> Fields:
    """Layers with full attention have no RoPE."""
    return {} if config.layer_type == SLIDING else NO_ROPE


def layer_thetas(config: Config) -> Fields:
    """A theta for each layer; 0 is no RoPE. Others than that of rope_parameters are refused."""
    theta, shared = config.of_layer("layer_rope_theta"), (config.section("rope_parameters") or config).get("rope_theta")
    if theta and theta != shared:
        raise config.refusal("layer_rope_theta", f"{shared} in layer {config.layer}, as rope_parameters has it", theta)
    return {} if theta is None or theta else NO_ROPE


# --- types of layers, for configs without a list such as `layer_types` ---


def sliding(config: Config) -> str:
    return SLIDING


def alternating(config: Config) -> str:
    return FULL if config.layer % 2 else SLIDING


def every_nth_full(field: str, default: int, other: str = SLIDING) -> LayerType:
    return lambda config: FULL if (config.layer + 1) % int(config.number(field, default=default)) == 0 else other


def from_layer(field: str, condition: str) -> LayerType:
    """Layers from the number in `field` on have a window, if the config has the field `condition`."""
    return lambda config: SLIDING if config.get(condition) is not None and config.layer >= config.number(field, default=0) else FULL


def listed_layers(field: str, other: str, default: bool = False) -> LayerType:
    """Attention in the layers whose numbers are listed, another kind of layer elsewhere; without a list, in all if `default`."""
    return lambda config: FULL if (default if config.get(field) is None else config.layer in config.get(field)) else other


def qwen_type(config: Config) -> str:
    config.ignore("max_window_layers", "sliding_window")
    sliding = config.flag("use_sliding_window", default=False) and config.get("sliding_window") is not None
    return SLIDING if sliding and config.layer >= config.number("max_window_layers", default=28) else FULL


def modernbert_type(config: Config) -> str:
    return SLIDING if config.layer % int(config.number("global_attn_every_n_layers", default=3)) else FULL
