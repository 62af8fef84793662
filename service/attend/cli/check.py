"""`attend check`: compares the service, or an attention implementation, with the float64 NumPy reference."""

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attend.check import Comparison, NoSuchCandidate, compare
from attend.check.convention import option_table
from attend.check.lengths import LONGEST
from attend.checkpoints.families.examples import examples
from attend.cli.clients import open_client
from attend.cli.server_check import ServerReport, check_server
from attend.cli.terminal import AsJson, Ca, Config, Url, fail, progress_line, report_errors, with_settings
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from attend.version import __version__
from attend.wire.problems import validate

EPILOG = """\b
Examples:
  attend check --cases 1000
  attend check --url http://127.0.0.1:8000 --seed 7
  attend check --cases 50 --json
  attend check --module my_package:MyAttention --with mask_means=block --cases 70
  attend check --module ./attention.py:MyAttention --with 'weights={"query": "a", "key": "b", "value": "c", "output": "d"}'
  attend check --module rotary.py:Rotary \\
    --spec '{"d_model": 30, "num_heads": 3, "rope": {"scaling": {"type": "linear", "factor": 8}}}'

What --with takes:

""" + "\n\n".join(f"{name}={' | '.join(values)}: {meaning}" for name, values, meaning in option_table())
WHERE = "Give a file as --module path/to/file.py:NAME, or a module as --module package.module:NAME where Python can import it."
CASES = 200
Cases = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Number of random cases ({CASES}), or of calls of a --module (one of each kind by default).", show_default=False
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random cases.")]
CaseNumber = Annotated[int | None, typer.Option("--case", min=0, help="Run only the case of this number.", show_default=False)]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE:NAME", help="Check your class, instance or function; also FILE.py:NAME. Repeatable."),
]
Spec = Annotated[
    str | None,
    typer.Option(
        metavar="JSON|FAMILY",
        help="The layer that the --module computes: a spec, a file with one, or a family of `attend families`, such as llama. "
        "By default plain multi-head attention.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME=VALUE", help="A convention of the --module; the list is below. Repeatable."),
]

Longest = Annotated[int, typer.Option(min=1, help="Rows of the longest call of a --module.")]
Backward = Annotated[bool, typer.Option("--backward", help="Compare gradients of the inputs of a --module in torch, too.")]
AllowSkipped = Annotated[bool, typer.Option("--allow-skipped", help="Exit code 0 also if cases of a --module were not tried.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show all cases of a --module, also if it agrees.")]


