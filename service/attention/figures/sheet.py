"""A sheet: marks at places, in CSS pixels from the top left corner. What a layout writes and every pen reads."""

import math
from dataclasses import dataclass, field
from typing import Literal

from service.attention.figures.words import printable
from service.tensors import Array

Anchor = Literal["start", "middle", "end"]
HATCHING = 6.0  # pixels from line to line


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
    anchor: Anchor = "start"
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

    def write(
        self, x: float, y: float, text: str, size: float, colour: str, *, role: str, anchor: Anchor = "start", rotated: bool = False,
        bold: bool = False, whole: str = "",
    ) -> None:  # fmt: skip
        """Adds a label; `whole`, where it was cut from more."""
        cut_off = printable(whole) if whole and printable(whole) != text else ""
        self.marks.append(Label(x, y, text, size, colour, anchor, rotated, bold, cut_off, role))

    def hatch(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Slanted lines over a rectangle."""
        for i in range(1, math.ceil((width + height) / HATCHING)):
            along = i * HATCHING  # a line from the left or lower side up to the right: x - x0 + y - y0 = along
            x1, x2 = max(0.0, along - height), min(along, width)
            self.marks.append(Line(x + x1, y + along - x1, x + x2, y + along - x2, colour))
