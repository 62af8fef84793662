"""`attend check`: the service, or someone's own attention, against the reference in NumPy float64."""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from service.cli.backend import Backend, open_backend
from service.cli.exits import reported
from service.cli.flags import AsJson, Ca, Config, Url, with_settings
from service.cli.module_check import check_module, convention
from service.cli.server_check import Worst, try_cases

EPILOG = """Examples: attend check --cases 1000

attend check --url http://127.0.0.1:8000 --seed 7

attend check --cases 50 --json

attend check --module my_package:MyAttention --with mask_means=block --cases 70"""
Cases = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many random layers and requests (200), or calls of a --module (7, one of each kind).", show_default=False
    ),
]
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
CASES = 200


def install(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(with_settings(check, ("device", "threads")))


def check(
    url: Url = None,
    ca: Ca = None,
    cases: Cases = None,
    seed: Seed = 0,
    case: Only = None,
    module: Modules = None,
    told: Told = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Ask random questions and hold every number of the answers against a plain reference in float64.

    The service answers, through --url or in this process; with --module your own attention does, and the first disagreement is shown with
    the mistake that explains it. Exit code 1 where something is beyond rounding.
    """
    if module:
        if url or case is not None or config:
            raise typer.BadParameter("--module is checked in this process, as a whole; leave --url, --case and --config out")
        raise typer.Exit(0 if _check_modules(module, seed, cases or 1, convention(told or []), as_json) else 1)
    if told:
        raise typer.BadParameter("--with says how a --module is called; there is none")
    with reported("check"), open_backend(url, ca, config, flags) as backend:
        worst = _check_service(backend, seed, range(cases or CASES) if case is None else [case])
    where = (f" --url {url}" if url else "") + (f" --ca {ca}" if url and ca else "")
    again = f"attend check{where} --seed {seed} --case {worst.case.number}"
    if as_json:
        typer.echo(json.dumps(_document(worst, seed, again)))
    else:
        _show(Console(), worst, again)
    if not worst.agrees:
        raise typer.Exit(1)


def _check_modules(names: Sequence[str], seed: int, calls: int, options: dict[str, Any], as_json: bool) -> bool:
    """Whether all of them agree. People are shown each as it is done."""
    reports = []
    for name in names:
        reports.append(check_module(name, seed, calls, options))
        if not as_json:
            reports[-1].show()
    agrees = all(report.agrees for report in reports)
    if as_json:
        typer.echo(json.dumps({"agrees": agrees, "modules": [report.document() for report in reports]}))
    return agrees


def _check_service(backend: Backend, seed: int, numbers: Sequence[int]) -> Worst:
    progress = Console(stderr=True)
    worst = Worst()
    with closing(try_cases(backend, seed, numbers)) as cases:
        for case in track(cases, "checking", len(numbers), console=progress, transient=True, disable=not progress.is_terminal):
            worst.add(case)
    return worst


def _document(worst: Worst, seed: int, again: str) -> dict[str, Any]:
    """Everything there is to say; an error that is no number is null, and `about` says what is wrong."""
    outputs = [
        {
            "output": name,
            "agrees": finding.agrees,
            "error": finding.error if math.isfinite(finding.error) else None,
            "allowed": finding.allowed,
            "about": finding.about,
            "case": case.number,
        }
        for name, (case, finding) in worst.by_output.items()
    ]
    document = {"agrees": worst.agrees, "cases": worst.count, "seed": seed, "outputs": outputs}
    return document if worst.agrees else {**document, "wrong": _described(worst), "again": again}


def _show(console: Console, worst: Worst, again: str) -> None:
    table = Table("output", "largest error", "allowed there", "case", "")
    for name, (case, finding) in worst.by_output.items():
        error = f"{finding.error:.2g}" if not finding.about else finding.about
        table.add_row(name, error, f"{finding.allowed:.2g}", str(case.number), "agrees" if finding.agrees else "[bold red]WRONG")
    console.print(table)
    if worst.agrees:
        console.print(f"{worst.count} cases agree with the reference", highlight=False)
    else:
        console.print(f"wrong: {_described(worst)}", soft_wrap=True, highlight=False, markup=False)
        console.print(f"again: {again}", soft_wrap=True, highlight=False, markup=False)


def _described(worst: Worst) -> str:
    """The worst case in one line: what is wrong, the layer, the request."""
    case, finding = worst.case, worst.finding
    spec = case.case.spec
    error = finding.about or f"off by {finding.error:.3g}, allowed {finding.allowed:.3g}"
    fields = (f"{name} {list(x.shape) if isinstance(x, np.ndarray) else json.dumps(x)}" for name, x in case.case.request.items())
    layer = f"d_model {spec.d_model}, {spec.num_heads} heads, {spec.init}, {spec.dtype}"
    return f"{finding.name} {error}, in case {case.number} ({layer}): {', '.join(fields)}"
