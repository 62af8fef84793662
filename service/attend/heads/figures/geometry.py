"""Computes positions and sizes in CSS pixels: the grid of panels, the number of cells per panel, and the labels of the axes.

Labels are never markup or mathematics. Their widths are those of DejaVu Sans, which comes with matplotlib, so that the geometry is the same
on every machine. matplotlib's constrained layout of eight heads takes 440 to 900 ms of CPU time, this one 0.5 to 2.5 ms; with 24 long
words on each axis it gives up ("axes sizes collapsed to zero"), and labels and a long title reach beyond the edge.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from textwrap import wrap

import numpy as np

from attend.errors import InvalidRequest
from attend.heads.figures.spec import Axis, FigureSpec, Panel, Picture

NARROWEST, WIDEST = 300, 1200  # width of a figure without `width`
MARGIN, GAP, BAR = 18, 16, 96  # BAR: the colour bar with its numbers and its name
TITLE, HEADING, TEXT, NOTE = 17.0, 13.0, 12.0, 11.0  # font sizes
SMALLEST_LABEL = 9.0  # font size of a label
LINE = 1.25  # height of a line, as a multiple of the font size
LONGEST_LABEL = 130.0
LARGEST_CELL, LARGEST_PANEL = 64, 720
NO_KEY = "no key to attend to"
JOINERS = {"\u200c", "\u200d"}  # invisible, but part of words in Persian and Hindi, and of emoji
MAX_LETTERS = 1000  # of a text, as escaped
NARROWEST_LETTER = 0.25  # its width in font sizes
ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The rectangle of a panel's cells, and whether it has row labels and column labels."""

    x: float
    y: float
    width: float
    height: float
    has_rows: bool = True
    has_columns: bool = True


class Geometry:
    """The positions of a whole figure. Raises InvalidRequest if its width has no room for panels next to their labels."""

    def __init__(self, picture: Picture, spec: FigureSpec) -> None:
        panels, self.longest = picture.panels, min(LONGEST_LABEL, max(18.0, ((spec.width or WIDEST) - BAR - 2 * MARGIN) / 3 - 10))
        shared = len({panel.columns for panel in panels}) == 1
        self.columns = grid_columns(len(panels), (spec.width or WIDEST) - BAR - 2 * MARGIN - 60) if shared else 1
        # the room of row labels at their largest size
        label_room = max(row_ticks(panel.rows, TEXT * LINE * panel.rows.cells, self.longest).room for panel in panels)
        left = MARGIN + TEXT * LINE + label_room + 10
        panel_width, panel_height = self._panel_size(panels, spec, left)
        right = left + self.columns * panel_width + GAP * (self.columns - 1)
        self.width = spec.width or max(NARROWEST, math.ceil(right + BAR + MARGIN))
        room = self.width - 2 * MARGIN
        self.title = wrapped(printable(picture.title), TITLE, room, 3, bold=True)
        self.notes = [line for note in picture.notes for line in wrapped(printable(note), NOTE, room, 4)]
        self.areas, y = self._plot_areas(panels, left, panel_width, panel_height, shared)
        self.bar = PlotArea(round(right) + GAP + 4, self.areas[0].y, 14, min(max(panel_height, 120), 320))
        self.foot = max(y, self.bar.y + self.bar.height + TEXT * 2) + 4
        blocked, empty = any(np.isnan(panel.values).any() for panel in panels), any(panel.empty for panel in panels)
        self.legend = ["may not attend"] * blocked + [NO_KEY] * empty
        self.legend_columns = 2 if self.width >= NARROWEST else 1
        self.notes_y = self.foot + 18 * math.ceil(len(self.legend) / self.legend_columns)
        self.height = math.ceil(self.notes_y + NOTE * LINE * len(self.notes) + 0.7 * MARGIN)

    def _panel_size(self, panels: Sequence[Panel], spec: FigureSpec, left: float) -> tuple[float, float]:
        """Width and height of a panel: cells are squares unless the panel would be too flat or too high."""
        rows, columns = (max(getattr(panel, side).cells for panel in panels) for side in ("rows", "columns"))
        width = ((spec.width or WIDEST) - left - BAR - MARGIN - GAP * (self.columns - 1)) / self.columns
        if width < 24:
            raise InvalidRequest.where("/figure/width", "room for panels next to their labels", str(spec.width))
        if spec.width is None:
            width = min(width, max(min(columns * LARGEST_CELL, LARGEST_PANEL if 2 * rows >= columns else WIDEST), 110))
        if width / columns >= 16:
            width = width // columns * columns  # cells of whole pixels
        height = max(width * rows / columns, min(rows * 15.0, 0.4 * width))
        height = max(36.0, min(height, max(1.5 * width, min(2.0 * rows, LARGEST_PANEL)), rows * LARGEST_CELL * 2))
        return width, round(height / rows) * rows if height / rows >= 7 else height

    def _plot_areas(
        self, panels: Sequence[Panel], left: float, panel_width: float, panel_height: float, shared: bool
    ) -> tuple[list[PlotArea], float]:
        """The areas of the panels, and the lower end of the last one. Panels of a grid share the labels of its last row."""
        below = max(column_ticks(panel.columns, panel_width, self.longest).room for panel in panels) + TEXT * LINE + 16
        areas, y = [], MARGIN + TITLE * LINE * len(self.title) + 8
        for start in range(0, len(panels), self.columns):
            y += HEADING * LINE + 4 if any(panel.title for panel in panels) else 0
            is_lowest = not shared or start + self.columns >= len(panels)
            for i in range(min(self.columns, len(panels) - start)):
                areas.append(PlotArea(round(left + i * (panel_width + GAP)), round(y), panel_width, panel_height, i == 0, is_lowest))
            y += panel_height + (below if is_lowest else GAP)
        return areas, y


