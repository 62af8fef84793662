"""Checks an attention implementation (`attend check --module`) with the comparison of `service.attention.compare`.

A round is one call of each kind of case; each round has another seed. The first round that disagrees ends the check.
"""

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from service.cli.terminal import fail

if TYPE_CHECKING:
    from service.attention.compare import Agreement


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The last round of one module, its seed, and the number of calls in all rounds."""

    name: str
    agreement: "Agreement"
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
        return document if self.agrees else {**document, "first": str(self.agreement.first), "again": self._command()}

    def show(self, console: Console) -> None:
        lines = [self.name, *map(str, self.agreement.results)]
        if self.agrees:
            lines.append(f"agrees with the reference in {self.calls} calls")
        else:
            lines += [str(self.agreement.first), f"again: {self._command()}"]
        console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)

    def _command(self) -> str:
        return f"attend check --module {self.name} --seed {self.seed}"


def check_module(name: str, seed: int, calls: int, options: dict[str, Any]) -> ModuleReport:
    """Compares the implementation with the reference in at least `calls` calls. Raises typer.Exit if it cannot be constructed or called."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    stderr, done, rounds = Console(stderr=True), 0, 0
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(f"checking {name}", total=calls)
        while True:
            agreement = _compare(name, seed + rounds, options)
            done, rounds = done + sum(result.skipped is None for result in agreement.results), rounds + 1
            progress.update(task, completed=done)
            if done >= calls or not done or not agreement.agrees:
                break
    return ModuleReport(name, agreement, done, seed + rounds - 1)


def _compare(name: str, seed: int, options: dict[str, Any]) -> "Agreement":
    from service.attention.compare import compare

    try:
        return compare(name, seed=seed, **options)
    except ImportError as error:
        hint = "Run this in a directory where `python -c 'import …'` works, or install it."
        fail("check", f"cannot import {name}: {error}", hint, code=2)
    except (ValueError, TypeError) as error:
        fail("check", f"{name}: {error}", "Pass an option as --with NAME=VALUE.", code=2)
    except Exception as error:
        fail("check", f"{name} could not be constructed: {type(error).__name__}: {error}", code=2)
