import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests import `support` and `simulation` from there


def main(arguments: list[str]) -> str | None:
    """Run seeds, plant a bug first, try all bugs, or measure growth. Returns what fails, if that is not printed."""
    if arguments[:1] == ["mutants"]:
        from simulation.mutants import main as try_mutants

        return try_mutants(arguments[1:])
    if arguments[:1] == ["--mutant"]:  # before the service is imported
        from simulation.mutants import plant

        plant(arguments[1])
        return main(arguments[2:])
    if arguments[:1] == ["growth"]:
        from simulation.growth import main as measure

        return measure(arguments[1:])
    from simulation.command import main as run_seeds

    run_seeds(arguments)
    return None


if os.environ.get("PYTHONHASHSEED") != "0":  # else the order of a set of texts would differ between two runs of a seed
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
sys.exit(main(sys.argv[1:]))
