"""What an operator declares of itself to specs, serving and caches: outputs, positions, variances. Values without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
Axes = Mapping[str, tuple[str, ...]]  # canonical name of a weight -> what its axes are


class LeftOut(NamedTuple):
    """What hints say of an implementation without an operator: its name, the arithmetic without it and with it."""

    name: str
    computed: str
    expected: str


class Interval(NamedTuple):
    """The keys that a query at position p attends to: from p - left to p + right, and in its chunk of so many positions; None: no bound."""

    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        """The condition for key j to be visible to query i, such as `i - j ≤ 3 and j ≤ i`; "" if every key is."""
        last = "" if self.right is None else "j ≤ i" if self.right == 0 else f"j - i ≤ {self.right}"
        chunk = "" if self.chunk is None else f"⌊i / {self.chunk}⌋ = ⌊j / {self.chunk}⌋"
        return " and ".join(filter(None, ("" if self.left is None else f"i - j ≤ {self.left}", last, chunk)))

    def __and__(self, other: Interval) -> Interval:
        """The keys in both. ValueError: chunks of two sizes, which together are no interval of this kind."""
        if None not in (self.chunk, other.chunk) and self.chunk != other.chunk:
            raise ValueError(f"expected chunks of one size, got {self.chunk} and {other.chunk}")
        left, right = (min((n for n in side if n is not None), default=None) for side in zip(self[:2], other[:2], strict=True))
        return Interval(left, right, other.chunk if self.chunk is None else self.chunk)


class Extent(NamedTuple):
    """The positions that a layer has: those below `stop`, and without `negative` those from 0 on. `reason` says what they are."""

    stop: int
    reason: str
    negative: bool = True


class Coordinates(NamedTuple):
    """What the field `positions` of a call has for each row: coordinates on this number of axes, each within `extent`."""

    axes: int
    required: bool  # whether calls must have the field
    extent: Extent | None = None


class Variances(NamedTuple):
    """Mean variances of the components of queries and keys, for inputs of unit variance."""

    query: float
    key: float


def variance(weights: Mapping[str, Tensor], name: str) -> float:
    """Mean variance of the components of a projection, for inputs of unit variance."""
    variance = weights[f"{name}.weight"].double().square().sum(1)
    if f"{name}.bias" in weights:
        variance += weights[f"{name}.bias"].double().square()
    return float(variance.mean())
