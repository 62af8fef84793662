"""Writes docs/checkpoints.md: the model families whose layers are loaded by their config.

Run as `python docs/list_checkpoints.py`. A test compares the page with what this script makes.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.checkpoints.families import FAMILIES, REASONS
from service.checkpoints.model import describe

ROOT = Path(__file__).parent.parent
TRIED = ROOT / "tests" / "golden" / "tiny_families.txt"
PAGE = ROOT / "docs" / "checkpoints.md"
HEAD = """# Families of models

`attend layers add NAME FOLDER --layer N` loads a layer as the model's own `config.json` describes it ([layers.md](layers.md)). This
list is made by `python docs/list_checkpoints.py` from the table in `service/checkpoints/families/` and the cases in
`tests/golden/models`. Those are tiny models that `tests/golden/generate_models.py` makes with transformers 5.23.0, draws weights for
and saves; the service repeats their eager attention over HTTP to 3e-5 of the largest value. Every other `model_type` is refused by
name, and so is every field about attention that is not understood.

The table has {families} model types. As a measure of what is missing, `tests/golden/count_families.py` tries every family of that
transformers which can be made tiny and run on tokens, an image or sound; model types that only combine families are not counted.
Of {built}, {plain} have no softmax attention. Layers of **{right} of the other {softmax}** are computed, {share:.0%}; none is wrong, and
the others are refused.

| `model_type` | part | beyond projections, scale and softmax |
|---|---|---|
"""


def features(spec: Mapping[str, Any], causal: bool) -> Iterator[str]:
    """What a reader wants to know of a layer's fields."""
    if not causal:
        yield "both directions"
    if spec.get("num_kv_heads", spec["num_heads"]) != spec["num_heads"]:
        yield "grouped heads"
    if rope := spec.get("rope"):
        own = "frequencies of its own" if rope.get("frequencies") else f"{rope['scaling']['type']} scaling" if rope.get("scaling") else ""
        share = "" if rope["dims"] == spec["head_dim"] or spec.get("latent") else "part of each head"
        yield " ".join(
            filter(None, ["RoPE on", "pairs" if rope["interleaved"] else "halves", share and f"of {share}", own and f"with {own}"])
        )
    if norm := spec.get("qk_norm"):
        yield f"{'layer' if norm['kind'] == 'layer' else 'RMS'} norm{' over all heads' if norm.get('over') == 'all' else ''}" + (
            " after RoPE" if norm.get("after_rope") else ""
        )
    if spec.get("latent"):
        yield "latent queries, keys and values" if spec["latent"]["query_rank"] else "latent keys and values"
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


def rows() -> Iterator[str]:
    models = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "tests" / "golden" / "models").glob("*.json"))}
    for kind in sorted(FAMILIES):
        found: dict[str, list[str]] = {}
        for model in models.values():
            if model["config"]["model_type"] != kind:
                continue
            for case in model["cases"]:
                layer = describe(model["config"], case["layer"], case["part"])
                found.setdefault(case["part"], []).extend(features(layer.fields, layer.attention.causal))
        yield from (f"| {kind} | {part} | {', '.join(dict.fromkeys(words))} |" for part, words in found.items())


def page() -> str:
    refused = "".join(f"| {reason} | {' '.join(sorted(names.split()))} |\n" for reason, names in REASONS.items())
    counts = Counter(line.partition(":")[0] for line in TRIED.read_text().splitlines())
    softmax = counts["right"] + counts["refused"] + counts["wrong"]
    head = HEAD.format(
        families=len(FAMILIES),
        built=softmax + counts["no softmax"],
        plain=counts["no softmax"],
        softmax=softmax,
        right=counts["right"],
        share=counts["right"] / softmax,
    )
    return (
        head + "\n".join(rows()) + "\n\nRefused, since the layer has no such operation:\n\n| needs | `model_type` |\n|---|---|\n" + refused
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")
