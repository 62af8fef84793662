"""The pages docs/checkpoints/MODEL_TYPE.md, one for each row of the table of families; `list_checkpoints.py` writes them.

A page is made from the row's golden cases: their configs, the shapes of their tensors, and the difference of our float64 reference from
what transformers computed. What a field of a config determines is found by changing it and comparing the specs.
"""

import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from attend.attention.reference.forward import attend
from attend.checkpoints.families import FAMILIES, fields_of
from attend.checkpoints.families.row import type_of_layer
from attend.checkpoints.model import ModelLayer, describe, parts_of, read_model_layer
from attend.errors import InvalidRequest
from attend.spec import LayerSpec

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "docs")]
from layer_formula import formulas  # noqa: E402

from support.framework_cases import array  # noqa: E402
from support.model_cases import MODELS, tensors_of  # noqa: E402

OLDER = """rope_scaling rope_theta rotary_emb_base rotary_pct partial_rotary_factor original_max_position_embeddings"""  # names about RoPE
STORED = {  # layout -> how matrices are stored
    "convolutions": "Matrices are convolutions of width 1 in groups, which become their blocks.",
    "stacked": "One matrix has the rows [Q; K; V].",
    "grouped": "One matrix has the rows [heads of K and V, (their heads of Q, K, V), head_dim].",
    "codegen": "One matrix has its rows in four blocks [Q; V; K].",
    "gpt2": "Matrices are [in, out], one of them with the columns [Q | K | V].",
    "separate, norms less 1": "Weights of norms are stored less 1.",
    "gated queries, norms less 1": "The matrix of Q has the rows [heads, (Q, gate), head_dim]; weights of norms are stored less 1.",
    "xlnet": "Matrices are [in, heads, head_dim]. Scores between segments, which `token_type_ids` add, are not computed.",
    "differential": "Rows of Q, K and V are [halves, heads, …], so that each half has all heads.",
    "gated stack": "One matrix has the rows [gate; Q; K; V].",
}
ABSENT = object()  # the value of a field that a config does not have
MOST_NAMES = 4  # of layers in the remark on a line of a formula
LABELS = ("part", "layers of type", "cases", "layers")


@dataclass(frozen=True)
class Case:
    """One layer of a tiny model: its config, what went in, and what transformers computed."""

    model: str
    index: int

    @property
    def config(self) -> dict[str, Any]:
        return MODELS[self.model]["config"]

    @property
    def fields(self) -> dict[str, Any]:
        return MODELS[self.model]["cases"][self.index]

    @cached_property
    def layer(self) -> ModelLayer:
        return describe(self.config, self.fields["layer"], self.fields["part"])

    @cached_property
    def loaded(self) -> tuple[LayerSpec, Mapping[str, Any]]:
        fields, weights = read_model_layer(tensors_of(self.fields), self.config, self.fields["layer"], self.fields["part"])
        return LayerSpec.model_validate(fields), weights

    @cached_property
    def difference(self) -> float:
        """The largest difference of our output from transformers', as a share of the largest value."""
        spec, weights = self.loaded
        request = {name: array(x) for name, x in self.fields["request"].items() if name != "causal"}
        ours = attend(spec, weights, **request, causal=self.fields["request"]["causal"]).output
        theirs = array(self.fields["output"])
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """What may tell this case from the others of its row: part, type of the layer, model, number of the layer."""
        config, attention = parts_of(self.config)[self.layer.part]
        config.layer = self.layer.number
        kind = type_of_layer(attention, config)
        return self.layer.part, kind, self.model, f"{self.model} {self.layer.number}"


def cases_by_row() -> dict[tuple[str, ...], list[Case]]:
    """Model types with the same row -> their cases."""
    groups: list[tuple[Any, list[str]]] = []
    for name in FAMILIES:
        same = next((names for family, names in groups if family == FAMILIES[name]), None)
        if same is None:
            groups.append((FAMILIES[name], [name]))
        else:
            same.append(name)
    cases = [Case(model, index) for model, document in MODELS.items() for index in range(len(document["cases"]))]
    order = {name: sorted((case for case in cases if case.layer.model_type == name), key=lambda case: case.model) for name in FAMILIES}
    return {tuple(names): [case for name in names for case in order[name]] for _, names in groups}


