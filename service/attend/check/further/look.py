"""One look: a function that calls a candidate once more, adds what came of it to the results, and returns the first disagreement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from attend.check.calls import Calls
from attend.check.candidate import Candidate
from attend.check.report import Disagreement


@dataclass(frozen=True, slots=True)
class Extent:
    """How far one looks. No call has more rows than `longest`; gradients are compared where a candidate has none of its own, too, if
    `backward`. `in_other_size`: what the short calls of a class gave in other heads and widths, if it is known there. `constructor`: the
    class, if no spec says what its options are; `prepare` constructs it by another convention."""

    seed: int
    longest: int
    prepare: Callable[..., Candidate]
    backward: bool = False
    in_other_size: Calls | None = None
    constructor: type | None = None


Look: TypeAlias = Callable[[Calls, Extent], Disagreement | None]
