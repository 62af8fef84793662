"""What `attend check --module` does: someone's own attention against the reference, in rounds of one call of each kind.

A round has its own seed; the first that disagrees is shown and ends the check. What the module raises is told in its own words.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from service.cli.exits import complain

if TYPE_CHECKING:
    from service.attention.compare.comparison import Agreement, CaseResult


def convention(told: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it reads as JSON, else text. Raises BadParameter where one is no pair."""
    options: dict[str, Any] = {}
    for pair in told:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"expected NAME=VALUE, got {pair!r}", param_hint="--with")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


@dataclass(frozen=True, slots=True)
class Report:
    """What came out for one module: its last round, and in how many calls of all rounds it was asked."""

    name: str
    agreement: "Agreement"
    calls: int
    seed: int

    @property
    def agrees(self) -> bool:
        return self.agreement.agrees

    def document(self) -> dict[str, Any]:
        """For programs; an error that is no number is null."""
        cases = [
            {**asdict(result), "error": result.error if math.isfinite(result.error) else None, "agrees": _agrees(result)}
            for result in self.agreement.results
        ]
        said = {"module": self.name, "agrees": self.agrees, "calls": self.calls, "seed": self.seed, "cases": cases}
        return said if self.agrees else {**said, "first": str(self.agreement.first), "again": self._again()}

    def show(self) -> None:
        """For people."""
        console = Console()
        table = Table("case", "largest error", "allowed there", "", title=self.name, title_justify="left")
        for result in self.agreement.results:
            if result.skipped or result.raised:
                table.add_row(result.case, "", "", f"not run: {result.skipped}" if result.skipped else "[bold red]RAISED")
            else:
                verdict = "agrees" if _agrees(result) else "[bold red]WRONG"
                table.add_row(result.case, f"{result.error:.2g}", f"{result.tolerance:.2g}", verdict)
        console.print(table)
        lines = (
            [f"agrees with the reference in {self.calls} calls"] if self.agrees else [str(self.agreement.first), f"again: {self._again()}"]
        )
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _again(self) -> str:
        return f"attend check --module {self.name} --seed {self.seed}"


def _agrees(result: "CaseResult") -> bool | None:
    """None where it was not asked."""
    return None if result.skipped else result.raised is None and result.error <= result.tolerance


def check_module(name: str, seed: int, calls: int, options: dict[str, Any]) -> Report:
    """What comes out in at least so many calls. Ends the command where it cannot be asked."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, so that a module beside the caller is found
    stderr, done, rounds = Console(stderr=True), 0, 0
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(f"checking {name}", total=calls)
        while True:
            agreement = _compared(name, seed + rounds, options)
            done, rounds = done + sum(result.skipped is None for result in agreement.results), rounds + 1
            progress.update(task, completed=done)
            if done >= calls or not done or not agreement.agrees:
                break
    return Report(name, agreement, done, seed + rounds - 1)


def _compared(name: str, seed: int, options: dict[str, Any]) -> "Agreement":
    """The comparison; ends the command with a message where the target cannot be loaded, made or understood."""
    from service.attention.compare import compare

    try:
        return compare(name, seed=seed, **options)
    except ImportError as error:
        complain("check", f"cannot import {name}: {error}", "Run this where `python -c 'import …'` finds it, or install it.")
    except (ValueError, TypeError) as error:
        complain("check", f"{name}: {error}", "Pass an option that it names as --with NAME=VALUE.")
    except Exception as error:
        complain("check", f"{name} could not be made: {type(error).__name__}: {error}")
    raise typer.Exit(2)
