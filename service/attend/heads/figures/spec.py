"""`FigureSpec`, the options of a figure, and `Picture`, its content: panels, axes, colour scale and notes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attend.tensors import Array

FigureKind = Literal["heads", "head", "mean", "std", "similarity", "concatenation"]
Format = Literal["png", "svg", "html"]
Theme = Literal["light", "dark"]
Pool = Literal["mean", "max"]
Colours = Literal["viridis", "cividis"]


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """A figure of one batch item of a call, with `queries` x `keys` pairs: those at `query_positions` and `key_positions` (None: all).

    `width` is in CSS pixels (None: as wide as needed); `dpi` is that of a PNG, where 96 is one pixel for each CSS pixel. `values` prints
    numbers in the cells (None: where they fit). `maximum` is the value of the last colour (None: the largest value).
    """

    kind: FigureKind = "heads"
    item: int = 0
    queries: int = 1
    keys: int = 1
    heads: tuple[int, ...] = (0,)
    query_labels: tuple[str, ...] = ()
    key_labels: tuple[str, ...] = ()
    query_positions: tuple[int, ...] | None = None
    key_positions: tuple[int, ...] | None = None
    omitted: tuple[str, ...] = ()  # tokens at the other positions
    pool: Pool = "mean"
    signed: bool = False  # whether weights may be negative
    title: str | None = None
    maximum: float | None = None
    logarithmic: bool = False
    scale_per_head: bool = False  # of the kind `heads`
    theme: Theme = "light"
    colours: Colours = "viridis"
    width: int | None = None
    dpi: int = 96
    values: bool | None = None
    format: Format = "png"


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a panel. A cell is `pooled` consecutive positions (the last cell possibly fewer) of `total`.

    `labels` names every position; without it positions are numbered from 0. `groups` names equal parts of the axis, such as heads.
    """

    name: str
    total: int
    pooled: int = 1
    labels: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def cells(self) -> int:
        return -(-self.total // self.pooled)


@dataclass(frozen=True, slots=True)
class Panel:
    """One heat map: float64 [rows, columns], NaN where attention is blocked. `empty` lists the fully masked rows.

    Colours show the values divided by `unit`.
    """

    title: str
    rows: Axis
    columns: Axis
    values: Array
    empty: tuple[int, ...] = ()
    unit: float = 1.0

    @property
    def shares(self) -> Array:
        """What the colours show."""
        return self.values / self.unit


@dataclass(frozen=True, slots=True)
class Scale:
    """The values of the first and last colour. A diverging scale has 0 in its middle; a logarithmic one has `low` > 0."""

    name: str
    low: float
    high: float
    diverging: bool = False
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels with one title, one scale and notes below them. `about` becomes the file's metadata."""

    title: str
    panels: tuple[Panel, ...]
    scale: Scale
    notes: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
