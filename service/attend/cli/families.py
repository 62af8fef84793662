"""`attend families`: the families of models whose layers are loaded by their config, their formulas, and the kernels that compute them."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from attend.attention.program import formulas, program_of
from attend.checkpoints.families import FAMILIES
from attend.checkpoints.families.examples import Example, examples
from attend.cli.terminal import AsJson
from attend.spec import LayerSpec

EPILOG = """\b
Examples:
  attend families
  attend families gemma2
  attend families --kernels"""


def families(
    name: Annotated[str | None, typer.Argument(help="A model_type, as config.json has it.", show_default=False)] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Which kernel computes the calls of each family.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the families of models whose layers are loaded by their config; with a name, what their layers compute, step by step."""
    every = examples()
    if name is not None and name not in every:
        near = get_close_matches(name, every, 1)
        raise typer.BadParameter(f"expected a model_type of `attend families`{f', such as {near[0]}' if near else ''}, got {name}")
    chosen = every if name is None else {name: every[name]}
    if as_json:
        typer.echo(
            json.dumps({family: [_described(example) for example in layers] for family, layers in chosen.items()}, ensure_ascii=False)
        )
    elif kernels:
        _print_kernels(chosen)
    elif name is None:
        for family in chosen:
            typer.echo(f"{family:32} {', '.join(FAMILIES[family])}")
    else:
        for example in chosen[name]:
            _print_formulas(example)


def _described(example: Example) -> dict[str, Any]:
    from attend.attention.kernels.choice import kernels_of  # imports torch, in seconds

    spec = LayerSpec.model_validate(example["spec"])
    place = {key: example[key] for key in ("part", "type", "causal")}
    program = program_of(spec, spec.features | ({"causal"} if example["causal"] else set()))
    return {**place, "kernels": kernels_of(spec), "steps": formulas(program)}


def _print_formulas(example: Example) -> None:
    described = _described(example)
    kind = f", layers of type {example['type']}" if example["type"] else ""
    typer.echo(f"{example['part']}{kind}{', causal' if example['causal'] else ''}; x are the inputs of queries, z those of keys:")
    print_steps(described["steps"])
    typer.echo("kernels: " + ", ".join(f"{call} {kernel}" for call, kernel in described["kernels"].items()) + "\n")


def print_steps(steps: Mapping[str, str]) -> None:
    """Prints the formulas of a layer, a line for each step."""
    for step, formula in steps.items():
        typer.echo(f"  {step:20} {formula}")


def _print_kernels(chosen: Mapping[str, Sequence[Example]]) -> None:
    """Prints a line for each family and part whose layers have other kernels."""
    from attend.attention.kernels.choice import CALLS, kernels_of

    typer.echo(f"{'model_type':32} {'part':10} " + " ".join(f"{call:12}" for call in CALLS))
    for family, layers in chosen.items():
        lines = dict.fromkeys((example["part"], *kernels_of(LayerSpec.model_validate(example["spec"])).values()) for example in layers)
        for part, *names in lines:
            typer.echo(f"{family:32} {part:10} " + " ".join(f"{name:12}" for name in names))
