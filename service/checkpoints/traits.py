"""Traits: functions of a config and a layer that give fields of LayerSpec, for the rows of `families.py`.

A trait reads every field that it depends on, or marks it as ignored, since `Config.require_all_read` refuses the others.
"""

from collections.abc import Callable
from typing import Any

from service.checkpoints.config import Config
from service.checkpoints.layout import Fields
from service.checkpoints.rope import score_mscale
from service.spec import PROJECTIONS

Trait = Callable[[Config, int, str], Fields]  # config, number of the layer, layer type -> fields of LayerSpec
LayerType = Callable[[Config, int], str]
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
ATTENTION_TYPES = {"attention": FULL, "hybrid": FULL}  # other names of layer types
WIDEST_HEAD = 1 << 16
VALUE_FACTOR = "value_factor"  # among the fields that traits give: a factor on values, which is multiplied into their projection
WITHOUT: Fields = {"dims": 0}  # marks a layer without RoPE in a model with it


def constant(**fields: Any) -> Trait:
    return lambda config, n, layer_type: fields


def biased(field: str | None, letters: str = "qkvo", default: bool = False) -> Trait:
    """Biases of the projections in `letters` if the flag `field` is true, or in any case if it is None."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        on = field is None or config.flag(field, default=default)
        return {"bias": {name: on and letter in letters for name, letter in zip(PROJECTIONS, "qkvo", strict=True)}}

    return trait


def biased_but(field: str, always: str, never: str = "", default: bool = False) -> Trait:
    """Biases of the projections in `always`, and of the others but those in `never` if the flag `field` is true."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        letters = always + ("qkvo" if config.flag(field, default=default) else "")
        return {"bias": {name: letter in letters and letter not in never for name, letter in zip(PROJECTIONS, "qkvo", strict=True)}}

    return trait


def window(config: Config, n: int, layer_type: str) -> Fields:
    """A window in layers of type sliding_attention."""
    config.ignore("sliding_window")
    return {"window": {"left": config.count("sliding_window") - 1}} if layer_type == SLIDING else {}


def window_everywhere(config: Config, n: int, layer_type: str) -> Fields:
    """A window in every layer, unless `sliding_window` is null; it may not be left out."""
    _require_present(config, "sliding_window")
    return {"window": {"left": config.count("sliding_window") - 1}} if config.get("sliding_window") is not None else {}


def window_around(config: Config, n: int, layer_type: str) -> Fields:
    """A window to both sides in layers of type sliding_attention, with both ends."""
    reach = config.count("sliding_window")
    return {"window": {"left": reach, "right": reach}} if layer_type == SLIDING else {}


def window_if_used(config: Config, n: int, layer_type: str) -> Fields:
    """A window in every layer where `use_sliding_window` says so."""
    config.ignore("max_window_layers", "sliding_window")
    return window_everywhere(config, n, layer_type) if config.flag("use_sliding_window", default=False) else {}


def chunks(config: Config, n: int, layer_type: str) -> Fields:
    """Chunks in layers of type chunked_attention."""
    config.ignore("attention_chunk_size")
    return {"chunk_size": config.count("attention_chunk_size")} if layer_type == CHUNKED else {}


def recurrent_gemma_window(config: Config, n: int, layer_type: str) -> Fields:
    """A window in every layer with attention, whose output projection has a bias in any case."""
    qkv = config.flag("attention_bias", default=False)
    bias = dict(zip(PROJECTIONS, (qkv, qkv, qkv, True), strict=True))
    return {"window": {"left": config.count("attention_window_size", "sliding_window") - 1}, "bias": bias}


def _require_present(config: Config, field: str) -> None:
    """Raises InvalidRequest if the field is left out, where null has a meaning and transformers' default is another."""
    if field not in config.fields:
        raise config.refusal(field, "a value, or null", None)


def scale(field: str, power: float = 1.0, default: float | None = None) -> Trait:
    """The factor of scores is a field of the config, raised to `power`."""
    return lambda config, n, layer_type: {"scale": config.number(field, default=default) ** power}


def capped(config: Config, n: int, layer_type: str) -> Fields:
    cap = config.get("attn_logit_softcapping")
    return {"softcap": None if cap is None else config.number("attn_logit_softcapping")}


