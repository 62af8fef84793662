"""What follows from the values that the steps of a program read and write: which steps compute a value, and on what it depends.

A cache keeps values that depend on keys alone, a layer those that depend on its weights alone.
"""

from collections.abc import Collection, Sequence

from attend.attention.operators.step import Step, Value
from attend.attention.program import INPUT_AXES, Program

OF_KEYS = frozenset({"key", "value", "key_coordinates"})  # inputs of a program that have rows of keys
OF_ROWS = OF_KEYS | {"query", "query_coordinates", "positions"}  # of keys or of queries


def needed(program: Sequence[Step], wanted: Collection[str], known: Collection[str] = ()) -> Program:
    """The steps that compute the wanted values, which are names of values or of steps, from the known ones and the inputs."""
    missing, steps = {*wanted} - {*known}, list[Step]()
    for step in reversed(program):
        if step.name in wanted or not missing.isdisjoint(step.writes):
            steps.append(step)
            missing = missing - {*step.writes} | {*step.reads} - {*known}
    return tuple(reversed(steps))


def sources(program: Sequence[Step]) -> list[str]:
    """What each step depends on: `weights` alone, also on `keys` and values of the call, or also on the rest of the `call`."""
    of_values: dict[str, str] = {name: "keys" if name in OF_KEYS else "call" for name in INPUT_AXES}
    of_steps = []
    for step in program:
        read = {of_values.get(name, "weights") for name in step.reads}
        source = "call" if "call" in read or step.expands else "keys" if "keys" in read else "weights"
        of_values.update(dict.fromkeys(step.writes, source))
        of_steps.append(source)
    return of_steps


def constants(program: Sequence[Step]) -> Program:
    """The steps that depend on weights alone: they are computed once for a layer."""
    return tuple(step for step, source in zip(program, sources(program), strict=True) if source == "weights")


def cached_values(program: Sequence[Step]) -> dict[str, Value]:
    """What a cache keeps a row of for each key: the values that depend on keys alone, where a step reads them that does not.

    A step that `expands` such a value is computed again from the cache.
    """
    of_keys, kept = dict[str, Value](), dict[str, Value]()
    for step, source in zip(program, sources(program), strict=True):
        if source == "keys":
            of_keys.update(step.writes)
        elif source == "call":
            kept |= {name: of_keys[name] for name in step.reads if name in of_keys}
            for name in step.writes:
                of_keys.pop(name, None)
    return kept


def is_of_rows(program: Sequence[Step], name: str) -> bool:
    """Whether a value is computed of rows of queries or of keys alone, without a number for each pair of them."""
    steps = needed(program, {name})
    return not any(value.of_pairs for step in steps for value in step.writes.values())


def row_steps(program: Sequence[Step]) -> Program:
    """The steps that depend on rows of queries, or of keys, alone, and so not on a cache."""
    written = {name for step in program for name in step.writes}
    known, steps = set(OF_ROWS), list[Step]()
    for step in program:
        if not step.expands and all(name in known or name not in written | {*INPUT_AXES} for name in step.reads):
            known |= {*step.writes}
            steps.append(step)
    return tuple(steps)
