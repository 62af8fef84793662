"""Writes docs/checkpoints.md, the model families whose layers are loaded by their config, and the examples that `attend families` prints.

Run as `python docs/list_checkpoints.py`. A test compares these files with what this script makes.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attend.checkpoints.families import FAMILIES, REASONS
from attend.checkpoints.families.row import type_of_layer
from attend.checkpoints.model import ModelLayer, describe, parts_of, read_model_layer
from attend.checkpoints.rope import ROPE_TYPES
from attend.spec import LayerSpec

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from support.model_cases import MODELS as DOCUMENTS  # noqa: E402
from support.model_cases import tensors_of  # noqa: E402

TRIED = ROOT / "tests" / "golden" / "tiny_families.txt"
PERTURBED = ROOT / "tests" / "golden" / "perturbed.txt"
MODELS = ROOT / "tests" / "golden" / "models"
PAGE = ROOT / "docs" / "checkpoints.md"
EXAMPLES = ROOT / "service" / "attend" / "checkpoints" / "families" / "examples.json"
HEAD = """# Families of models

`attend layers add NAME FOLDER --layer N` loads a layer as the model's own `config.json` describes it ([layers.md](layers.md)). This
list is made by `python docs/list_checkpoints.py` from the table in `service/attend/checkpoints/families/` and the cases in
`tests/golden/models`. Those are tiny models that `tests/golden/generate_models.py` makes with transformers 5.23.0, draws weights for
and saves; the service repeats their eager attention over HTTP to 3e-5 of the largest value. Every other `model_type` is refused by
name, and so is every field that the family does not read, unless it is known that no attention depends on it
(`service/attend/checkpoints/unrelated_fields.py`). A refused field that has no effect on attention can be removed from config.json.

`attend families NAME` prints what the layers of a family compute, step by step, and which kernels compute them, and
`attend families --kernels` the kernels of all families. All families with RoPE read `rope_parameters` of transformers 5 as well as
`rope_theta` and `rope_scaling` of transformers 4, of the types
{kinds}.

The table has {families} model types.
{claim}

| `model_type` | part | beyond projections, scale and softmax |
|---|---|---|
"""
CLAIM = """As a measure of what is missing, `tests/golden/count_families.py` tries every family of that transformers which can be
made tiny and run on tokens, an image or sound; model types that only combine families are not counted. Of {built},
{plain} have no softmax attention. Layers of **{right} of the other {softmax}** are computed, {share:.0%}; none is wrong, and the others
are refused.

`tests/golden/perturb_models.py` changes the fields of these models' configs, removes them, and
adds those that are read though a config leaves them out. Of {changes} such changes in {perturbed}
of the {models} models, {followed} left the layers right, {rejected} were refused here, and {unbuilt} by transformers; {wrong} made a layer
wrong."""


def features(spec: Mapping[str, Any], causal: bool) -> Iterator[str]:
    """What a reader wants to know of a layer's fields."""
    if not causal:
        yield "both directions"
    if spec.get("num_kv_heads", spec["num_heads"]) != spec["num_heads"]:
        yield "grouped heads"
    if rope := spec.get("rope"):
        own = "frequencies of its own" if rope.get("frequencies") else f"{rope['scaling']['type']} scaling" if rope.get("scaling") else ""
        whole = rope["dims"] == spec["head_dim"] or spec.get("latent") or spec.get("differential")
        share = "" if whole else "part of each head"
        yield " ".join(
            filter(None, ["RoPE on", "pairs" if rope["interleaved"] else "halves", share and f"of {share}", own and f"with {own}"])
        ) + (f", by positions on {1 + max(rope['axes'])} axes" if rope.get("axes") else "")
    if norm := spec.get("qk_norm"):
        yield f"{'layer' if norm['kind'] == 'layer' else 'RMS'} norm{' over all heads' if norm.get('over') == 'all' else ''}" + (
            " after RoPE" if norm.get("after_rope") else ""
        )
    if spec.get("latent"):
        yield "latent queries, keys and values" if spec["latent"]["query_rank"] else "latent keys and values"
    if spec.get("indexer"):
        yield "keys selected by an indexer"
    if spec.get("differential"):
        yield "differential attention"
    if gate := spec.get("output_gate"):
        yield f"{gate['granularity']} output gate" + (" with softplus" if gate["activation"] == "softplus" else "")
    for field, words in (
        ("window", "window"),
        ("chunk_size", "chunks"),
        ("query_scale", "queries scaled by position"),
        ("softcap", "softcap"),
        ("sinks", "sinks"),
        ("alibi", "ALiBi"),
        ("relative_bias", "T5's biases"),
    ):
        if spec.get(field):
            yield words
    if relative := spec.get("relative_scores"):
        yield "Transformer-XL's positions" if relative["kind"] == "transformer_xl" else "relative positions by content"
    if grid := spec.get("grid_bias"):
        yield "relative positions in a grid by content" if grid["kind"] == "decomposed" else "a table of relative positions in a grid"


