"""A picture -> a sheet: how wide panels are, which of them carry labels, where everything stands. Draws nothing.

Panels stand in a grid. Words stand beside the first column and below the lowest panel of each column; one colour bar serves all.
"""

import math
from dataclasses import dataclass

from service.attention.figures.axes import LINE, LONGEST, Ticks, below, beside
from service.attention.figures.colours import PALETTES, Palette, coloured, ink_on
from service.attention.figures.picture import Panel, Picture, Style
from service.attention.figures.sheet import Cells, Line, Sheet
from service.attention.figures.surroundings import write_bar, write_foot, write_title
from service.attention.figures.words import cut, printable, width
from service.errors import InvalidRequest
from service.tensors import Array

NARROWEST, WIDEST = 300.0, 1200  # of a sheet whose width nobody gave
MARGIN, GAP = 18.0, 16.0
HEADING, TEXT = 13.0, 12.0  # font sizes
LARGEST_CELL, LARGEST_PANEL = 64.0, 720.0
BAR = 84.0  # what the colour bar takes, with its numbers
NUMBERED = 2500  # cells of a picture that may hold numbers
SMALLEST_NUMBER = 7.5
GRIDDED = 7.0  # pixels from which cells are set apart


def grid_columns(panels: int, room: float) -> int:
    """Panels side by side: a grid somewhat wider than high, with few places left over, and no panel narrower than 130 pixels."""
    most = max(1, min(panels, int(room // 130)))
    rate = lambda n: abs(math.log(n / math.ceil(panels / n) / 1.7)) + 0.35 * (-panels % n)  # noqa: E731  # used on the next line alone
    return min(range(1, most + 1), key=rate)


def resolution(panels: int, style: Style, cells: int, widest: float = LARGEST_PANEL) -> int:
    """Cells that a side of one of so many panels may have: two pixels each at least, and `cells` in all of the picture.

    `widest` is how wide a panel may become where nobody gave a width.
    """
    room = (style.width or WIDEST) - BAR - 2 * MARGIN - 60
    panel = room / grid_columns(panels, room)
    panel = panel if style.width else min(panel, widest)
    return max(1, min(int(panel // 2), math.isqrt(cells // panels)))


def lay_out(picture: Picture, style: Style) -> Sheet:
    """The sheet of a picture. Raises InvalidRequest where numbers are demanded in cells that they do not fit."""
    return _Layout(picture, style).sheet


@dataclass(slots=True)
class _Place:
    """Where a panel's cells stand."""

    panel: Panel
    x: float
    y: float
    width: float
    height: float
    first: bool  # in its row
    lowest: bool  # in its column


class _Layout:
    def __init__(self, picture: Picture, style: Style) -> None:
        self.picture, self.style = picture, style
        self.palette: Palette = PALETTES[style.theme]
        self.sheet = Sheet(0, 0, self.palette.paper)
        self.columns = 1
        if len({panel.columns for panel in picture.panels}) == 1:
            room = (style.width or WIDEST) - BAR - 2 * MARGIN - 60
            self.columns = grid_columns(len(picture.panels), room)
        spare = (style.width or WIDEST) - BAR - 2 * MARGIN - TEXT * LINE - 10  # what labels and panels share
        self.longest = min(LONGEST, max(18.0, spare / 3))
        self.left, (width, height) = 0.0, self._panel_size()
        for _ in range(2):  # wider panels may have larger labels beside them; those may then leave less for panels, but never more
            self.left = max(self.left, MARGIN + TEXT * LINE + max(beside(p.rows, height, self.longest).room for p in picture.panels) + 10)
            if style.width is not None or self.left + self._across(width) + BAR + MARGIN > WIDEST:
                width, height = self._panel_size(self._room())
        self.bottom = max(below(p.columns, width, self.longest).room for p in picture.panels)
        self._build(width, height)

    def _room(self) -> float:
        """The width that is left for each panel."""
        room = (self.style.width or WIDEST) - self.left - BAR - MARGIN - GAP * (self.columns - 1)
        if room / self.columns < 24:
            raise InvalidRequest.where("/figure/width", "room for panels beside their labels", f"{self.style.width}")
        return room / self.columns

    def _across(self, width: float) -> float:
        return self.columns * width + GAP * (self.columns - 1)

    def _panel_size(self, width: float | None = None) -> tuple[float, float]:
        """Of a panel's cells: squares as far as they go, but neither a thread nor a tower."""
        rows, columns = (max(getattr(p, side).cells for p in self.picture.panels) for side in ("rows", "columns"))
        if width is None:
            most = LARGEST_PANEL if 2 * rows >= columns else WIDEST
            width = max(min(columns * LARGEST_CELL, most, WIDEST / self.columns), 110.0)
        height = min(
            max(width * rows / columns, min(rows * 15.0, 0.4 * width)),
            max(1.5 * width, min(2.0 * rows, LARGEST_PANEL)),
            rows * LARGEST_CELL * 2,
        )
        return width, max(height, 18.0)

    def _build(self, width: float, height: float) -> None:
        right = self.left + self._across(width)
        total = math.ceil(max(right + BAR + MARGIN, NARROWEST)) if self.style.width is None else self.style.width
        top = write_title(self.sheet, self.picture, self.style, MARGIN, MARGIN, total - 2 * MARGIN)
        places, floor = self._places(top, width, height)
        for place in places:
            self._panel(place)
        bar = min(max(height, 120.0), 320.0)
        write_bar(self.sheet, self.picture, self.style, right + GAP + 4, places[0].y, bar)
        lowest = max(floor, places[0].y + bar + TEXT * 2)
        end = write_foot(self.sheet, self.picture, self.style, MARGIN, lowest, total - 2 * MARGIN)
        self.sheet.width, self.sheet.height = total, math.ceil(end + MARGIN * 0.7)
        self.sheet.panels = [(place.x, place.y, place.width, place.height) for place in places]

    def _places(self, top: float, width: float, height: float) -> tuple[list[_Place], float]:
        panels, places = self.picture.panels, []
        heading = HEADING * LINE + 4 if any(panel.title for panel in panels) else 0
        labelled = self.bottom + TEXT * LINE + 16
        count, y = len(panels), top
        for start in range(0, count, self.columns):
            y += heading
            row = range(start, min(start + self.columns, count))
            for i in row:
                lowest = i + self.columns >= count or panels[i].columns != panels[i + self.columns].columns
                places.append(_Place(panels[i], self.left + (i - start) * (width + GAP), y, width, height, i == start, lowest))
            y += height + (labelled if any(places[i].lowest for i in row) else GAP)
        return places, y

    def _panel(self, place: _Place) -> None:
        panel, palette = place.panel, self.palette
        pixels = coloured(panel.values, self.picture.scale, self.style)
        cell = place.width / panel.columns.cells, place.height / panel.rows.cells
        gap = min(1.0, 0.06 * min(cell)) if min(cell) >= GRIDDED else 0.0
        if panel.title:
            self._over_or_under(place, place.y - 6, panel.title, HEADING, palette.ink, "heading")
        self.sheet.marks.append(Cells(place.x, place.y, place.width, place.height, pixels, gap, panel.title))
        self._hatch_rows(place, cell[1])
        self._numbers(place, pixels, cell)
        parts = len(panel.columns.groups)
        for i in range(1, parts):
            x = place.x + i * place.width / parts
            self.sheet.marks.append(Line(x, place.y - 3, x, place.y + place.height + 3, palette.ink, 1.2))
        if place.first:
            self._rows(place, beside(panel.rows, place.height, self.longest), cell[1])
        if place.lowest:
            self._columns(place, below(panel.columns, place.width, self.longest), cell[0])

    def _rows(self, place: _Place, ticks: Ticks, cell: float) -> None:
        for tick in ticks.ticks:
            y = place.y + tick.at * cell
            text, size = tick.text, ticks.size
            self.sheet.write(place.x - 6, y + 0.35 * size, text, size, self.palette.ink, anchor="end", role="row", whole=tick.whole)
        middle = place.y + place.height / 2
        x = MARGIN + TEXT * 0.8
        self.sheet.write(x, middle, place.panel.rows.name, TEXT, self.palette.faint, anchor="middle", rotated=True, role="axis")

    def _columns(self, place: _Place, ticks: Ticks, cell: float) -> None:
        under = place.y + place.height
        size, ink = ticks.size, self.palette.ink
        for tick in ticks.ticks:
            x, text = place.x + tick.at * cell, tick.text
            if ticks.standing:
                x += 0.35 * size
                self.sheet.write(x, under + 6, text, size, ink, anchor="end", rotated=True, role="column", whole=tick.whole)
            else:
                self.sheet.write(x, under + 4 + size, text, size, ink, anchor="middle", role="column", whole=tick.whole)
        y = under + self.bottom + TEXT * LINE + 6
        self._over_or_under(place, y, place.panel.columns.name, TEXT, self.palette.faint, "axis")

    def _over_or_under(self, place: _Place, y: float, text: str, size: float, colour: str, role: str) -> None:
        """Words about a panel, in its middle as far as they have room there; beside nothing but the bar they may stand further left."""
        first = MARGIN if self.columns == 1 else place.x - GAP / 2 + 2
        end = place.x + place.width + (GAP if self.columns == 1 else GAP / 2 - 2)
        shown = cut(printable(text), size, end - first)
        half = width(shown, size) / 2
        middle = min(max(place.x + place.width / 2, first + half), end - half)
        self.sheet.write(middle, y, shown, size, colour, anchor="middle", role=role, whole=text)

    def _numbers(self, place: _Place, pixels: Array, cell: tuple[float, float]) -> None:
        """Values in the cells: where they fit, unless the style says."""
        values = place.panel.values
        if self.style.values is False:
            return
        texts = [[_number(value) for value in row] for row in values.tolist()] if values.size <= NUMBERED else []
        widest = max((width(text, 1.0) for row in texts for text in row), default=0.0)
        size = min(max(11.0, 0.16 * min(cell)), 18.0, 0.6 * cell[1], (cell[0] - 4) / widest) if widest else 0.0
        total = sum(panel.values.size for panel in self.picture.panels)
        if total > NUMBERED or (texts and widest and size < SMALLEST_NUMBER):
            if self.style.values:
                wanted = f"cells that numbers fit into, at most {NUMBERED} in all; a larger width, fewer heads or words, or null"
                raise InvalidRequest.where("/figure/values", wanted, f"{total} cells of {cell[0]:.0f} x {cell[1]:.0f} pixels")
            return
        for i, row in enumerate(texts):
            y = place.y + (i + 0.5) * cell[1] + 0.35 * size
            for j, text in enumerate(row):
                if text:
                    x = place.x + (j + 0.5) * cell[0]
                    self.sheet.write(x, y, text, size, ink_on(pixels[i, j]), anchor="middle", role="value")

    def _hatch_rows(self, place: _Place, cell: float) -> None:
        """Slanted lines over rows that have no key; neighbours are hatched as one."""
        start = previous = None
        for row in [*sorted(place.panel.empty), None]:
            if start is not None and row != (previous or 0) + 1:
                self.sheet.hatch(place.x, place.y + start * cell, place.width, ((previous or 0) + 1 - start) * cell, self.palette.hatch)
                start = None
            if start is None:
                start = row
            previous = row


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return "0" if value == 0 else f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"
