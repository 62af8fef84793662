"""Reads a model's config.json: which layer has which kind of attention, and its rotary embedding.

A `Config` records which fields were read. A field that was not read, and whose name suggests attention, is refused: a field that a loader
ignores is the usual cause of wrong results.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from service.errors import InvalidRequest

MAX_SHOWN = 100  # characters of a value in a refusal
LARGEST = 1 << 31  # number in a config
ABOUT_ATTENTION = re.compile(
    r"head|attn|attention|rope|rotary|window|sliding|chunk|scal|softcap|multiplier|norm|bias|position|layer_type|theta|sink|gate|gating|"
    r"temper|qk|kv|query|key|alibi|local|global|causal|pattern|mup|lora|clip|expert_layer|use_parallel|relative|block_sparse|attention_type|cross_att|diff"
)
WITHOUT_EFFECT = re.compile(
    r"dropout|pdrop|initializer|^init_|classifier|pretraining|vocab|expert|router|routed|route_scale|moe|mlp|ffn|(^|_)ff_|lm_head|residual|"
    r"^(layer_?|rms_?|batch_?)?norm_eps(ilon)?$|^layer_norm_elementwise_affine$|^norm_(bias|topk_prob|type)$|^(use_)?(pre|post)_norm$|"
    r"normalize_before|layer_norm_before|^embedding_multiplier$|^(re)?scale_embeddings?$|^normalize_embeddings?$|^static_position_embeddings$|"
    r"^(left_|right_)?max_(2d_|encoder_|decoder_|source_|target_)?position|^n_positions$|reset_position|^logits?_|^final_logit|^temperature$|answer_loss|prediction_head|"
    r"aggregation|sparse_step|prefix_dense|softmax_in_fp32|altup|activation_sparsity|chunk_size_feed_forward|^output_attentions$|"
    r"^(cross_attention_hidden_size|add_cross_attention)$|num_heads_for_|^_|^torch|^use_cache|^label|id2label|label2id|^tie"
)


class Config:
    """The fields of a config.json, or of one section of it (`text_config`), and the number and type of the layer that they are read for."""

    def __init__(self, fields: Mapping[str, Any], at: str = "/config", layer: int = 0) -> None:
        self.fields, self.at, self.layer = fields, at, layer
        self.layer_type = ""  # set once it is known
        self.read: set[str] = set()

    def with_fields(self, fields: Mapping[str, Any]) -> "Config":
        """The config with these fields replaced. Both configs share the record of fields that were read."""
        config = Config({**self.fields, **fields}, self.at, self.layer)
        config.read = self.read
        return config

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is there and not null; `default` if none is."""
        self.read.update(names)
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), default)

    def ignore(self, *names: str) -> None:
        """Marks fields that have no effect here, or only under a condition that was read."""
        self.read.update(names)

    def count(self, *names: str, most: int = LARGEST, default: int | None = None) -> int:
        """A positive integer. Raises InvalidRequest if it is none, or absent without a default."""
        if type(value := self.get(*names, default=default)) is not int or not 0 < value <= most:
            raise self.refusal(names[0], f"an integer from 1 to {most}", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A number. Raises InvalidRequest if it is none, or absent without a default."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self.refusal(names[0], "a number", value)
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """true or false. Raises InvalidRequest if it is neither, or absent without a default."""
        if not isinstance(value := self.get(*names, default=default), bool):
            raise self.refusal(names[0], "true or false", value)
        return value

    def of_layer(self, name: str, item: int | None = None) -> Any:
        """An item of a list, by default the layer's; None if the field is absent. Raises InvalidRequest if the list is too short."""
        n = self.layer if item is None else item
        if (items := self.get(name)) is None:
            return None
        if not isinstance(items, list) or n >= len(items):
            raise self.refusal(name, f"a list with an item for layer {n}", items)
        return items[n]

    def expect(self, name: str, *values: Any) -> None:
        """Raises InvalidRequest unless the field is absent, null or one of `values`."""
        value = self.get(name, default=values[0])
        if not any(value == wanted and isinstance(value, bool) == isinstance(wanted, bool) for wanted in values):
            raise self.refusal(name, " or ".join(map(brief, values)), value)

    def section(self, name: str) -> "Config | None":
        """A part of the config that is an object, such as `text_config`."""
        inner = self.get(name)
        return Config(inner, f"{self.at}/{name}") if isinstance(inner, Mapping) else None

    def refusal(self, name: str, expected: str, got: Any) -> InvalidRequest:
        return InvalidRequest.where(f"{self.at}/{name}", expected, "nothing" if got is None else brief(got))

    def require_all_read(self, irrelevant: str = "") -> None:
        """Raises InvalidRequest for a field that is about attention by its name and was not read; `irrelevant`: a pattern of exceptions."""
        for name, value in self.fields.items():
            known = name in self.read or WITHOUT_EFFECT.search(name) or (irrelevant and re.search(irrelevant, name))
            if value is not None and not known and ABOUT_ATTENTION.search(name):
                raise self.refusal(name, "no field about attention that is not understood for this model_type", value)


def brief(value: Any) -> str:
    """The value as JSON, at most MAX_SHOWN characters of it."""
    return json.dumps(value, default=str)[:MAX_SHOWN]
