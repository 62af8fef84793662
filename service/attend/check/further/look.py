"""One look: a function that calls a candidate once more, adds what came of it to the results, and returns the first disagreement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from attend.check.calls import Calls
from attend.check.report import Disagreement
from attend.check.tried import Tried


@dataclass(frozen=True, slots=True)
class Extent:
    """How far one looks. No call has more rows than `longest`; gradients are compared where a candidate has none of its own, too, if
    `backward`. `in_other_size`: what the short calls of a class gave in other heads and widths, if it is known there."""

    tried: Tried
    longest: int
    backward: bool
    in_other_size: Calls | None


Look: TypeAlias = Callable[[Calls, Extent], Disagreement | None]
