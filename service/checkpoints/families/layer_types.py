"""Types of layers, and rules that give them for configs without a list such as `layer_types`."""

from collections.abc import Callable

from service.checkpoints.config import Config

LayerType = Callable[[Config], str]  # config of a layer -> its type
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
OTHER_NAMES = {"attention": FULL, "hybrid": FULL, "indexed_attention": FULL}


def sliding(config: Config) -> str:
    return SLIDING


def alternating(config: Config) -> str:
    return FULL if config.layer % 2 else SLIDING


def every_nth_full(field: str, default: int, other: str = SLIDING) -> LayerType:
    return lambda config: FULL if (config.layer + 1) % int(config.number(field, default=default)) == 0 else other


def from_layer(field: str, condition: str) -> LayerType:
    """Layers from that number on have a window, if `condition` is there."""
    return lambda config: SLIDING if config.get(condition) is not None and config.layer >= config.number(field, default=0) else FULL


def listed(field: str, other: str, default: bool = False) -> LayerType:
    """Attention in the layers whose numbers are listed, another kind of layer elsewhere; without a list, in all if `default`."""
    return lambda config: FULL if (default if config.get(field) is None else config.layer in config.get(field)) else other


def qwen_type(config: Config) -> str:
    config.ignore("max_window_layers", "sliding_window")
    sliding = config.flag("use_sliding_window", default=False) and config.get("sliding_window") is not None
    return SLIDING if sliding and config.layer >= config.number("max_window_layers", default=28) else FULL


def modernbert_type(config: Config) -> str:
    return SLIDING if config.layer % int(config.number("global_attn_every_n_layers", default=3)) else FULL


def jamba_type(config: Config) -> str:
    period, offset = config.count("attn_layer_period", default=8), int(config.number("attn_layer_offset", default=4))
    return FULL if config.layer % period == offset else "mamba"


def recurrent_gemma_type(config: Config) -> str:
    blocks = config.get("block_types", default=["recurrent", "recurrent", "attention"])
    return str(blocks[config.layer % len(blocks)])


def kimi_linear_type(config: Config) -> str:
    """By lists of layers that count from 1, or every fourth layer has full attention but the first."""
    settings = config.section("linear_attn_config")
    if settings is not None and isinstance(layers := settings.get("full_attn_layers"), list):
        return FULL if config.layer + 1 in layers else LINEAR
    return FULL if config.layer and config.layer % 4 == 0 else LINEAR


def repmixer(config: Config) -> str:
    """MobileCLIP's text encoder: its first and last layers are convolutions."""
    ends = config.flag("use_repmixer_blocks", default=True) and config.layer in (0, config.count("num_hidden_layers") - 1)
    return "conv" if ends else FULL