def capped_or_null(config: Config, n: int, layer_type: str) -> Fields:
    """A softcap that may be null, but not left out."""
    _require_present(config, "attn_logit_softcapping")
    return capped(config, n, layer_type)


def normed(flag: str | None = None, *, eps: str = "rms_norm_eps", default: float = 1e-6, on: bool = False, **norm: Any) -> Trait:
    """A norm of queries and keys; if `flag` is given, only where that field is true (by default `on`)."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        there = flag is None or config.flag(flag, default=on)
        return {"qk_norm": {"kind": "rms", **norm, "eps": config.number(eps, default=default)} if there else None}

    return trait


def gated(granularity: str = "elementwise", bias: str = "") -> Trait:
    """A sigmoid gate on the head outputs; `bias` names the flag of its projection's bias, "" is none."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        config.expect("attn_output_gate", True)
        has_bias = bool(bias) and config.flag(bias, default=False)
        return {"output_gate": {"granularity": granularity, "activation": "sigmoid", "bias": has_bias}}

    return trait


def laguna(config: Config, n: int, layer_type: str) -> Fields:
    """A number of heads for each layer, and a softplus gate on each head or on each of its numbers."""
    name = "num_attention_heads_per_layer"
    heads = config.each(name, n)
    config.expect("gating", True, "per-head", "per-element")
    granularity = "elementwise" if config.get("gating") == "per-element" else "headwise"
    own = {} if heads is None else {"num_heads": Config({name: heads}, config.at).count(name)}
    return own | {"output_gate": {"granularity": granularity, "activation": "softplus", "bias": False}}


def latent(config: Config, n: int, layer_type: str) -> Fields:
    """DeepSeek's multi-head latent attention. The norms of its latents have eps 1e-6 regardless of the config."""
    own, shared = (config.count(f"qk_{kind}_head_dim", most=WIDEST_HEAD) for kind in ("nope", "rope"))
    config.expect("qk_head_dim", own + shared)
    config.expect("num_key_value_heads", config.count("num_attention_heads"))
    ranks = {"query_rank": config.get("q_lora_rank") and config.count("q_lora_rank"), "key_value_rank": config.count("kv_lora_rank")}
    section = ranks | {"rope_key_dim": shared, "eps": 1e-6, "bias": config.flag("attention_bias", default=False)}
    scale = (own + shared) ** -0.5 * score_mscale(config, layer_type)
    return {"head_dim": own + shared, "value_head_dim": config.count("v_head_dim", most=WIDEST_HEAD), "scale": scale, "latent": section}


def no_rope_layers(config: Config, n: int, layer_type: str) -> Fields:
    """`no_rope_layers`: 1 where a layer has RoPE, 0 where it has none; by default every fourth has none."""
    flag, every = config.each("no_rope_layers", n), config.get("no_rope_layer_interval", default=4)
    return {} if (flag if flag is not None else (n + 1) % every) else {"rope": WITHOUT}


def rope_if_sliding(config: Config, n: int, layer_type: str) -> Fields:
    """Where some layers have a window, only those have RoPE."""
    _require_present(config, "sliding_window")
    return {} if layer_type == SLIDING or config.get("sliding_window") is None else {"rope": WITHOUT}


def rope_if_any(config: Config, n: int, layer_type: str) -> Fields:
    """OLMo Hybrid: no RoPE where rope_parameters are null."""
    _require_present(config, "rope_parameters")
    return {} if config.get("rope_parameters") is not None else {"rope": WITHOUT}


def rope_if_named(config: Config, n: int, layer_type: str) -> Fields:
    """Granite 4: RoPE only with `position_embedding_type` rope."""
    return {} if config.get("position_embedding_type") == "rope" else {"rope": WITHOUT}


def llama4(config: Config, n: int, layer_type: str) -> Fields:
    """Layers with RoPE norm queries and keys after it; in the others, queries grow with their position."""
    norms, grows = config.flag("use_qk_norm", default=True), config.flag("attn_temperature_tuning", default=True)
    norm = {"kind": "rms", "weights": "none", "after_rope": True, "eps": config.number("rms_norm_eps", default=1e-5)}
    growth = {"factor": config.number("attn_scale", default=0.1), "length": config.count("floor_scale", default=8192), "shift": 1}
    if without_rope := no_rope_layers(config, n, layer_type):
        return without_rope | {"query_scale": growth if grows else None}
    return {"qk_norm": norm if norms else None}