def merged(cases: Sequence[Case]) -> Iterator[str]:
    """The formulas of all cases. A step that differs is written once for each of its variants, with the layers that have it."""
    layers = [formulas(case.loaded[0], case.layer.row.causal, case.layer.part == "cross") for case in cases]
    order = sorted(dict.fromkeys(step for steps in layers for step in steps), key=lambda step: max(_place(steps, step) for steps in layers))
    for step in order:
        texts = [steps.get(step) for steps in layers]
        level = next(n for n in range(4) if _decides([case.labels[n] for case in cases], texts))
        for text in dict.fromkeys(filter(None, texts)):
            names = list(dict.fromkeys(case.labels[level] for case, own in zip(cases, texts, strict=True) if own == text))
            listed = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
            yield text if set(texts) == {text} else f"{text}   ({LABELS[level]} {listed})"


def _place(steps: Mapping[str, str], step: str) -> int:
    return list(steps).index(step) if step in steps else -1


def _decides(labels: Sequence[str], texts: Sequence[str | None]) -> bool:
    return len(set(zip(labels, texts, strict=True))) == len(set(labels))


@dataclass
class Effects:
    """What the fields of a row's configs do, found by changing each in every case."""

    changes: dict[str, set[str]]  # field -> fields of the spec that it changes
    refused: dict[str, str]  # field -> the only value of these configs that is accepted
    checked: set[str]  # fields that have to agree with others
    absent: set[str]  # fields that are read, but that no config here has


def effects(cases: Sequence[Case]) -> Effects:
    """What the fields of the configs of these cases do."""
    found = Effects({}, {}, set(), set())
    for case in cases:
        for path, value, others in _variations(case):
            name = ".".join(path)
            if value is ABSENT:
                found.absent.add(name)
                continue
            others += [other for c in cases if (other := reduce(_inner, path, c.config)) not in (ABSENT, value)]
            outcomes = [_effect(case, path, other) for other in others]
            changes = set().union(*(outcome for outcome in outcomes if isinstance(outcome, set)))
            if changes:
                found.changes.setdefault(name, set()).update(changes)
            elif name in outcomes:
                found.refused[name] = json.dumps(value)
            elif any(isinstance(outcome, str) for outcome in outcomes):
                found.checked.add(name)
    for name in found.changes:
        found.refused.pop(name, None)
    found.checked -= {*found.changes, *found.refused}
    found.absent -= {*found.changes, *found.refused, *found.checked}
    return found


def _effect(case: Case, path: Sequence[str], value: Any) -> set[str] | str:
    """The fields of the spec that another value of a field changes; if it is refused, the field that the refusal names."""
    name = ".".join(path)
    try:
        layer = describe(_changed(case.config, path, value), case.layer.number, case.layer.part)
    except InvalidRequest as refusal:
        return name if any(problem.at.endswith(f"/{path[-1]}") for problem in refusal.problems) else "another"
    before, after = ({**x.conversion.get("factors", {}), **x.conversion.get("groups", {})} for x in (case.layer, layer))
    inside = _differences(before, after)
    return _differences(case.layer.fields, layer.fields) | {f"{name}.weight" for name in inside}


def _variations(case: Case) -> Iterator[tuple[tuple[str, ...], Any, list[Any]]]:
    """Path of a field of the config that is read, its value, and other values."""
    config, attention = parts_of(case.config)[case.layer.part]
    config.layer = case.layer.number
    fields_of(attention, config)
    above = tuple(config.at.split("/")[2:])
    names = {*attention.heads, *attention.kv_heads, *attention.width, *attention.head_dim, *OLDER.split()}
    known = {"model_type", attention.types_field, "per_layer_config", *attention.layers, *(names - set(config.fields))}
    for name in sorted(config.read - known):
        value = config.fields.get(name, ABSENT)
        sections = [((), value)] if isinstance(value, Mapping) else []
        if sections and all(x is None or isinstance(x, Mapping) for x in value.values()):
            sections = [((kind,), settings) for kind, settings in value.items() if settings]
        for inner, settings in sections:
            yield from (((*above, name, *inner, field), old, _others_than(old)) for field, old in settings.items() if field != "rope_type")
        if not sections:
            yield (*above, name), value, _others_than(value)


