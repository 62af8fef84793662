"""Traits and rules for types of layers of single families of decoders. `traits.py` has the others, and says what a trait is."""

import math

from attend.checkpoints.config import Config
from attend.checkpoints.families.traits import (
    CHUNKED,
    CONVERSION,
    FULL,
    LINEAR,
    NO_ROPE,
    SLIDING,
    WIDEST_HEAD,
    no_rope_layers,
    normed,
    require_present,
    with_options,
)
from attend.checkpoints.layout import Fields


def gpt2_scale(config: Config) -> Fields:
    """1/sqrt(head_dim), divided by the number of the layer, from 1 on, where the config says so."""
    config.ignore("reorder_and_upcast_attn")  # the same product in another order
    factor = _scale_if_any(config)
    return {"scale": factor / (config.layer + 1) if config.flag("scale_attn_by_inverse_layer_idx", default=False) else factor}


def _scale_if_any(config: Config) -> float:
    """1/sqrt(head_dim), or 1 where `scale_attn_weights` is false."""
    width = config.count("n_embd", "hidden_size") // config.count("n_head", "num_attention_heads")
    return width**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0


def bigcode(config: Config) -> Fields:
    config.ignore("num_key_value_heads")
    return {
        "scale": _scale_if_any(config),
        "num_kv_heads": 1 if config.flag("multi_query", default=True) else config.count("n_head", "num_attention_heads"),
    }


def gpt_neo(config: Config) -> Fields:
    """`attention_layers` is global or local for each layer; a local one has a window."""
    config.ignore("attention_types", "window_size")
    if (layer_type := config.of_layer("attention_layers")) not in ("global", "local"):
        raise config.refusal("attention_layers", "global or local", layer_type)
    return {"window": {"left": int(config.number("window_size", default=256)) - 1}} if layer_type == "local" else {}


def falcon(config: Config) -> Fields:
    """Falcon-7B has one kv head, -40B several, in groups with their queries; -rw models have as many as heads, and ALiBi."""
    new, several = config.flag("new_decoder_architecture", default=False), not config.flag("multi_query", default=True)
    config.ignore("num_kv_heads", "parallel_attn")
    heads = config.count("num_attention_heads")
    if config.flag("alibi", default=False):  # it rounds these biases to bfloat16 and divides them by sqrt(head_dim) along with the scores
        raise config.refusal("alibi", "false", True)
    return {"num_kv_heads": config.get("num_kv_heads", default=heads) if new else heads if several else 1}


def mpt(config: Config) -> Fields:
    """The settings of attention are in the section attn_config."""
    settings = config.section("attn_config") or Config({})
    for name, value in {"clip_qkv": None, "qk_ln": False, "prefix_lm": False, "attn_uses_sequence_id": False, "alibi_bias_max": 8}.items():
        settings.expect(name, value)
    settings.expect("attn_type", "multihead_attention", "multiquery_attention")
    settings.expect("alibi", True)  # transformers adds these biases regardless of the config
    settings.ignore("attn_impl", "softmax_scale", "attn_pdrop", "model_type")
    settings.require_all_read()
    config.ignore("no_bias", "learned_pos_emb")
    scale = {} if settings.get("softmax_scale") is None else {"scale": settings.number("softmax_scale")}
    return {"alibi": True, **scale}


def gemma_values(config: Config) -> Fields:
    """Gemma 3n and 4: scale 1; norms of queries and keys with weights, of values without. Layers that share keys are refused."""
    shared = config.get("num_kv_shared_layers", default=0)
    if config.layer >= config.count("num_hidden_layers") - shared:
        raise config.refusal("num_kv_shared_layers", f"keys and values of its own in layer {config.layer}", shared)
    config.expect("attention_k_eq_v", False)
    return {"scale": 1.0, **normed(values=True)(config)}


def gemma4_heads(config: Config) -> Fields:
    """Layers with full attention have wider heads, by `per_layer_config` or by fields of their own."""
    has_width, heads = config.get("global_head_dim") is not None, config.get("num_global_key_value_heads")
    if config.layer_type == SLIDING or "per_layer_config" in config.fields:
        return {}
    width = config.count("global_head_dim", most=WIDEST_HEAD) if has_width else 512
    return {"head_dim": width} | ({"num_kv_heads": heads} if heads and config.get("attention_k_eq_v", default=True) else {})


