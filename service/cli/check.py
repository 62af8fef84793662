"""`attend check`: the service, or someone's own attention, against the reference in NumPy float64."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from service.cli.backend import Backend, open_backend
from service.cli.exits import complain, reported
from service.cli.flags import Config, Url, with_settings
from service.cli.trials import Worst, try_cases

EPILOG = """Examples: attend check --cases 1000

attend check --url http://127.0.0.1:8000 --seed 7

attend check --module my_package:MyAttention --with mask_means=block"""
Cases = Annotated[int, typer.Option(min=1, help="How many random layers and requests.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the random cases; the same seed asks the same.")]
Only = Annotated[int | None, typer.Option("--case", min=0, help="This case alone, by its number.", show_default=False)]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE:NAME", help="Your own attention instead: a class, instance or function. Repeatable."),
]
Told = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME=VALUE", help="What cannot be told by looking at it, e.g. mask_means=block. Repeatable."),
]


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(with_settings(check, ("device", "threads")))


def check(
    url: Url = None,
    cases: Cases = 200,
    seed: Seed = 0,
    case: Only = None,
    module: Modules = None,
    told: Told = None,
    config: Config = None,
    **flags: Any,
) -> None:
    """Ask random questions and hold every number of the answers against a plain reference in float64.

    The service answers, through --url or in this process; with --module your own attention does, and the first disagreement is shown with
    the mistake that explains it. Exit code 1 where something is beyond rounding.
    """
    if module:
        if url:
            raise typer.BadParameter("--module is checked in this process; leave --url out")
        agree = [_check_module(name, seed, _convention(told or [])) for name in module]
        raise typer.Exit(0 if all(agree) else 1)
    if told:
        raise typer.BadParameter("--with says how a --module is called; there is none")
    with reported("check"), open_backend(url, config, flags) as backend:
        worst = _check_service(backend, seed, range(cases) if case is None else [case])
    console = Console()
    _show(console, worst)
    if not worst.agrees:
        where = f" --url {url}" if url else ""
        console.print(f"wrong: {_described(worst)}", soft_wrap=True, highlight=False, markup=False)
        console.print(f"again: attend check{where} --seed {seed} --case {worst.trial.number}", soft_wrap=True, highlight=False)
        raise typer.Exit(1)
    console.print(f"{worst.count} cases agree with the reference", highlight=False)


def _check_service(backend: Backend, seed: int, numbers: Sequence[int]) -> Worst:
    progress = Console(stderr=True)
    worst = Worst()
    with closing(try_cases(backend, seed, numbers)) as trials:
        for trial in track(trials, "checking", len(numbers), console=progress, transient=True, disable=not progress.is_terminal):
            worst.add(trial)
    return worst


def _show(console: Console, worst: Worst) -> None:
    table = Table("output", "largest error", "allowed there", "case", "")
    for name, (trial, finding) in worst.by_output.items():
        error = f"{finding.error:.2g}" if not finding.about else finding.about
        table.add_row(name, error, f"{finding.allowed:.2g}", str(trial.number), "agrees" if finding.agrees else "[bold red]WRONG")
    console.print(table)


def _described(worst: Worst) -> str:
    """The worst case in one line: what is wrong, the layer, the request."""
    trial, finding = worst.trial, worst.finding
    spec = trial.case.spec
    error = finding.about or f"off by {finding.error:.3g}, allowed {finding.allowed:.3g}"
    fields = (f"{name} {list(x.shape) if isinstance(x, np.ndarray) else json.dumps(x)}" for name, x in trial.case.request.items())
    layer = f"d_model {spec.d_model}, {spec.num_heads} heads, {spec.init}, {spec.dtype}"
    return f"{finding.name} {error}, in case {trial.number} ({layer}): {', '.join(fields)}"


def _convention(told: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it reads as JSON, else text."""
    options: dict[str, Any] = {}
    for pair in told:
        name, sign, value = pair.partition("=")
        if not sign:
            raise typer.BadParameter(f"expected NAME=VALUE, got {pair!r}", param_hint="--with")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _check_module(name: str, seed: int, options: dict[str, Any]) -> bool:
    """Whether it agrees; prints the report, or why there is none."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, so that a module beside the caller is found
    from service.attention.agreement import compare

    agreement = _compared(name, lambda: compare(name, seed=seed, **options))
    console = Console()
    table = Table("case", "largest error", "allowed there", "", title=name, title_justify="left")
    for result in agreement.results:
        verdict = "agrees" if result.error <= result.tolerance else "[bold red]WRONG"
        row = ["", "", f"not run: {result.skipped}"] if result.skipped else [f"{result.error:.2g}", f"{result.tolerance:.2g}", verdict]
        table.add_row(result.case, *row)
    console.print(table)
    console.print(str(agreement.first or "agrees with the reference"), soft_wrap=True, highlight=False, markup=False)
    return bool(agreement.agrees)


def _compared(name: str, compare: Callable[[], Any]) -> Any:
    """The comparison; ends the command with a message where the target cannot be loaded, made or understood."""
    try:
        return compare()
    except ImportError as error:
        complain("check", f"cannot import {name}: {error}", "Run this where `python -c 'import …'` finds it, or install it.")
    except (ValueError, TypeError) as error:
        complain("check", f"{name}: {error}", "Pass an option that it names as --with NAME=VALUE.")
    except Exception as error:
        complain("check", f"{name} could not be made: {type(error).__name__}: {error}")
    raise typer.Exit(2)