def ministral3(config: Config, n: int, layer_type: str) -> Fields:
    """Queries grow with their position, by fields of rope_parameters."""
    if (settings := config.section("rope_parameters")) is None:
        raise config.refusal("rope_parameters", "an object", None)
    length = settings.count("original_max_position_embeddings")
    return {"query_scale": {"factor": settings.number("llama_4_scaling_beta"), "length": length}}


def mistral4(config: Config, n: int, layer_type: str) -> Fields:
    """The width of a head, and the share of it that is rotated, also have fields of their own."""
    shared = config.count("qk_rope_head_dim")
    width = config.count("qk_nope_head_dim") + shared
    config.expect("head_dim", width)
    if (settings := config.section("rope_parameters")) is not None:
        settings.expect("partial_rotary_factor", shared / width)
    return {}


def mimo(config: Config, n: int, layer_type: str) -> Fields:
    """MiMo-V2: layers with a window have sinks, and twice as many kv heads; values have a factor and a width of their own."""
    _require_present(config, "attention_value_scale")
    kv_heads, windowed = config.count("num_key_value_heads"), layer_type == SLIDING
    fields = {"num_kv_heads": kv_heads * (1 + windowed), "sinks": windowed, "value_head_dim": config.count("v_head_dim")}
    return fields | {VALUE_FACTOR: config.number("attention_value_scale", default=1.0)}


def key_multiplier(config: Config, n: int, layer_type: str) -> Fields:
    """Falcon H1: the factor on keys is one on scores."""
    return {"scale": _head_dim(config) ** -0.5 * config.number("key_multiplier", default=1.0)}