def llama4(config: Config) -> Fields:
    """Layers with RoPE norm queries and keys after it; in the others, queries grow with their position."""
    norm = normed("use_qk_norm", on=True, weights="none", after_rope=True, default=1e-5)(config)
    grows = config.flag("attn_temperature_tuning", default=True)
    growth = {"factor": config.number("attn_scale", default=0.1), "length": config.count("floor_scale", default=8192), "shift": 1}
    if without_rope := no_rope_layers(config):
        return without_rope | {"query_scale": growth if grows else None}
    return norm


def llama4_type(config: Config) -> str:
    """Layers with RoPE have chunks."""
    return FULL if no_rope_layers(config) else CHUNKED


def softmax_in_each_layer(config: Config) -> Fields:
    """MiniMax: `attn_type_list` has 1 for a layer with softmax attention, 0 for one with linear attention."""
    if (kind := config.of_layer("attn_type_list")) not in (None, 1):
        raise config.refusal("attn_type_list", f"1, softmax attention, in layer {config.layer}", kind)
    return {}


def ministral3(config: Config) -> Fields:
    """Queries grow with their position, by fields of rope_parameters."""
    if (settings := config.section("rope_parameters")) is None:
        raise config.refusal("rope_parameters", "an object", None)
    length = settings.count("original_max_position_embeddings")
    return {"query_scale": {"factor": settings.number("llama_4_scaling_beta"), "length": length}}


def mistral4(config: Config) -> Fields:
    """head_dim and partial_rotary_factor, which repeat what other fields say, must agree with them."""
    shared = config.count("qk_rope_head_dim")
    width = config.count("qk_nope_head_dim") + shared
    config.expect("head_dim", width)
    if (settings := config.section("rope_parameters")) is not None:
        settings.expect("partial_rotary_factor", shared / width)
    return {}


def mimo(config: Config) -> Fields:
    """MiMo-V2: layers with a window have sinks, and twice as many kv heads; values have a factor and a width of their own."""
    require_present(config, "attention_value_scale")
    kv_heads, windowed = config.count("num_key_value_heads"), config.layer_type == SLIDING
    fields = {"num_kv_heads": kv_heads * (1 + windowed), "sinks": windowed, "value_head_dim": config.count("v_head_dim")}
    return fields | {CONVERSION: {"factors": {"value": config.number("attention_value_scale", default=1.0)}}}


@with_options
def indexed(config: Config, interleaved: bool, eps: str = "", every_nth: int = 1) -> Fields:
    """DeepSeek's indexer, whose RoPE is on pairs if `interleaved`. GLM-5's layers that share the keys of an earlier one are refused.

    `eps`: the field with that of the norm of its keys, 1e-6 without one; `every_nth`: of layers with an indexer, if the config has none.
    """
    n, kind = config.layer, config.of_layer("indexer_types")
    pattern, offset = config.get("index_topk_pattern"), int(config.number("index_skip_topk_offset", default=2))
    every = max(int(config.number("index_topk_freq", default=every_nth)), 1)
    if kind is None and pattern is not None:
        kind = config.of_layer("index_topk_pattern") if isinstance(pattern, list) else str(pattern)[n : n + 1]
    elif kind is None:
        kind = "full" if max(n - offset + 1, 0) % every == 0 else "shared"
    if kind not in ("full", "F"):
        expected = f"full in layer {n}; a layer without an indexer attends to the keys that an earlier layer selects"
        raise config.refusal("indexer_types", expected, kind)
    sizes = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}
    section = {name: config.count(field) for name, field in sizes.items()} | {"interleaved": interleaved}
    return {"indexer": section | {"eps": config.number(eps, default=1e-5) if eps else 1e-6}}


def longcat(config: Config) -> Fields:
    """LongCat: factors on queries, and on the latent vector of keys and values."""
    width = config.count("hidden_size")
    query, key_value = ((width / config.count(f"{name}_lora_rank")) ** 0.5 for name in ("q", "kv"))
    return {CONVERSION: {"factors": {"query": query, "key_value_down_norm": key_value}}}


def beam(config: Config) -> Fields:
    """A gate with one bias for each head. Layers with full attention are refused: their queries grow by a power of their position."""
    if config.layer_type != SLIDING:
        expected = f"sliding_attention in layer {config.layer}; others scale queries by a power of their position"
        raise config.refusal("layer_types", expected, config.layer_type)
    return {"output_gate": {"granularity": "elementwise", "activation": "sigmoid", "bias": True}}


