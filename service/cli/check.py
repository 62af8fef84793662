"""`attend check`: compares the service, or an attention implementation, with the float64 NumPy reference."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from service.cli.clients import open_client
from service.cli.flags import AsJson, Ca, Config, Url, with_settings
from service.cli.module_check import check_module
from service.cli.server_check import ServerReport, check_server
from service.cli.terminal import report_errors

EPILOG = """Examples: attend check --cases 1000

attend check --url http://127.0.0.1:8000 --seed 7

attend check --cases 50 --json

attend check --module my_package:MyAttention --with mask_means=block --cases 70"""
CASES = 200
Cases = Annotated[
    int | None,
    typer.Option(min=1, help=f"Number of random cases ({CASES}), or of calls of a --module (7, one of each kind).", show_default=False),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random cases.")]
CaseNumber = Annotated[int | None, typer.Option("--case", min=0, help="Run only the case of this number.", show_default=False)]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE:NAME", help="Check a class, instance or function of yours instead. Repeatable."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME=VALUE", help="A convention of the --module, e.g. mask_means=block. Repeatable."),
]


@with_settings("device", "threads")
def check(
    url: Url = None,
    ca: Ca = None,
    cases: Cases = None,
    seed: Seed = 0,
    case: CaseNumber = None,
    module: Modules = None,
    options: Options = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Compare every number of the replies to random requests with a float64 reference.

    The service runs at --url or in this process. With --module, an attention implementation of yours is compared instead, and the first
    disagreement is shown with the known mistake that explains it. Exit code 1: an error is larger than rounding allows.
    """
    reports: list[Any]
    if module:
        if url or case is not None or config:
            raise typer.BadParameter("a --module is checked in this process; leave --url, --case and --config out")
        convention = _convention(options or [])
        reports = []
        for name in module:
            reports.append(check_module(name, seed, cases or 1, convention))
            if not as_json:
                reports[-1].show(Console())
        document = {"agrees": all(report.agrees for report in reports), "modules": [report.document() for report in reports]}
    else:
        if options:
            raise typer.BadParameter("--with needs a --module")
        command = "attend check" + (f" --url {url}" if url else "") + (f" --ca {ca}" if url and ca else "")
        reports = [report := ServerReport(command, seed)]
        with report_errors("check"), open_client(url, ca, config, flags) as client:
            check_server(client, report, range(cases or CASES) if case is None else [case])
        document = report.document()
        if not as_json:
            report.show(Console())
    if as_json:
        typer.echo(json.dumps(document))
    if not document["agrees"]:
        raise typer.Exit(1)


def _convention(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as a dictionary; a value that is not JSON is text. Raises BadParameter for anything else."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"expected NAME=VALUE, got {pair!r}", param_hint="--with")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
