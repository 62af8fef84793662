"""Bugs to plant, to see that the simulation finds them: past ones of this project, and others of the same kinds.

A mutant is a replacement of some lines of one module, applied as it is imported; nothing on disk changes. It is kept as text and not
as a patch file: the lines must stand exactly once in the module, whatever is around them. A test checks that, so a mutant that no longer
fits its code is noticed with the change.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from simulation.mutant_table import MUTANTS, RUN

MOST_SEEDS = 500  # in which each mutant must be found
SECONDS = 300


class Mutant(NamedTuple):
    """A bug: these lines of the module become others."""

    module: str
    before: str
    after: str


class Planting(importlib.abc.MetaPathFinder):
    """Imports one module with a bug."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None and spec.origin is not None
        spec.loader = PlantedLoader(name, spec.origin, self.mutant)
        return spec


class PlantedLoader(importlib.machinery.SourceFileLoader):
    """Loads the source of a module with a bug, and writes no bytecode."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        source = Path(self.path).read_text()
        if source.count(self.mutant.before) != 1:
            raise ImportError(f"{fullname} does not have these lines once:\n{self.mutant.before}")
        return compile(source.replace(self.mutant.before, self.mutant.after), self.path, "exec")


def mutant(name: str) -> Mutant:
    """The mutant of that name."""
    return Mutant(*MUTANTS[name])


def plant(name: str) -> None:
    """Plant the bug in this Python process, which must not have imported the module yet."""
    chosen = mutant(name)
    assert chosen.module not in sys.modules, "the module is imported already"
    sys.meta_path.insert(0, Planting(chosen))


def main(names: list[str]) -> str | None:
    """Print how many seeds each of these mutants needs, by default all; returns which were not found."""
    names = names or list(MUTANTS)
    missed = []
    print("| mutant | seeds | what fails |\n|---|---|---|", flush=True)
    for name in names:
        run = RUN.get(name, ())
        seeds = () if run[:1] == ("growth",) else ("--seeds", str(MOST_SEEDS), "--brief")
        command = [sys.executable, "-m", "tests.simulation", "--mutant", name, *run, *seeds]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=Path(__file__).parents[2], check=False)
        except subprocess.TimeoutExpired:
            missed.append(name)
            print(f"| {name} | not found | |", flush=True)
            continue
        last = (ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines() or [""])[-1]
        found = ended.returncode == 1 and (" seeds: " in last or last.endswith("grows"))
        missed += [] if found else [name]
        seeds, _, what = last.rpartition(" seeds: ")
        print(f"| {name} | {seeds or 'growth' if found else 'not found'} | {what[:110] if found else last[:200]} |", flush=True)
    return f"not found: {', '.join(missed)}" if missed else None
