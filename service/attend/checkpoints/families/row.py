"""A row of the table: where the attention layers of a family are, and how the fields of its config become a LayerSpec."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attend.attention.operators import OPERATORS, num_softmaxes, shared_key_dim
from attend.checkpoints.config import Config
from attend.checkpoints.families.traits import CHUNKED, FULL, LINEAR, SLIDING, STAGE, WIDEST_HEAD, WINDOWED, LayerType, Trait, chunks
from attend.checkpoints.layout import Fields
from attend.checkpoints.rope import Rotary, rope_fields
from attend.errors import InvalidRequest
from attend.spec import LayerSpec

MOST_STAGES, MOST_LAYERS = 64, 1 << 12  # of a model, of a stage
TYPES_LIKE_FULL = ("attention", "hybrid", "indexed_attention")  # other names of FULL


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One kind of attention layer of a family. Where several names of a field are given, the first that the config has counts."""

    path: str = "layers.{n}.self_attn"  # the end of the layer's name in the checkpoint
    layout: str = "separate"  # the name of one of layouts.LAYOUTS
    heads: tuple[str, ...] = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    width: tuple[str, ...] = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
    head_dim: tuple[str, ...] = ("head_dim",)
    layers: tuple[str, ...] = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    causal: bool = True
    bias: Trait | None = None  # which projections have one; None: inferred from the tensors
    rotary: Rotary | None = None
    traits: tuple[Trait, ...] = ()  # windows, norms, gates, a scale, …
    types_field: str = "layer_types"  # a list of each layer's type
    layer_type: LayerType | None = None  # for configs without that field
    flag: str = ""  # field of the config that says whether the model has this part; "": it always has
    stages: str = ""  # field with the number of layers of each stage, whose widths double; `{stage}` and `{block}` are in the path (Swin)
    table: str = ""  # the end of the name of a table of relative biases, or of vectors for distances, that several layers share
    table_role: str = "relative_bias"  # what that tensor is to the layout
    ignored: tuple[str, ...] = ()  # patterns of tensors below the layer's name that have no effect
    irrelevant: str = ""  # fields without effect on attention that other families do not have; * stands for any characters


Family = Mapping[str, AttentionRow]  # part of the model -> its row


def family(part: str, like: AttentionRow, *traits: Trait, **changes: Any) -> Family:
    """A family with one part, whose row is a copy of `like` with these traits added and these fields changed."""
    return {part: replace(like, traits=(*like.traits, *traits), **changes)}


def number_of_layers(row: AttentionRow, config: Config) -> int:
    """The number of layers, from the field that counts them or lists their types. Raises InvalidRequest if there is none."""
    if row.stages:
        return sum(_depths(row, config))
    types = config.get(row.types_field)
    return len(types) if config.get(*row.layers) is None and isinstance(types, list) else config.count(*row.layers)


def _depths(row: AttentionRow, config: Config) -> list[int]:
    """The number of layers of each stage. Raises InvalidRequest."""
    depths = config.integers(row.stages)
    if depths is None or len(depths) > MOST_STAGES or not all(0 < depth <= MOST_LAYERS for depth in depths):
        raise config.refusal(row.stages, f"the number of layers of each stage, of at most {MOST_STAGES}", config.get(row.stages))
    return depths


def path_numbers(row: AttentionRow, config: Config) -> dict[str, int]:
    """The numbers to insert into `row.path`. Raises InvalidRequest if there is no such layer."""
    n = config.layer
    if not row.stages:
        return {"n": n}
    blocks = [(stage, block) for stage, depth in enumerate(_depths(row, config)) for block in range(depth)]
    if not 0 <= n < len(blocks):
        raise InvalidRequest.where("/layer", f"0 to {len(blocks) - 1}, the model's layers", str(n))
    return dict(zip(("stage", "block"), blocks[n], strict=True))


def _of_stage(row: AttentionRow, config: Config) -> Config:
    """The config with the width and the number of heads of the layer's stage in place of the lists of all stages."""
    stage = path_numbers(row, config)["stage"]
    config.ignore(*row.width)
    heads = config.of_layer(row.heads[0], stage)
    return config.with_fields({row.heads[0]: heads, row.width[0]: config.count("embed_dim") << stage, STAGE: stage})


def fields_of(row: AttentionRow, config: Config) -> Fields:
    """Fields of LayerSpec. Raises InvalidRequest."""
    config = _of_stage(row, config) if row.stages else config
    n, layer_type = config.layer, type_of_layer(row, config)
    config.layer_type = layer_type
    if layer_type == LINEAR:
        raise config.refusal(
            row.types_field, f"softmax attention; layer {n} is linear attention, which has no attention weights", layer_type
        )
    known = [FULL, *([SLIDING] if _is_windowed(row) else []), *([CHUNKED] if chunks in row.traits else [])]
    if layer_type not in known:
        raise config.refusal(row.types_field, f"{' or '.join(known)} in layer {n}", layer_type)
    heads, width = config.count(*row.heads), config.get(*row.width)
    if config.get(*row.head_dim):
        head_dim = config.count(*row.head_dim)
    elif width:
        head_dim = config.count(*row.width) // heads
    else:
        head_dim = 1
    if not 0 < head_dim <= WIDEST_HEAD:
        raise config.refusal(row.head_dim[0], f"heads of 1 to {WIDEST_HEAD} numbers", head_dim)
    fields: Fields = {"num_heads": heads, "head_dim": head_dim, "rope": None}
    fields |= {operator.field: LayerSpec.model_fields[operator.field].default for operator in OPERATORS if operator.axes}
    if row.kv_heads and config.get(*row.kv_heads) is not None:
        fields["num_kv_heads"] = config.count(*row.kv_heads)
    by_traits: Fields = {}
    for trait in row.traits:
        by_traits |= trait(config)
    fields |= by_traits
    if row.rotary:
        rotated = shared_key_dim(fields) or fields["head_dim"] // num_softmaxes([name for name, value in fields.items() if value])
        rope = rope_fields(config, row.rotary, layer_type, rotated)
        fields["rope"] = None if "rope" in by_traits else rope  # NO_ROPE
    return fields | (row.bias(config) if row.bias else {})


def type_of_layer(row: AttentionRow, config: Config) -> str:
    """The type of the layer: from the field that lists the types, else by the family's rule."""
    ruled = row.layer_type(config) if row.layer_type else None
    listed = config.of_layer(row.types_field)
    if listed is None and ruled is None and _is_windowed(row):
        raise config.refusal(row.types_field, "the type of each layer", None)
    layer_type = str(listed or ruled or FULL)
    return FULL if layer_type in TYPES_LIKE_FULL else layer_type


def _is_windowed(row: AttentionRow) -> bool:
    return any(trait in WINDOWED for trait in row.traits)
