"""`attend check`: compares the service, or an attention implementation, with the float64 NumPy reference."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from service.attention.compare import Agreement, compare
from service.attention.compare.convention import option_table
from service.cli.clients import open_client
from service.cli.flags import AsJson, Ca, Config, Url, with_settings
from service.cli.server_check import ServerReport, check_server
from service.cli.terminal import fail, report_errors

EPILOG = """Examples: attend check --cases 1000

attend check --url http://127.0.0.1:8000 --seed 7

attend check --cases 50 --json

attend check --module my_package:MyAttention --with mask_means=block --cases 70

attend check --module ./attention.py:MyAttention --with 'weights={"query": "a", "key": "b", "value": "c", "output": "d"}'

What --with takes:

""" + "\n\n".join(escape(f"{name}={' | '.join(values)}: {meaning}") for name, values, meaning in option_table())
CASES = 200
Cases = Annotated[
    int | None,
    typer.Option(min=1, help=f"Number of random cases ({CASES}), or of calls of a --module (7, one of each kind).", show_default=False),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random cases.")]
CaseNumber = Annotated[int | None, typer.Option("--case", min=0, help="Run only the case of this number.", show_default=False)]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE:NAME", help="Check your class, instance or function; also FILE.py:NAME. Repeatable."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME=VALUE", help="A convention of the --module; the list is below. Repeatable."),
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
    disagreement is shown with the known mistakes that explain it. Exit code 1: an error is larger than rounding allows.
    """
    reports: list[Any]
    if module:
        if url or case is not None or config:
            raise typer.BadParameter("a --module is checked in this process; leave --url, --case and --config out")
        reports = []
        for name in module:
            reports.append(check_module(name, seed, cases or 1, options or []))
            if not as_json:
                reports[-1].show(Console())
        document = {"agrees": all(report.agrees for report in reports), "modules": [report.document() for report in reports]}
    else:
        if options:
            raise typer.BadParameter("--with needs a --module")
        repeated = {"url": url, "ca": url and ca, "config": config, **flags}
        words = [word for name, value in repeated.items() if value is not None for word in (f"--{name}", str(value))]
        reports = [report := ServerReport(shlex.join(["attend", "check", *words]), seed)]
        with report_errors("check"), open_client(url, ca, config, flags) as client:
            check_server(client, report, range(cases or CASES) if case is None else [case])
        document = report.document()
        if not as_json:
            report.show(Console())
    if as_json:
        typer.echo(json.dumps(document))
    if not document["agrees"]:
        raise typer.Exit(1)


def _convention(pairs: Sequence[str]) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The last round of one module, its seed, and the number of calls in all rounds. `options`: those of --with."""

    name: str
    options: Sequence[str]
    agreement: Agreement
    calls: int
    seed: int

    @property
    def agrees(self) -> bool:
        return self.agreement.agrees

    def document(self) -> dict[str, Any]:
        """For --json. An error that is not finite is null."""
        cases = [
            {**asdict(result), "error": result.error if math.isfinite(result.error) else None, "agrees": result.agrees}
            for result in self.agreement.results
        ]
        document = {"module": self.name, "agrees": self.agrees, "calls": self.calls, "seed": self.seed, "cases": cases}
        return document if self.agrees else {**document, "first": self.agreement.conclusion, "again": self._command()}

    def show(self, console: Console) -> None:
        table = Table("case", "largest error", "tolerance", "", title=self.name, title_justify="left")
        for result in self.agreement.results:
            if result.skipped or result.raised:
                table.add_row(result.case, "", "", f"not run: {result.skipped}" if result.skipped else "[bold red]RAISED")
            else:
                verdict = "agrees" if result.agrees else "[bold red]WRONG"
                table.add_row(result.case, f"{result.error:.2g}", f"{result.tolerance:.2g}", verdict)
        console.print(table)
        disagreement = [self.agreement.conclusion, f"again: {self._command()}"]
        for line in [f"agrees with the reference in {self.calls} calls"] if self.agrees else disagreement:
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _command(self) -> str:
        given = [word for option in self.options for word in ("--with", option)]
        return shlex.join(["attend", "check", "--module", self.name, *given, "--seed", str(self.seed)])


def check_module(name: str, seed: int, calls: int, options: Sequence[str]) -> ModuleReport:
    """Compares the implementation with the reference in at least `calls` calls. Raises typer.Exit if it cannot be constructed or called.

    A round is one call of each kind of case; each round has another seed. The first round that disagrees ends the check.
    """
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    convention, stderr, done, rounds = _convention(options), Console(stderr=True), 0, 0
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(f"checking {name}", total=calls)
        while True:
            agreement = _compare(name, seed + rounds, convention)
            done, rounds = done + sum(result.skipped is None for result in agreement.results), rounds + 1
            progress.update(task, completed=done)
            if done >= calls or not done or not agreement.agrees:
                break
    return ModuleReport(name, options, agreement, done, seed + rounds - 1)


def _compare(name: str, seed: int, options: dict[str, Any]) -> Agreement:
    try:
        return compare(name, seed=seed, **options)
    except ImportError as error:
        hint = "Give a file as --module path/to/file.py:NAME, or run this where `python -c 'import …'` works."
        fail("check", f"cannot import {name}: {error}", hint, code=2)
    except (ValueError, TypeError) as error:
        fail("check", f"{name}: {error}", "Pass an option as --with NAME=VALUE, or --with 'NAME={…}' in JSON; --help lists all.", code=2)
    except Exception as error:
        fail("check", f"{name} could not be imported or constructed: {type(error).__name__}: {error}", code=2)
