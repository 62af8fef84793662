"""A sheet: marks at places, in CSS pixels from the top left corner. What a layout writes and every pen reads."""

from dataclasses import dataclass, field
from typing import Literal

from service.tensors import Array


@dataclass(frozen=True, slots=True)
class Cells:
    """A matrix of coloured cells that fills a rectangle. `gap` is what is left free between two of them."""

    x: float
    y: float
    width: float
    height: float
    pixels: Array  # uint8 [rows, columns, 3]
    gap: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline starts, is centred or ends at a place; `rotated` reads upward. `whole` is what it was cut from."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Literal["start", "middle", "end"] = "start"
    rotated: bool = False
    bold: bool = False
    whole: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0


Mark = Cells | Label | Line


@dataclass(slots=True)
class Sheet:
    """Marks in the order in which they are drawn, and where each panel's cells came to stand: (x, y, width, height)."""

    width: int
    height: int
    paper: str
    marks: list[Mark] = field(default_factory=list)
    panels: list[tuple[float, float, float, float]] = field(default_factory=list)