def grid_columns(panels: int, room: float) -> int:
    """The number of columns of the grid: wider than high, few cells of the grid empty, no panel narrower than 130 pixels."""
    most = max(1, min(panels, int(room // 130)))
    return min(range(1, most + 1), key=lambda n: abs(math.log(n / math.ceil(panels / n) / 1.7)) + 0.35 * (-panels % n))


def resolution(panels: int, spec: FigureSpec, cells: int, widest: float = LARGEST_PANEL) -> int:
    """The largest number of cells per side of a panel: at least two pixels per cell, at most `cells` in all panels."""
    room = (spec.width or WIDEST) - BAR - 2 * MARGIN - 60
    panel = room / grid_columns(panels, room)
    panel = panel if spec.width else min(panel, widest)
    return max(1, min(int(panel // 2), math.isqrt(cells // panels)))


@dataclass(frozen=True, slots=True)
class Ticks:
    """Labels of an axis: positions in cells, uncut texts, font size, and the room they take when cut."""

    at: Sequence[float]
    texts: Sequence[str]
    size: float
    room: float
    upright: bool = False


def row_ticks(axis: Axis, length: float, longest: float) -> Ticks:
    """Labels of the rows of an axis of `length` pixels, as many as fit."""
    cell = length / axis.cells
    size = min(TEXT, max(SMALLEST_LABEL, 0.8 * cell))
    return _ticks(axis, size * LINE / cell, size, longest)


def column_ticks(axis: Axis, length: float, longest: float) -> Ticks:
    """Labels of columns: horizontal if all fit, otherwise upright, as many as fit."""
    cell = length / axis.cells
    if axis.groups:
        each = axis.cells / len(axis.groups)
        step = math.ceil((max(width(group, TEXT) for group in axis.groups) + 6) / (each * cell))
        names = axis.groups[::step]
        return Ticks([(step * i + 0.5) * each for i in range(len(names))], names, TEXT, TEXT * LINE)
    has_words = axis.labels and axis.pooled == 1
    level = _ticks(axis, 1 if has_words else (width(str(axis.total), TEXT) + 8) / cell, TEXT, longest)
    if not has_words or level.room + 6 <= cell:
        return replace(level, room=TEXT * LINE)
    size = min(TEXT, max(SMALLEST_LABEL, 0.8 * cell))
    return replace(_ticks(axis, size * LINE / cell, size, longest), upright=True)


def _ticks(axis: Axis, least: float, size: float, longest: float) -> Ticks:
    """Labels at least `least` cells apart; numbers at multiples of 1, 2 or 5 times a power of ten."""
    if axis.labels and axis.pooled == 1:
        chosen = range(0, axis.cells, max(1, math.ceil(least - 1e-9)))
        texts, at = [printable(axis.labels[cell]) for cell in chosen], [cell + 0.5 for cell in chosen]
    else:
        least = max(1.0, least * axis.pooled)
        power = 10 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= max(least, axis.pooled) - 1e-9)
        texts = [str(position) for position in range(0, axis.total, step)]
        at = [(position + 0.5 * (axis.pooled == 1)) / axis.pooled for position in range(0, axis.total, step)]
    return Ticks(at, texts, size, min(longest, max(width(beginning(text, size, longest), size) for text in texts)))


def wrapped(text: str, size: float, room: float, most: int, bold: bool = False) -> list[str]:
    """The text in at most `most` lines no wider than `room`; the last line is cut if there is more."""
    letters = max(1, int(len(text) * room / max(width(text, size, bold), room)))
    lines = wrap(text, letters)
    while letters > 1 and max((width(line, size, bold) for line in lines), default=0) > room:
        letters = max(1, letters * 19 // 20)
        lines = wrap(text, letters)
    return lines if len(lines) <= most else [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), size, room, bold)]


def cut(text: str, size: float, room: float, bold: bool = False) -> str:
    """The text, or its beginning and an ellipsis if it is wider than `room`."""
    start = beginning(text, size, room)
    if start == text and width(text, size, bold) <= room:
        return text
    kept = bisect_right(range(len(start)), room, key=lambda n: width(start[:n] + ELLIPSIS, size, bold)) - 1
    return start[: max(kept, 0)].rstrip() + ELLIPSIS


def beginning(text: str, size: float, room: float) -> str:
    """As many letters of the text as may fit into `room`, and one more: to measure a letter takes microseconds."""
    return text[: int(room / (size * NARROWEST_LETTER)) + 1]


def width(text: str, size: float, bold: bool = False) -> float:
    """The width of the text at a font size, in the unit of the size."""
    return size * _unit_width(text, bold)


@lru_cache(4096)
def _unit_width(text: str, bold: bool) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=100)
    return float(text_to_path.get_text_width_height_descent(drawable(text), font, ismath=False)[0]) / 100 if text else 0.0


@lru_cache(4096)
def printable(text: str) -> str:
    """The text with invisible characters escaped as in Python: a newline becomes \\n. At most MAX_LETTERS and an ellipsis."""
    pieces, letters = [], 0
    for c in text:
        pieces.append(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode())
        letters += len(pieces[-1])
        if letters > MAX_LETTERS:
            return "".join(pieces)[:MAX_LETTERS] + ELLIPSIS
    return "".join(pieces)


def drawable(text: str) -> str:
    """The text with a box for each character that DejaVu Sans lacks; for PNG, since readers of SVG have other fonts."""
    return "".join(c if ord(c) in _characters() else "□" for c in text)


@cache
def _characters() -> frozenset[int]:
    """The code points that DejaVu Sans has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
