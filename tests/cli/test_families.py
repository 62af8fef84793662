"""`attend families` and `attend layers describe`: what layers compute, printed from their programs."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from attend.checkpoints.families import FAMILIES
from attend.checkpoints.families.examples import examples
from attend.spec import LayerSpec
from support.command import run_attend
from support.server import Server


def printed(*arguments: str) -> str:
    done = run_attend(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def steps_in(text: str) -> list[tuple[str, str]]:
    """The printed steps: names and formulas."""
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return [(name, formula.strip()) for name, _, formula in (line.strip().partition(" ") for line in lines)]


def formulas_of(spec: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step.name, step.formula) for step in LayerSpec.model_validate(spec).program if step.formula]


def test_every_family_is_listed_with_its_parts() -> None:
    lines = [line.split(maxsplit=1) for line in printed("families").splitlines()]
    assert {name: {*parts.split(", ")} for name, parts in lines} == {name: {*parts} for name, parts in FAMILIES.items()}


def test_the_formulas_of_a_family_are_those_of_its_program() -> None:
    """Gemma 2 has a soft cap, and layers with and without a window; BERT has no RoPE, and is not causal."""
    blocks = printed("families", "gemma2").strip().split("\n\n")
    for block, kind in zip(blocks, ("sliding_attention", "full_attention"), strict=True):
        assert block.startswith(f"decoder, layers of type {kind}, causal;") and block.splitlines()[-1].startswith("kernels: whole steps, ")
        steps = dict(steps_in(block))
        order = ["project_query", "rotate_query", "scaled_products", "softcap", "mask", "softmax", "weighted_values", "output"]
        assert [name for name in steps if name in order] == order
        assert steps["softcap"] == "S = softcap \N{MIDDLE DOT} tanh(S / softcap)"
        assert ("visible_intervals" in steps) == (kind == "sliding_attention")
    blocks = printed("families", "bert").strip().split("\n\n")
    for block, example in zip(blocks, examples()["bert"], strict=True):
        assert block.startswith(f"{example['part']}, layers of type {example['type']}; x are") and steps_in(block) == formulas_of(
            example["spec"]
        )


@pytest.mark.parametrize("arguments", [(), ("deepseek_v32",)], ids=str)
def test_families_as_json_have_steps_and_kernels(arguments: tuple[str, ...]) -> None:
    described = json.loads(printed("families", *arguments, "--json"))
    every = examples()
    assert {*described} == ({*arguments} or {*every})
    for name, layers in described.items():
        for layer, example in zip(layers, every[name], strict=True):
            assert {key: layer[key] for key in ("part", "type", "causal")} == {key: example[key] for key in ("part", "type", "causal")}
            own = [step for step in layer["steps"].items() if step[0] not in ("visible_causal", "visible_intervals", "all_visible", "mask")]
            assert own == [step for step in formulas_of(example["spec"]) if step in own]
            assert not layer["causal"] or "mask" in layer["steps"]
            assert [*layer["kernels"]] == ["whole", "causal", "masked", "session"]


def test_the_table_of_kernels_has_a_line_for_each_part_with_other_kernels() -> None:
    """The cells are those of --json. Layers with an indexer have fused kernels."""
    title, *lines = printed("families", "--kernels").splitlines()
    assert title.split() == ["model_type", "part", "whole", "causal", "masked", "session"]
    described = json.loads(printed("families", "--json"))
    expected = {(name, layer["part"], *layer["kernels"].values()) for name, layers in described.items() for layer in layers}
    starts = [title.index(name) for name in title.split()]
    cells = [tuple(line[i:j].strip() for i, j in pairwise([*starts, None])) for line in lines]
    assert len(lines) == len(expected) and {*cells} == expected
    assert all(kernel == "sdpa" for layer in described["deepseek_v32"] for kernel in layer["kernels"].values())
    assert printed("families", "bert", "--kernels").splitlines() == [title, *(line for line in lines if line.startswith("bert "))]


def test_an_unknown_family_is_refused_with_a_similar_one() -> None:
    done = run_attend("families", "gema2", env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.returncode == 2 and not done.stdout
    assert b"expected a model_type of `attend families`, such as gemma2, got gema2" in done.stderr
    assert b"such as" not in run_attend("families", "0", env={"COLUMNS": "200", "NO_COLOR": "1"}).stderr


def test_a_layer_is_described_by_its_steps(server: Server, http: httpx.Client) -> None:
    """On a server, and of a configuration."""
    spec = {"d_model": 8, "num_heads": 2, "rope": {}, "softcap": 3.0, "sinks": True}
    assert http.put("/layers/described", json={"spec": spec}).is_success
    place = ["--url", server.url]
    assert steps_in(printed("layers", "describe", "described", *place)) == formulas_of(spec)
    assert [*json.loads(printed("layers", "describe", "described", *place, "--json")).items()] == formulas_of(spec)
    http.delete("/layers/described")
    configured = ["--layers", json.dumps({"described": spec})]
    assert steps_in(printed("layers", "describe", "described", *configured)) == formulas_of(spec)
    gone = run_attend("layers", "describe", "described", *place)
    assert gone.returncode == 1 and b'"described"' in gone.stderr