def _others_than(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2 or 1, value + 1]
    if isinstance(value, float):
        return [value / 2, value * 2 or 1.0]
    return [value[::-1]] if isinstance(value, list) else [True, 3, 0.5, "other", [3]]


def _inner(fields: Any, name: str) -> Any:
    return fields.get(name, ABSENT) if isinstance(fields, Mapping) else ABSENT


def _changed(config: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    config = inner = copy.deepcopy(dict(config))
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return config


def _differences(one: Any, other: Any, at: str = "") -> set[str]:
    """Paths at which two specs differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set().union(*(_differences(one.get(name), other.get(name), f"{at}.{name}".lstrip(".")) for name in {*one, *other}))
    return set() if one == other else {at}


def page(names: Sequence[str], cases: Sequence[Case]) -> str:
    """The page of one row."""
    found = effects(cases)
    number, part = cases[0].layer.number, f" --part {cases[0].layer.part}" if len(parts_of(cases[0].config)) > 1 else ""
    models = list(dict.fromkeys(case.model for case in cases))
    lines = [
        f"# {', '.join(names)}",
        "",
        f"`attend layers add NAME FOLDER --layer {number}{part}` loads a layer. What is computed from inputs x, and z where keys differ:",
        "",
        "```",
        *merged(cases),
        "```",
        "",
        f"The largest difference from transformers' eager attention is {max(case.difference for case in cases):.1e} of the largest value,",
        f"in {len(cases)} {'layer' if len(cases) == 1 else 'layers'} of tiny models: {', '.join(models)}.",
        "",
        "| field of the config | fields of the spec |",
        "|---|---|",
        *(f"| `{name}` | {', '.join(f'`{field}`' for field in sorted(fields))} |" for name, fields in sorted(found.changes.items())),
        "",
    ]
    if found.checked:
        lines += [f"Must agree with other fields: {_listed(found.checked)}.", ""]
    if found.refused:
        lines += [
            f"Refused in these models: {', '.join(f'`{name}` other than `{value}`' for name, value in sorted(found.refused.items()))}.",
            "",
        ]
    if found.absent:
        lines += [f"Also read where a config has them: {_listed(found.absent)}.", ""]
    return "\n".join([*lines, *_tensors(cases)])


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _tensors(cases: Sequence[Case]) -> Iterator[str]:
    """Names and shapes of the tensors of a layer of each part."""
    layer = cases[0].layer
    notes = [STORED[layer.row.layout]] if layer.row.layout in STORED else []
    conversion = layer.conversion
    if factors := conversion.get("factors"):
        notes.append(f"The config has factors that are multiplied into the weights of {', '.join(factors)}.")
    if "projects_table" in conversion:
        own = "projections of its own" if conversion["projects_table"] else "those of Q and K"
        normed = ", after a layer norm" if conversion["table_eps"] is not None else ""
        notes.append(f"Vectors of distances are products of the table that layers share{normed}, and {own}.")
    if notes:
        yield " ".join(notes)
        yield ""
    for case in list({case.layer.part: case for case in reversed(cases)}.values())[::-1]:
        spec, prefix = case.loaded[0], case.layer.find(case.fields["shapes"]).prefix
        sizes = f"{spec.num_heads} heads of {spec.head_dim}"
        sizes += f", {spec.num_kv_heads} of keys and values" if spec.num_kv_heads != spec.num_heads else ""
        shapes = [f"`{name.removeprefix(prefix + '.')}` {shape}" for name, shape in case.fields["shapes"].items()]
        path = case.layer.row.path
        path = prefix.removesuffix(case.layer.path) + path
        yield f"Tensors below `{path}` in {case.model}, whose d_model is {spec.d_model}, with {sizes}:"
        yield f"{', '.join(shapes)}."
        yield ""