class Case(NamedTuple):
    """A layer of a tiny model."""

    layer: ModelLayer
    kind: str  # its type in a model whose layers differ
    spec: LayerSpec


def cases() -> Iterator[Case]:
    """Every layer of the tiny models."""
    for _, model in sorted(DOCUMENTS.items()):
        for case in model["cases"]:
            layer = describe(model["config"], case["layer"], case["part"])
            config, attention = parts_of(model["config"])[layer.part]
            config.layer = layer.number
            fields, _ = read_model_layer(tensors_of(case), model["config"], case["layer"], case["part"])
            yield Case(layer, type_of_layer(attention, config), LayerSpec.model_validate(fields))


def by_name() -> dict[str, list[Case]]:
    """Model type -> its layers; those of a family with the same row, if it has no tiny model of its own."""
    every = list(cases())
    own = {name: [case for case in every if case.layer.model_type == name] for name in FAMILIES}
    return {
        name: own[name] or next(own[other] for other in FAMILIES if FAMILIES[other] == FAMILIES[name] and own[other]) for name in FAMILIES
    }


def rows(layers: Mapping[str, Sequence[Case]]) -> Iterator[str]:
    """Model type, part, and what the layers of that part have."""
    for name in sorted(layers):
        found: dict[str, list[str]] = {}
        for layer, *_ in layers[name]:
            found.setdefault(layer.part, []).extend(features(layer.fields, layer.row.causal))
        for part, words in found.items():
            yield f"| {name} | {part} | {', '.join(dict.fromkeys(words))} |"


def examples(layers: Mapping[str, Sequence[Case]]) -> str:
    """For each model type a spec of each part and type of layer with other steps, as JSON, a line for each model type."""
    lines = []
    for name in sorted(layers):
        found: dict[Any, dict[str, Any]] = {}
        for layer, kind, spec in layers[name]:
            steps = layer.part, tuple((step.name, step.formula) for step in spec.program)
            fields = spec.model_dump(mode="json", exclude_defaults=True, exclude={"seed", "init"})
            found.setdefault(steps, {"part": layer.part, "type": kind, "causal": layer.row.causal, "spec": fields})
        lines.append(f"{json.dumps(name)}: {json.dumps([*found.values()])}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def claim() -> str:
    """How many families of transformers are computed, by `count_families.py`, and what `perturb_models.py` found."""
    counts = Counter(line.partition(":")[0] for line in TRIED.read_text().splitlines())
    softmax = counts["right"] + counts["refused"] + counts["wrong"]
    record = [line.partition(": ") for line in PERTURBED.read_text().splitlines()]
    kinds = Counter[str]()
    for _, _, counted in record:
        kinds.update({kind: int(n) for kind, _, n in (part.rpartition(" ") for part in counted.split(", "))})
    changed = {"changes": kinds.total(), "perturbed": len(record), "models": len(list(MODELS.glob("*.json")))}
    changed |= {"followed": kinds["right"], "rejected": kinds["refused"], "unbuilt": kinds["not built"], "wrong": kinds["wrong"] or "none"}
    built, share = softmax + counts["no softmax"], counts["right"] / softmax
    return CLAIM.format(built=built, plain=counts["no softmax"], softmax=softmax, right=counts["right"], share=share, **changed)


def pages() -> dict[Path, str]:
    """Every file that this script writes."""
    layers = by_name()
    refused = "".join(f"| {reason} | {' '.join(sorted(names.split()))} |\n" for reason, names in REASONS.items())
    head = HEAD.format(families=len(FAMILIES), claim=claim(), kinds=", ".join(f"`{kind}`" for kind in ROPE_TYPES))
    tail = "\n\nRefused, since the layer has no such operation:\n\n| needs | `model_type` |\n|---|---|\n"
    return {PAGE: head + "\n".join(rows(layers)) + tail + refused, EXAMPLES: examples(layers)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        sys.stdout.write(f"wrote {path.name}\n")
