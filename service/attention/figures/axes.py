"""The labels of one axis: which cells get one, at what size, lying or standing. Measures words; places nothing on the sheet."""

import math
from dataclasses import dataclass

from service.attention.figures.picture import Axis
from service.attention.figures.words import cut, printable, width

LONGEST = 130.0  # pixels that a label may take
SMALLEST, LARGEST, BESIDE_LARGE_CELLS = 9.0, 12.0, 18.0  # font sizes
LINE = 1.2  # of a font size: what a line of text takes


@dataclass(frozen=True, slots=True)
class Tick:
    """A label and the place of its middle along the axis, in cells."""

    at: float
    text: str
    whole: str


@dataclass(frozen=True, slots=True)
class Ticks:
    """Labels of an axis. `room` is what they take across it."""

    ticks: tuple[Tick, ...]
    size: float
    room: float
    standing: bool = False


def beside(axis: Axis, length: float, longest: float = LONGEST) -> Ticks:
    """Lying labels beside rows, on an axis of `length` pixels: as many as there is height for, none longer than `longest`."""
    cell = length / axis.cells
    size = _size(cell)
    ticks = _ticks(axis, size * LINE / cell, size, longest)
    return Ticks(ticks, size, max(width(tick.text, size) for tick in ticks))


def below(axis: Axis, length: float, longest: float = LONGEST) -> Ticks:
    """Labels below columns: lying where every one fits, else standing, as many as there is width for, none longer than `longest`."""
    cell = length / axis.cells
    if axis.groups:
        return _groups(axis, cell)
    size = _size(cell)
    if not axis.words or axis.pooled > 1:
        widest = width(axis.label(axis.cells - 1), size) + 8
        return Ticks(_ticks(axis, widest / cell, size, longest), size, size * LINE)
    large = max(size, LARGEST)
    lying = max(width(tick.text, large) for tick in _ticks(axis, 1, large, longest))
    if lying + 6 <= cell:
        return Ticks(_ticks(axis, 1, large, longest), large, large * LINE)
    ticks = _ticks(axis, size * LINE / cell, size, longest)
    return Ticks(ticks, size, max(width(tick.text, size) for tick in ticks), standing=True)


def _size(cell: float) -> float:
    """The font size beside cells of so many pixels."""
    return max(min(LARGEST, max(SMALLEST, 0.8 * cell)), min(BESIDE_LARGE_CELLS, 0.16 * cell))


def _ticks(axis: Axis, cells_each: float, size: float, longest: float) -> tuple[Tick, ...]:
    """One label every so many cells; numbers at round positions."""
    numbered = not axis.words or axis.pooled > 1
    positions = _round_step(cells_each * axis.pooled) if numbered else max(1, math.ceil(cells_each - 1e-9))
    if numbered:
        labels = [(position / axis.pooled, str(position)) for position in range(0, axis.total, max(positions, axis.pooled))]
        half = 0.5 if axis.pooled == 1 else 0.0
        return tuple(Tick(at + half, text, text) for at, text in labels)
    chosen = [(cell, printable(axis.words[cell])) for cell in range(0, axis.cells, positions)]
    return tuple(Tick(cell + 0.5, cut(text, size, longest), text) for cell, text in chosen)


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, … that is not below."""
    scale = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    return next(step for factor in (1, 2, 5, 10) if (step := int(scale * factor)) >= least - 1e-9)


def _groups(axis: Axis, cell: float) -> Ticks:
    each = axis.cells / len(axis.groups)
    size = min(LARGEST, max(SMALLEST, 0.3 * each * cell))
    step = math.ceil((max(width(group, size) for group in axis.groups) + 6) / (each * cell))
    chosen = range(0, len(axis.groups), step)
    return Ticks(tuple(Tick((i + 0.5) * each, axis.groups[i], axis.groups[i]) for i in chosen), size, size * LINE)
