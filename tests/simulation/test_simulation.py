"""Some seeds of the simulated service (docs/reliability.md). `python -m tests.simulation --seconds 3600` tries new ones."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from simulation.command import failed_seeds
from simulation.mutant_table import MUTANTS
from simulation.run import run

SIMULATION = Path(__file__).parent


@pytest.mark.parametrize("seed", [*range(1, 9), *failed_seeds()])
def test_a_seed_keeps_every_promise(seed: int) -> None:
    outcome = run(seed)
    assert outcome.failure is None, "\n".join([*outcome.history, f"python -m tests.simulation --seed {seed}"])


@pytest.mark.parametrize("of", ["workers", "replicas"])
@pytest.mark.parametrize("seed", range(4))
def test_several_processes_keep_every_promise(seed: int, of: str) -> None:
    outcome = run(seed, of=of)
    assert outcome.failure is None, "\n".join([*outcome.history, f"python -m tests.simulation --of {of} --seed {seed}"])


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fits_its_code(name: str) -> None:
    """`python -m tests.simulation mutants` shows that each is found, which takes minutes."""
    module, before, after = MUTANTS[name]
    source = Path(find_spec(module).origin).read_text()
    assert source.count(before) == 1, f"{module} does not have once:\n{before}"
    compile(source.replace(before, after), module, "exec")


def test_a_planted_bug_is_found() -> None:
    command = [sys.executable, str(SIMULATION / "__main__.py"), "--mutant", "double settle", "--seeds", "100", "--brief"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1 and "seeds:" in found.stdout, found.stdout + found.stderr


def test_a_seed_repeats_its_run() -> None:
    first, again, other = run(5), run(5), run(6)
    assert (first.digest, first.steps) == (again.digest, again.steps)
    assert other.digest != first.digest


def test_without_some_clients_the_others_draw_the_same() -> None:
    whole, alone = run(7), run(7, clients=frozenset({0}))
    assert alone.steps < whole.steps
    assert not any("client 1 " in line for line in alone.history)
