"""Parts of the errors about checkpoints: JSON pointers to tensors and spec fields, and shortened lists."""

from collections.abc import Iterable, Sequence

from service.errors import InvalidRequest, Problem, pointer
from service.tensors import Array

MAX_LISTED = 8


def weight_pointer(name: str) -> str:
    return pointer(["weights", name])


def field_pointer(*path: str) -> str:
    return pointer(["spec", *path])


def shape_of(array: Array) -> str:
    return f"shape {list(array.shape)}"


def listed(items: Iterable[str], none: str = "none") -> str:
    """The first MAX_LISTED items and the number of others: "a, b, c and 9 more"."""
    every = list(dict.fromkeys(items))
    more = len(every) - MAX_LISTED
    return (", ".join(every[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")) or none


def refuse_weights(problems: Sequence[tuple[str, str, str]]) -> InvalidRequest:
    """One error for several tensors, (name, expected, got) each: the first MAX_LISTED and the number of others."""
    shown = [Problem(weight_pointer(name), expected, got) for name, expected, got in problems[:MAX_LISTED]]
    if (more := len(problems) - MAX_LISTED) > 0:
        shown.append(Problem("/weights", "no more such tensors", f"{more} more"))
    return InvalidRequest(problems=shown)