@with_settings("device", "threads")
def check(
    url: Url = None,
    ca: Ca = None,
    cases: Cases = None,
    seed: Seed = 0,
    case: CaseNumber = None,
    module: Modules = None,
    spec: Spec = None,
    options: Options = None,
    longest: Longest = LONGEST,
    backward: Backward = False,
    allow_skipped: AllowSkipped = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Compare every number of the replies to random requests with a float64 reference.

    The service runs at --url or in this process. With --module, an attention implementation of yours is compared instead, and the first
    disagreement is shown with the known mistakes that explain it. Exit code 1: an error is larger than rounding allows. Exit code 2: a
    --module cannot be called. Exit code 3: it agrees, but some cases or parameters were not tried.
    """
    if module and (url or case is not None or config):
        raise typer.BadParameter("a --module is checked in this process; leave --url, --case and --config out")
    if not module and (options or spec):
        raise typer.BadParameter("--with and --spec need a --module")
    console = Console(quiet=as_json)
    reports: list[ModuleReport] = []
    if module:
        given = {"spec": spec, "longest": longest, "backward": backward, "with": options or []}
        for each in _check_modules(module, given, seed, cases or 1):
            each.show(console, verbose)
            reports.append(each)
        modules = [report.document() for report in reports]
        decided = None if any(x["agrees"] is None for x in modules) else True
        document = {"agrees": all(report.agrees for report in reports) and decided, "modules": modules}
    else:
        where = {"url": url, "ca": url and ca, "config": config, **flags}
        command = ["attend", "check", *(word for name, value in where.items() if value is not None for word in (f"--{name}", str(value)))]
        report = ServerReport(shlex.join(command), seed)
        with report_errors("check"), open_client(url, ca, config, flags) as client:
            check_server(client, report, range(cases or CASES) if case is None else [case])
        report.show(console)
        document = report.document()
    if as_json:
        typer.echo(json.dumps(document))
    if document["agrees"] is False:
        wrong = [report for report in reports if not report.agrees]
        raise typer.Exit(2 if wrong and all(report.comparison.is_empty for report in wrong) else 1)
    if not allow_skipped and not all(report.is_complete for report in reports):
        raise typer.Exit(3)


def _check_modules(names: Sequence[str], given: Mapping[str, Any], seed: int, calls: int) -> Iterator["ModuleReport"]:
    """The reports of modules, which have the `given` options of the command, where they are no defaults, to repeat it."""
    arguments = _read_spec(given["spec"]) | _read_options(given["with"]) | {name: given[name] for name in ("longest", "backward")}
    repeated = ["--spec", given["spec"]] if given["spec"] else []
    repeated += ["--longest", str(given["longest"])] if given["longest"] != LONGEST else []
    repeated += ["--backward"] if given["backward"] else []
    repeated += [word for option in given["with"] for word in ("--with", option)]
    yield from (check_module(name, arguments, seed, calls, repeated) for name in names)


def _read_spec(given: str | None) -> dict[str, LayerSpec | str]:
    """The argument `spec` of `compare`, from JSON, the name of a family or that of a file. Raises typer.Exit."""
    if given is None:
        return {}
    if given.partition(":")[0] in examples():
        return {"spec": given}
    try:
        return {"spec": validate(LayerSpec, json.loads(given if given.lstrip().startswith("{") else Path(given).read_text()))}
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"expected a spec in JSON, a file with one, or a family of `attend families`: {error}", param_hint="--spec"
        ) from None
    except InvalidRequest as error:
        fail("check", f"--spec: {error}", code=2)


def _read_options(pairs: Sequence[str]) -> dict[str, Any]:
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
    """The check of one module; `check_module` says what a round is."""

    name: str
    flags: Sequence[str]  # of the command that repeats the last round
    comparison: Comparison  # of the last round
    calls: int  # in all rounds
    seed: int  # of the last round

    @property
    def agrees(self) -> bool:
        return self.comparison.agrees

    @property
    def is_complete(self) -> bool:
        return self.comparison.is_complete

    def document(self) -> dict[str, Any]:
        """For --json. An error that is not finite is null, and so is whether it agrees if no case says anything."""
        cases = [
            {**asdict(result), "error": result.error if math.isfinite(result.error) else None, "agrees": result.agrees}
            for result in self.comparison.results
        ]
        document: dict[str, Any] = {"module": self.name, "agrees": None if self.comparison.is_undecided else self.agrees}
        document |= {"calls": self.calls, "seed": self.seed, "cases": cases}
        document |= {"untried": list(self.comparison.untried), "parameters_not_tried": list(self.comparison.parameters)}
        document |= {"keys": self.comparison.keys, "widths": list(self.comparison.widths), "dtype": self.comparison.dtype}
        document["parameters_tried"] = list(self.comparison.tried)
        document |= {"spec": self.comparison.spec and self.comparison.spec.model_dump(mode="json"), "versions": _versions()}
        document["found"] = list(self.comparison.found)
        if self.comparison.first is None:
            return document
        explanation = self.comparison.first.explanation
        step = self.comparison.first.step
        found: dict[str, Any] = {"step": None if step is None else step.document()}
        found |= {"mistakes": list(explanation.mistakes), "arithmetic": [list(lines) for lines in explanation.arithmetic]}
        found["weights"] = list(self.comparison.first.weights)
        return {**document, "first": self.comparison.conclusion, **found, "again": self._command()}

    def show(self, console: Console, verbose: bool) -> None:
        """The verdict, the mistake and the first wrong number, the cases if it disagrees or is `verbose`, and the command to repeat it."""
        if self.agrees:
            line = self.comparison.conclusion
            if not self.comparison.untried and not self.comparison.vague:
                line = line.replace("agrees with the reference", f"agrees with the reference in {self.calls} calls", 1)
            console.print(f"{self.name} {line}", highlight=False, markup=False)
            self._print_conventions(console)
            if verbose:
                console.print(self._table(verbose))
            return
        console.print(f"{self.name} {self.comparison.verdict}", highlight=False, markup=False)
        console.print(self.comparison.conclusion, highlight=False, markup=False)
        self._print_conventions(console)
        console.print(self._table(verbose))
        if self.comparison.omissions:
            console.print(self.comparison.omissions, highlight=False, markup=False)
        console.print(f"again: {self._command()}", soft_wrap=True, highlight=False, markup=False)

    def _print_conventions(self, console: Console) -> None:
        if self.comparison.conventions:
            console.print(self.comparison.conventions, highlight=False, markup=False)

    def _table(self, verbose: bool) -> Table:
        """The cases; those that were not run only if `verbose`."""
        table = Table("case", "largest error", "tolerance", "")
        for result in self.comparison.results:
            if result.skipped and not verbose:
                continue
            if result.skipped or result.raised:
                table.add_row(result.case, "", "", f"not run: {result.skipped}" if result.skipped else "[bold red]RAISED")
            else:
                verdict = "[bold red]WRONG" if result.agrees is False else result.verdict
                table.add_row(result.name, f"{result.error:.2g}", f"{result.tolerance:.2g}", verdict)
        return table

    def _command(self) -> str:
        return shlex.join(["attend", "check", "--module", self.name, *self.flags, "--seed", str(self.seed)])


def _versions() -> dict[str, str]:
    """Those of attend, and of the libraries that are imported."""
    imported = {name: sys.modules[name] for name in ("numpy", "torch", "jax", "mlx") if name in sys.modules}
    return {"attend": __version__} | {name: str(getattr(module, "__version__", "")) for name, module in imported.items()}


def check_module(name: str, arguments: Mapping[str, Any], seed: int, calls: int, flags: Sequence[str]) -> ModuleReport:
    """Compares the implementation with the reference in at least `calls` calls. Raises typer.Exit if it cannot be constructed or called.

    A round is one call of each kind of case; each round has another seed. The first round that disagrees ends the check.
    """
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    done, rounds = 0, 0
    with progress_line(f"checking {name}", Console(stderr=True)):
        while True:
            comparison = _compare(name, seed + rounds, arguments)
            done, rounds = done + sum(result.calls for result in comparison.results if result.skipped is None), rounds + 1
            if done >= calls or not done or not comparison.agrees:
                break
    return ModuleReport(name, flags, comparison, done, seed + rounds - 1)


def _compare(name: str, seed: int, arguments: Mapping[str, Any]) -> Comparison:
    try:
        return compare(name, seed=seed, **arguments)
    except NoSuchCandidate as error:
        fail("check", str(error), f"Paths are relative to {Path.cwd()}. {WHERE}", code=2)
    except ImportError as error:
        fail("check", f"cannot import {name}: {error}", WHERE, code=2)
    except (ValueError, TypeError) as error:
        fail("check", f"{name}: {error}", "Pass an option as --with NAME=VALUE, or --with 'NAME={…}' in JSON; --help lists all.", code=2)
    except Exception as error:
        fail("check", f"{name} could not be imported or constructed: {type(error).__name__}: {error}", code=2)
