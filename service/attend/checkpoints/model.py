"""Attention layers of a whole model by its own config.json, which determines the fields that tensors do not.

    layer = describe(config, layer=3, part=None)      which layer, and the fields of LayerSpec that the config determines
    layer.find(names)                                 its tensors among the names of a checkpoint
    read_model_layer(tensors, config, layer=3)        fields for LayerSpec, canonical weights

A model_type that is not in `families/`, a field that is not known to be about something else than attention, and any contradiction between
config, tensors and the caller's spec raise InvalidRequest; nothing is guessed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from attend.checkpoints.config import MAX_SHOWN, Config
from attend.checkpoints.detection import Match, complete_matches, find_matches, listed, normalised
from attend.checkpoints.families import COMPOSITES, FAMILIES, REFUSED, AttentionRow, Family, fields_of, path_numbers
from attend.checkpoints.families.traits import CONVERSION
from attend.checkpoints.layout import Fields, Weights
from attend.checkpoints.layouts import LAYOUTS
from attend.checkpoints.reader import read_match
from attend.errors import InvalidRequest
from attend.tensors import Array

SECTIONS = ("text_config", "decoder", "encoder", "vision_config", "audio_config", "encoder_config")
NORMS_OF_BLOCKS = "layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_norm_eps norm_eps norm_epsilon"  # fields of layers without norms
OTHER_TOWERS = ("vision", "visual", "audio", "image")  # in names of layers that are not about text


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One attention layer of a model, as its config describes it."""

    model_type: str
    part: str
    number: int
    row: AttentionRow  # of the table of families
    fields: Fields  # of LayerSpec
    path: str  # the end of the layer's name in the checkpoint
    conversion: Fields  # how its tensors are converted, see `CONVERSION`

    def find(self, names: Iterable[str]) -> Match:
        """The layer's tensors. Raises InvalidRequest if there are none, or several layers of that name."""
        path, names, ignored = self.path, list(names), dict.fromkeys(self.row.ignored)
        layouts = [replace(layout, ignored={**layout.ignored, **ignored}) for layout in LAYOUTS if layout.name == self.row.layout]
        found = [match for match in find_matches(names, layouts) if f".{match.stem}".endswith(f".{path}")]
        if len({match.stem for match in found}) > 1:  # in several towers
            is_tower = self.part in ("vision", "audio")
            found = [match for match in found if any(word in match.stem for word in OTHER_TOWERS) == is_tower]
        matches = complete_matches(found)
        if len(matches) != 1:
            got = listed(match.prefix for match in matches)
            if not matches and found:
                got = f"{found[0].prefix} without {listed(found[0].missing)}"
            raise InvalidRequest.where("/layer", f"one layer whose name ends with {path}, with {self.row.layout} matrices", got)
        return self._with_table(matches[0], names) if self.row.table else matches[0]

    def _with_table(self, match: Match, names: Iterable[str]) -> Match:
        """The match with the table of relative biases that several layers share. Raises InvalidRequest if it is not there."""
        ending = self.row.table.format(n=self.number)
        tables = [name for name in names if f".{normalised(name)}".endswith(f".{ending}")]
        if len(tables) != 1:
            raise InvalidRequest.where("/weights", f"one table of relative biases whose name ends with {ending}", listed(tables))
        shared = {self.row.table_role: tables[0]}
        if self.conversion.get("table_eps") is not None:
            shared |= {f"table_norm.{kind}": f"{tables[0].rpartition('rel_embeddings')[0]}LayerNorm.{kind}" for kind in ("weight", "bias")}
        if missing := [name for name in shared.values() if name not in names]:
            raise InvalidRequest.where("/weights", f"the norm of {tables[0]}", f"no {missing[0]}")
        projects = self.conversion.get("projects_table")
        if projects is not None and projects != ("position_key.weight" in match.names):
            expected = "projections of positions" if projects else "no projections of positions"
            raise InvalidRequest.where("/weights", f"{expected} in {match.prefix}, as share_att_key has it", "others")
        return replace(match, names={**match.names, **shared})

    def read(self, match: Match, tensors: Mapping[str, Array], spec: Mapping[str, Any]) -> tuple[Fields, Weights]:
        """`read_model_layer` for the tensors that `find` found."""
        for name, value in spec.items():
            if name in self.fields and value != self.fields[name]:
                raise InvalidRequest.where(f"/spec/{name}", f"{json.dumps(self.fields[name])}, as the config has it", json.dumps(value))
        return read_match(match, tensors, {**spec, **self.fields}, self.conversion)

    def tensors(self, names: Iterable[str]) -> list[str]:
        """The names of all tensors that the layer needs or that stand below its name."""
        names = list(names)
        match = self.find(names)
        unused = () if self.fields["relative_bias"] else ("shared_table",)  # cross-attention beside a stack that has a table
        needed = {name for role, name in match.names.items() if role not in unused}
        return [name for name in names if normalised(name).startswith(f"{match.stem}.") or name in needed]


