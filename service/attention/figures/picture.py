"""What a picture shows, before anyone says where on the paper: panels of numbers, the words along their axes, and what colours mean.

Arrays and words alone; no sizes, no fonts, no file format.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from service.tensors import Array

Theme = Literal["light", "dark"]
Pool = Literal["mean", "max"]
Colours = Literal["viridis", "cividis"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a panel. A cell stands for `pooled` positions that follow one another, the last perhaps for fewer; `total` in all.

    `words` names every position, or is empty: then positions are numbered from 0. `groups` names equal parts of the axis, as the heads
    of a concatenation are.
    """

    name: str
    total: int
    pooled: int = 1
    words: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def cells(self) -> int:
        return -(-self.total // self.pooled)

    def spans(self, cell: int) -> tuple[int, int]:
        """First and last position of a cell, both included."""
        return cell * self.pooled, min((cell + 1) * self.pooled, self.total) - 1

    def label(self, cell: int) -> str:
        """What stands beside a cell: its word, or the number of its first position."""
        return self.words[cell] if self.words and self.pooled == 1 else str(cell * self.pooled)


@dataclass(frozen=True, slots=True)
class Panel:
    """A matrix of cells, float64 [rows, columns]; NaN where nothing may be attended to. `empty`: rows that have no key at all."""

    title: str
    rows: Axis
    columns: Axis
    values: Array
    empty: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """What the colours mean: from `low` to `high`; `diverging` has its middle at 0; a `logarithmic` one starts above 0."""

    name: str
    low: float
    high: float
    diverging: bool = False
    logarithmic: bool = False

    def share(self, values: Array) -> Array:
        """Where numbers lie between low (0) and high (1); those beyond take the end, NaN stays."""
        if self.logarithmic:
            values = np.log(np.maximum(values, self.low) / self.low) / math.log(self.high / self.low)
        else:
            values = (values - self.low) / (self.high - self.low)
        return np.clip(values, 0, 1)

    def ticks(self) -> list[float]:
        """Round numbers on the scale: powers of ten where it is logarithmic, else three to six multiples of 1, 2 or 5."""
        if self.logarithmic:
            return [10.0**n for n in range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)]
        span = self.high - self.low
        unit = 10.0 ** math.floor(math.log10(span / 3))
        step = next(unit * factor for factor in (5, 2, 1) if span / (unit * factor) >= 2.5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 0.02)  # a largest weight of 0.999 ends at 1
        return [n * step for n in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels under one title and one scale. `note` says what was pooled; `about` goes into the file's metadata."""

    title: str
    panels: tuple[Panel, ...]
    scale: Scale
    note: str = ""
    about: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Style:
    """How a picture is to look: `width` in CSS pixels (None: as wide as it needs), `dpi` of the PNG, where 96 is a pixel for a pixel.

    `values`: numbers in the cells, None where they fit.
    """

    theme: Theme = "light"
    colours: Colours = "viridis"
    width: int | None = None
    dpi: int = 96
    values: bool | None = None
