"""`python -m tests.simulation`: runs seeds, and tells of the first that fails how to run it again and what happened."""

import argparse
import hashlib
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random, SystemRandom

import attend
from simulation.run import RUNS, Kept, Outcome, run

FAILED = Path(__file__).with_name("seeds.txt")  # seeds that once failed
MOST_CLIENTS = 8
LINES = 60  # of the history, in the report of a failure


def main(arguments: list[str]) -> None:
    """Run the seeds that the arguments say. The exit status is 1 if one fails."""
    options = _parser().parse_args(arguments)
    clients = None if options.clients is None else frozenset(map(int, options.clients.split(",")))
    began, tried = time.monotonic(), 0
    for seed in _seeds(options, began):
        outcome = run(seed, clients, options.actions, options.of)
        tried += 1
        if options.verbose:
            load = f", requests by replica {outcome.load}" if outcome.load else ""
            print(f"seed {seed}: {outcome.steps} iterations, digest {outcome.digest:016x}{load}, {outcome.failure or 'passes'}", flush=True)
        if outcome.failure is not None:
            print(report(outcome, clients, options.actions, options.of) if not options.brief else f"{tried} seeds: {outcome.failure}")
            sys.exit(1)
    print(f"{tried} seeds pass in {time.monotonic() - began:.0f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Runs the service in simulated processes.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seconds", type=float, help="run the seeds that once failed, then new ones for so many seconds")
    which.add_argument("--seeds", type=int, help="run seeds 0, 1, …")
    which.add_argument("--new", type=int, help="run the seeds that once failed, then so many that no other version of the code has run")
    parser.add_argument("--of", choices=RUNS, default="process", help="what runs, by default one process")
    parser.add_argument("--clients", help="keep only these clients of the run: numbers with commas")
    parser.add_argument("--actions", type=int, help="most actions of a client")
    parser.add_argument("--verbose", action="store_true", help="print a line for each seed")
    parser.add_argument("--brief", action="store_true", help="of a failure, print one line")
    return parser


def failed_seeds(of: str = "process") -> list[int]:
    """The seeds of one of RUNS that once failed."""
    lines = [line.split() for line in FAILED.read_text().splitlines() if line and not line.startswith("#")]
    return [int(seed) for seed, run, *_ in lines if run == of]


def digest_of_code() -> str:
    """A digest of the service and of the simulation. Seeds drawn from it are new for each change, and the same whenever it is tested."""
    digest = hashlib.sha256()
    for folder in (Path(attend.__file__).parent, FAILED.parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _seeds(options: argparse.Namespace, began: float) -> Iterator[int]:
    if options.seed is not None:
        yield options.seed
    elif options.new is not None:
        yield from failed_seeds(options.of)
        draw = Random(digest_of_code())
        yield from (draw.getrandbits(32) for _ in range(options.new))
    elif options.seconds is None:
        yield from range(options.seeds or 100)
    else:
        yield from failed_seeds(options.of)
        draw = SystemRandom()
        while time.monotonic() - began < options.seconds:
            yield draw.getrandbits(32)


def report(outcome: Outcome, clients: Kept, actions: int | None, of: str) -> str:
    """The failure, its smallest history that was found, and the command that repeats that."""
    smallest, kept, most = shrink(outcome, clients, actions, of)
    command = f"python -m tests.simulation --seed {outcome.seed}" + ("" if of == "process" else f" --of {of}")
    command += "" if kept is None else f" --clients {','.join(map(str, sorted(kept)))}"
    command += "" if most is None else f" --actions {most}"
    cause = "" if isinstance(smallest.failure, AssertionError) else "".join(traceback.format_exception(smallest.failure))
    return "\n".join([*smallest.history[-LINES:], cause, f"seed {outcome.seed} fails: {smallest.failure}", f"again: {command}"])


def shrink(outcome: Outcome, clients: Kept = None, actions: int | None = None, of: str = "process") -> tuple[Outcome, Kept, int | None]:
    """The same failure with fewer clients and actions, as far as leaving out one after the other finds it."""

    def fails_alike(kept: Kept, most: int | None) -> Outcome | None:
        tried = run(outcome.seed, kept, most, of)
        alike = type(tried.failure) is type(outcome.failure) and getattr(tried.failure, "rule", 0) == getattr(outcome.failure, "rule", 0)
        return tried if tried.failure is not None and alike else None

    smallest, kept = outcome, clients
    for number in range(MOST_CLIENTS):
        fewer = (frozenset(range(MOST_CLIENTS)) if kept is None else kept) - {number}
        if number in (kept or range(MOST_CLIENTS)) and (found := fails_alike(fewer, actions)) is not None:
            smallest, kept = found, fewer
    for most in count(1) if actions is None else range(1, actions):
        if (found := fails_alike(kept, most)) is not None:
            return found, kept, most
        if most >= 30:
            break
    return smallest, kept, actions