def parse_config(text: str | bytes) -> Mapping[str, Any]:
    """A config.json. Raises InvalidRequest if it is no JSON object."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest.where("/config", "the text of a config.json, a JSON object", "something else")
    return fields


def parts_of(fields: Mapping[str, Any]) -> dict[str, tuple[Config, AttentionRow]]:
    """Part -> the config or its section about it, and its row of the table. Raises InvalidRequest if there is none."""
    sections = _sections(fields)  # reversed, since the first section with a part determines it
    known = [section for section in reversed(sections) if str(section.get("model_type")) in FAMILIES] or sections[:1]
    return {part: (section, row) for section in known for part, row in _family(section).items()}


def _sections(fields: Mapping[str, Any]) -> list[Config]:
    """The config, or the sections of one that has images or sounds, with that about text first."""
    config = Config(fields)
    names = SECTIONS if config.get("model_type") in COMPOSITES.split() else ()
    return [section for name in names if (section := config.section(name)) is not None] or [config]


def _family(config: Config) -> Family:
    """The row of a config's model_type. Raises InvalidRequest, with the reason, if there is none."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise config.refusal("model_type", "a name", model_type)
    if model_type in REFUSED:
        raise config.refusal("model_type", f"a model without {REFUSED[model_type]}", model_type)
    if model_type not in FAMILIES:
        near = get_close_matches(str(model_type), FAMILIES, n=4) or sorted(FAMILIES)
        raise config.refusal("model_type", f"a known model_type ({listed(near)})", model_type)
    return {part: row for part, row in FAMILIES[model_type].items() if not row.flag or config.get(row.flag)}


def describe(fields: Mapping[str, Any], layer: int, part: str | None = None) -> ModelLayer:
    """Layer `layer` of a model. `part` may be left out where the model has only one. Raises InvalidRequest."""
    parts = parts_of(fields)
    if part not in parts:
        main = _family(_sections(fields)[0])
        if part is not None or len(main) > 1:
            got = "none" if part is None else f'"{part}"'
            raise InvalidRequest.where("/part", f"one of {', '.join(parts)}, as {fields['model_type']} has them", got)
        (part,) = main
    assert part is not None
    section, row = parts[part]
    config = _for_layer(section, layer)
    model_type = str(config.get("model_type"))
    if not row.stages and config.get(*row.layers) is not None and not 0 <= layer < (count := config.count(*row.layers)):
        raise InvalidRequest.where("/layer", f"0 to {count - 1}, the model's layers", str(layer))
    try:
        spec = fields_of(row, config)
    except (TypeError, ValueError, ArithmeticError) as error:  # a value of another type than transformers writes
        raise InvalidRequest.where(config.at, f"values as {model_type} has them", str(error)[:MAX_SHOWN]) from error
    config.require_all_read(row.irrelevant if spec["qk_norm"] else f"{row.irrelevant} {NORMS_OF_BLOCKS}")
    conversion = spec.pop(CONVERSION, {})
    return ModelLayer(model_type, part, layer, row, spec, row.path.format(**path_numbers(row, config)), conversion)


def _for_layer(config: Config, layer: int) -> Config:
    """The config with the fields of `per_layer_config` that replace others in this layer."""
    own = config.get("per_layer_config", default={})
    if not isinstance(own, Mapping) or not isinstance(own.get(str(layer), {}), Mapping):
        raise config.refusal("per_layer_config", "fields for each layer", own)
    return Config({**config.fields, **own.get(str(layer), {})}, config.at, layer)


def read_model_layer(
    tensors: Mapping[str, Array], fields: Mapping[str, Any], layer: int, part: str | None = None, spec: Mapping[str, Any] | None = None
) -> tuple[Fields, Weights]:
    """Fields for LayerSpec and canonical weights of one layer of a model.

    `spec` may add fields that the config does not determine, such as dtype. Raises InvalidRequest, naming the field or tensor.
    """
    described = describe(fields, layer, part)
    return described.read(described.find(tensors), tensors, spec or {})