def _head_dim(config: Config) -> int:
    return config.count("head_dim", default=config.count("hidden_size") // config.count("num_attention_heads"))


def molmo2(config: Config, n: int, layer_type: str) -> Fields:
    """Norms of each head, or of all heads as one; layers outside of rope_scaling_layers do not scale their RoPE."""
    config.expect("qk_norm_type", "qwen3", "olmo")
    scaled = config.get("rope_scaling_layers")
    kind = (config.section("rope_parameters") or Config({})).get("rope_type", "type", default="default")
    if scaled is not None and n not in scaled and kind != "default":
        raise config.refusal("rope_scaling_layers", f"layer {n} among them", scaled)
    olmo = {"over": "all", "weights": "own"} if config.get("qk_norm_type") == "olmo" else {}
    return {"qk_norm": {"kind": "rms", "eps": config.number("rms_norm_eps", default=1e-6), **olmo}}


def lfm3(config: Config, n: int, layer_type: str) -> Fields:
    """A gate on each head, unless the config has none."""
    gate = {"granularity": "headwise", "activation": "sigmoid", "bias": False}
    return {"output_gate": gate if config.flag("use_attention_gate", default=True) else None}


def muse_glimmer(config: Config, n: int, layer_type: str) -> Fields:
    """A factor on queries after their norm. By default, transformers derives the thetas of layers from their types."""
    _require_present(config, "layer_rope_theta")
    return {"scale": _head_dim(config) ** -0.5 * config.number("qk_scale_factor", default=3.87)}


def mobilebert(config: Config, n: int, layer_type: str) -> Fields:
    """Attention in a bottleneck, whose values may come from outside of it."""
    config.ignore("key_query_shared_bottleneck", "use_bottleneck_attention", "intra_bottleneck_size")
    width = config.count("intra_bottleneck_size" if config.flag("use_bottleneck", default=True) else "hidden_size")
    return {"head_dim": width // config.count("num_attention_heads")}


def rope_only_if_sliding(config: Config, n: int, layer_type: str) -> Fields:
    """Layers with full attention have no RoPE."""
    return {} if layer_type == SLIDING else {"rope": WITHOUT}


def biased_apart(config: Config, n: int, layer_type: str) -> Fields:
    """Biases of queries, keys and values by one flag, of the output by another."""
    qkv, output = config.flag("qkv_bias", "attention_bias", default=False), config.flag("attention_out_bias", "bias", default=False)
    return {"bias": dict(zip(PROJECTIONS, (qkv, qkv, qkv, output), strict=True))}


def bigcode(config: Config, n: int, layer_type: str) -> Fields:
    config.ignore("num_key_value_heads")
    return {"num_kv_heads": 1 if config.flag("multi_query", default=True) else config.count("n_head", "num_attention_heads")}


def gpt_neo(config: Config, n: int, layer_type: str) -> Fields:
    """`attention_layers` is global or local for each layer; a local one has a window."""
    config.ignore("attention_types", "window_size")
    if (own := config.each("attention_layers", n)) not in ("global", "local"):
        raise config.refusal("attention_layers", "global or local", own)
    return {"window": {"left": int(config.number("window_size", default=256)) - 1}} if own == "local" else {}


def modernbert_window(config: Config, n: int, layer_type: str) -> Fields:
    """Half of local_attention to both sides."""
    config.ignore("decoder_bias", "deterministic_flash_attn", "sliding_window", "reference_compile")
    reach = config.number("local_attention", default=128) // 2
    return {"window": {"left": int(reach), "right": int(reach)}} if layer_type == SLIDING else {}


def modernbert_decoder_window(config: Config, n: int, layer_type: str) -> Fields:
    """Half of local_attention, with the query itself, behind it; unless sliding_window is there."""
    reach = config.number("sliding_window", default=config.number("local_attention", default=128) // 2)
    config.ignore("decoder_bias", "deterministic_flash_attn")
    return {"window": {"left": int(reach) - 1}} if layer_type == SLIDING else {}


def original_full(config: Config, n: int, layer_type: str) -> Fields:
    """BigBird: sparse blocks of keys are another operator."""
    config.ignore("block_size", "num_random_blocks", "use_bias")
    if config.get("attention_type", default="block_sparse") != "original_full":
        raise config.refusal("attention_type", '"original_full"', config.get("attention_type"))
    return {}


def only(field: str, *values: Any) -> Trait:
    """Refuses every value of this field but these."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        config.expect(field, *values)
        return {}

    return trait


def rope_if_rotary(config: Config, n: int, layer_type: str) -> Fields:
    """ESM: RoPE only with `position_embedding_type` rotary; its absolute positions are added to the model's input."""
    config.expect("position_embedding_type", "absolute", "rotary")
    return {} if config.get("position_embedding_type") == "rotary" else {"rope": WITHOUT}


def gpt2_scale(config: Config, n: int, layer_type: str) -> Fields:
    factor = fields_width(config) ** -0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    config.ignore("reorder_and_upcast_attn")  # the same product in another order
    return {"scale": factor / (n + 1) if config.flag("scale_attn_by_inverse_layer_idx", default=False) else factor}


def fields_width(config: Config) -> int:
    return config.count("n_embd", "hidden_size") // config.count("n_head", "num_attention_heads")


def falcon(config: Config, n: int, layer_type: str) -> Fields:
    """Falcon-7B has one kv head, -40B several, in groups with their queries; -rw models have as many as heads, and ALiBi."""
    new, several = config.flag("new_decoder_architecture", default=False), not config.flag("multi_query", default=True)
    config.ignore("num_kv_heads", "parallel_attn")
    heads = config.count("num_attention_heads")
    alibi = config.flag("alibi", default=False)
    if alibi:  # Falcon rounds these biases to bfloat16 and divides them by sqrt(head_dim) along with the scores
        raise config.refusal("alibi", "false", True)
    return {"num_kv_heads": config.get("num_kv_heads", default=heads) if new else heads if several else 1}


def mpt(config: Config, n: int, layer_type: str) -> Fields:
    """Settings stand in a section of their own."""
    settings = config.section("attn_config") or Config({})
    for name, value in {"clip_qkv": None, "qk_ln": False, "prefix_lm": False, "attn_uses_sequence_id": False, "alibi_bias_max": 8}.items():
        settings.expect(name, value)
    settings.expect("attn_type", "multihead_attention", "multiquery_attention")
    settings.expect("alibi", True)  # transformers adds these biases regardless of the config
    settings.ignore("attn_impl", "softmax_scale", "attn_pdrop", "model_type")
    settings.require_all_read("^_|attn_config")
    config.ignore("no_bias", "learned_pos_emb")
    own = {} if settings.get("softmax_scale") is None else {"scale": settings.number("softmax_scale")}
    return {"alibi": True, **own}


def gemma_values(config: Config, n: int, layer_type: str) -> Fields:
    """Gemma 3n and 4: scores as they are; norms of queries and keys with weights, of values without. Later layers may have no keys."""
    shared = config.get("num_kv_shared_layers", default=0)
    if n >= config.count("num_hidden_layers") - shared:
        raise config.refusal("num_kv_shared_layers", f"keys and values of its own in layer {n}", shared)
    config.expect("attention_k_eq_v", False)
    return {"scale": 1.0, "qk_norm": {"kind": "rms", "eps": config.number("rms_norm_eps", default=1e-6), "values": True}}


def gemma4_heads(config: Config, n: int, layer_type: str) -> Fields:
    """Layers with full attention have wider heads, by `per_layer_config` or by fields of their own."""
    has_width, heads = config.get("global_head_dim") is not None, config.get("num_global_key_value_heads")
    if layer_type == SLIDING or "per_layer_config" in config.fields:
        return {}
    width = config.count("global_head_dim", most=WIDEST_HEAD) if has_width else 512
    return {"head_dim": width} | ({"num_kv_heads": heads} if heads and config.get("attention_k_eq_v", default=True) else {})


def t5_bias(bidirectional: bool) -> Trait:
    """T5's table of relative biases, and scores as they are."""

    def trait(config: Config, n: int, layer_type: str) -> Fields:
        distance = config.get("relative_attention_max_distance", default=128)
        config.ignore("relative_attention_num_buckets")  # the table's length
        return {"relative_bias": {"max_distance": distance, "bidirectional": bidirectional}, "scale": 1.0}

    return trait


def layer_thetas(config: Config, n: int, layer_type: str) -> Fields:
    """A theta for each layer; 0 is no RoPE. Others than that of rope_parameters are refused."""
    own, shared = config.each("layer_rope_theta", n), (config.section("rope_parameters") or config).get("rope_theta")
    if own and own != shared:
        raise config.refusal("layer_rope_theta", f"{shared} in layer {n}, as rope_parameters has it", own)
    return {} if own is None or own else {"rope": WITHOUT}


# --- layer types of configs that do not list them ---


def every_nth_full(field: str, default: int, other: str = SLIDING) -> LayerType:
    return lambda config, n: FULL if (n + 1) % int(config.number(field, default=default)) == 0 else other


def alternating(config: Config, n: int) -> str:
    return FULL if n % 2 else SLIDING


def qwen_type(config: Config, n: int) -> str:
    config.ignore("max_window_layers", "sliding_window")
    sliding = config.flag("use_sliding_window", default=False) and config.get("sliding_window") is not None
    return SLIDING if sliding and n >= config.number("max_window_layers", default=28) else FULL


def llama4_type(config: Config, n: int) -> str:
    """Layers with RoPE have chunks."""
    return FULL if no_rope_layers(config, n, "") else CHUNKED


def jamba_type(config: Config, n: int) -> str:
    return FULL if n % config.count("attn_layer_period", default=8) == int(config.number("attn_layer_offset", default=4)) else "mamba"


def recurrent_gemma_type(config: Config, n: int) -> str:
    blocks = config.get("block_types", default=["recurrent", "recurrent", "attention"])
    return str(blocks[n % len(blocks)])


def listed(field: str, other: str, default: bool = False) -> LayerType:
    """Attention in the layers whose numbers are listed, another kind of layer elsewhere; without a list, in all if `default`."""
    return lambda config, n: FULL if (default if config.get(field) is None else n in config.get(field)) else other


def repmixer(config: Config, n: int) -> str:
    """MobileCLIP's text encoder: its first and last layers are convolutions."""
    ends = config.flag("use_repmixer_blocks", default=True) and n in (0, config.count("num_hidden_layers") - 1)
    return "conv" if ends else FULL


def sliding(config: Config, n: int) -> str:
    return SLIDING


def kimi_linear_type(config: Config, n: int) -> str:
    """By lists of layers that count from 1, or every fourth layer has full attention but the first."""
    settings = config.section("linear_attn_config")
    if settings is not None and isinstance(layers := settings.get("full_attn_layers"), list):
        return FULL if n + 1 in layers else LINEAR
    return FULL if n and n % 4 == 0 else LINEAR


def from_layer(field: str, condition: str) -> LayerType:
    """Layers from that number on have a window, if `condition` is there."""
    return lambda config, n: SLIDING if config.get(condition) is not None and n >= config.number(field, default=0) else FULL


WINDOWED = (window, window_around, modernbert_window, modernbert_decoder_window)  # traits that know layers of type sliding_attention