@with_options
def mllama(config: Config, part: str) -> Fields:
    """Llama 3.2 Vision: the layers that the config lists attend to the image, the others to the text."""
    listed = config.get("cross_attention_layers")
    if not isinstance(listed, list) or (config.layer in listed) != (part == "cross"):
        raise config.refusal("cross_attention_layers", f"a list {'with' if part == 'cross' else 'without'} layer {config.layer}", listed)
    return {}


def molmo2(config: Config) -> Fields:
    """Norms of each head, or of all heads as one; layers outside of rope_scaling_layers do not scale their RoPE."""
    config.expect("qk_norm_type", "qwen3", "olmo")
    scaled = config.get("rope_scaling_layers")
    kind = (config.section("rope_parameters") or Config({})).get("rope_type", "type", default="default")
    if scaled is not None and config.layer not in scaled and kind != "default":
        raise config.refusal("rope_scaling_layers", f"layer {config.layer} among them", scaled)
    norm = normed(over="all", weights="own") if config.get("qk_norm_type") == "olmo" else normed()
    return norm(config)


def muse_glimmer(config: Config) -> Fields:
    """A factor on queries after their norm. By default, transformers derives the thetas of layers from their types."""
    require_present(config, "layer_rope_theta")
    return {"scale": _head_dim(config) ** -0.5 * config.number("qk_scale_factor", default=3.87)}


def laguna(config: Config) -> Fields:
    """A number of heads for each layer, and a softplus gate on each head or on each of its numbers."""
    name = "num_attention_heads_per_layer"
    heads = config.of_layer(name)
    config.expect("gating", True, "per-head", "per-element")
    granularity = "elementwise" if config.get("gating") == "per-element" else "headwise"
    num_heads = {} if heads is None else {"num_heads": Config({name: heads}, config.at).count(name)}
    return num_heads | {"output_gate": {"granularity": granularity, "activation": "softplus", "bias": False}}


def key_multiplier(config: Config) -> Fields:
    """Falcon H1: the factor on keys is one on scores."""
    return {"scale": _head_dim(config) ** -0.5 * config.number("key_multiplier", default=1.0)}


def rope_if_any(config: Config) -> Fields:
    """OLMo Hybrid: no RoPE where rope_parameters are null."""
    require_present(config, "rope_parameters")
    return {} if config.get("rope_parameters") is not None else NO_ROPE


def rope_if_named(config: Config) -> Fields:
    """Granite 4: RoPE only with `position_embedding_type` rope."""
    return {} if config.get("position_embedding_type") == "rope" else NO_ROPE


def recurrent_gemma_window(config: Config) -> Fields:
    """A window in every layer with attention. Of both names in one file, transformers applies `sliding_window`."""
    return {"window": {"left": config.count("sliding_window", "attention_window_size") - 1}}


def _head_dim(config: Config) -> int:
    return config.count("head_dim", default=config.count("hidden_size") // config.count("num_attention_heads"))


def diffllama(config: Config) -> Fields:
    """Differential attention: two heads of the config, one of each half of them, are one here."""
    heads, width = config.count("num_attention_heads"), _head_dim(config)
    kv_heads = config.count("num_key_value_heads", default=heads)
    if kv_heads % 2:
        raise config.refusal("num_key_value_heads", "an even number", kv_heads)
    config.ignore("lambda_std_dev")
    section = {"lambda_init": 0.8 - 0.6 * math.exp(-0.3 * config.layer), "norm_weights": False}
    section["eps"] = config.number("rms_norm_eps", default=1e-5)
    sizes = {"num_heads": heads // 2, "num_kv_heads": kv_heads // 2, "head_dim": 2 * width, "value_head_dim": 2 * width}
    return {**sizes, "scale": width**-0.5, "differential": section}


def jamba_type(config: Config) -> str:
    period, offset = config.count("attn_layer_period", default=8), int(config.number("attn_layer_offset", default=4))
    return FULL if config.layer % period == offset else "mamba"


def recurrent_gemma_type(config: Config) -> str:
    blocks = config.get("block_types", default=["recurrent", "recurrent", "attention"])
    return str(blocks[config.layer % len(blocks)])


def kimi_linear_type(config: Config) -> str:
    """By a list of layers that counts from 1; without one, every fourth layer but the first has full attention."""
    settings = config.section("linear_attn_config")
    if settings is not None and isinstance(layers := settings.get("full_attn_layers"), list):
        return FULL if config.layer + 1 in layers else LINEAR
    return FULL if config.layer and config.layer % 4 == 0 else LINEAR
