"""How a checkpoint that cannot be read is said: pointers to its tensors, to the spec beside it, and lists short enough to read.

Knows names and shapes only. Every refusal of this room is an InvalidRequest: the caller can correct it, or send another file.
"""

from collections.abc import Iterable, Sequence

from service.errors import InvalidRequest, Problem
from service.tensors import Array

LISTED = 8  # of a list that could be long; the rest is counted


def _escaped(segment: str) -> str:
    """One segment of a JSON pointer (RFC 6901)."""
    return segment.replace("~", "~0").replace("/", "~1")


def weight_pointer(name: str) -> str:
    return f"/weights/{_escaped(name)}"


def field_pointer(*path: str) -> str:
    return "/spec/" + "/".join(map(_escaped, path))


def shape_of(array: Array) -> str:
    return f"shape {list(array.shape)}"


def listed(items: Iterable[str], none: str = "none") -> str:
    """The first few, and how many more: "a, b, c and 9 more"."""
    every = list(dict.fromkeys(items))
    more = len(every) - LISTED
    return (", ".join(every[:LISTED]) + (f" and {more} more" if more > 0 else "")) or none


def refuse_weights(problems: Sequence[tuple[str, str, str]]) -> InvalidRequest:
    """One refusal of several tensors: (name, expected, got) each; of many the first few, and a last one that counts the others."""
    shown = [Problem(weight_pointer(name), expected, got) for name, expected, got in problems[:LISTED]]
    if (more := len(problems) - LISTED) > 0:
        shown.append(Problem("/weights", "no more such tensors", f"{more} more"))
    return InvalidRequest(problems=shown)
