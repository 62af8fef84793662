"""Bugs to plant, to see that the simulation finds them: past ones of this project, and others of the same kinds.

A mutant is a replacement of some lines of one module, applied as it is imported; nothing on disk changes. It is kept as text and not
as a patch file: the lines must stand exactly once in the module, whatever is around them. A test checks that, so a mutant that no longer
fits its code is noticed with the change.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from simulation.mutant_table import MUTANTS, RUN

MOST_SEEDS = 500  # in which each mutant must be found
SECONDS = 3600
LIBRARIES = ("torch", "fastapi", "uvicorn", "grpc.aio", "prometheus_client", "structlog", "safetensors", "matplotlib.pyplot")


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
    for package in LIBRARIES:
        importlib.import_module(package)
    missed = []
    print("| bug | found by | seeds | what fails |\n|---|---|--:|---|", flush=True)
    for name in names or MUTANTS:
        run = RUN.get(name, ())
        grows = run[:1] == ("growth",)
        failed, last = _tried(["--mutant", name, *run, *(() if grows else ("--seeds", str(MOST_SEEDS), "--brief"))])
        seeds, _, what = last.rpartition(" seeds: ")
        found = failed and (last.endswith("grows") if grows else bool(seeds))
        missed += [] if found else [name]
        by = "growth" if grows else run[1] if run else "process"
        print(f"| {name} | {by} | {seeds if found else 'not found'} | {what[:110]} |", flush=True)
    return f"not found: {', '.join(missed)}" if missed else None


def _tried(arguments: list[str]) -> tuple[bool, str]:
    """Whether this Python with these arguments fails, and its last line. A child that is forked, in which the libraries are imported."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv[1:] = arguments
            runpy.run_path(str(Path(__file__).with_name("__main__.py")), run_name="__main__")
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status) == 1, (output.read().strip().splitlines() or [""])[-1]
