"""What stands around the panels of a sheet: the title above, the colour bar beside, and below what colours and hatching mean, and the note.

Each writes onto the sheet where it is told to, in no more width than it is given.
"""

import numpy as np

from service.attention.figures.axes import LINE
from service.attention.figures.colours import PALETTES, coloured
from service.attention.figures.picture import Picture, Style
from service.attention.figures.sheet import Cells, Line, Sheet
from service.attention.figures.words import lines, printable, width

TITLE, NOTE = 17.0, 11.0  # font sizes
SAMPLE = (20.0, 12.0)  # of a colour in the legend


def write_title(sheet: Sheet, picture: Picture, style: Style, x: float, y: float, room: float) -> float:
    """In at most three lines; returns where they end."""
    ink = PALETTES[style.theme].ink
    for line in lines(printable(picture.title), TITLE, room, 3, bold=True) if picture.title else ():
        y += TITLE * LINE
        sheet.write(x, y - 0.3 * TITLE, line, TITLE, ink, bold=True, role="title", whole=picture.title)
    return y + 8


def write_bar(sheet: Sheet, picture: Picture, style: Style, x: float, y: float, height: float) -> None:
    """The colours of the scale, and round numbers beside them."""
    scale, palette, steps = picture.scale, PALETTES[style.theme], 64
    even = np.geomspace if scale.logarithmic else np.linspace
    values = even(scale.high, scale.low, steps)[:, None]
    sheet.marks.append(Cells(x, y, 14, height, coloured(values, scale, style), name="colour bar"))
    for value in scale.ticks():
        at = y + height * (1 - float(scale.share(np.asarray(value))))
        sheet.marks.append(Line(x + 14, at, x + 18, at, palette.faint))
        sheet.write(x + 21, at + 4, f"{value:.3g}", NOTE, palette.ink, role="scale")


def write_foot(sheet: Sheet, picture: Picture, style: Style, x: float, y: float, room: float) -> float:
    """What grey and hatched mean, where they occur, the name of the scale, and the note; returns where that ends."""
    palette, scale = PALETTES[style.theme], picture.scale
    y = _write_legend(sheet, picture, style, x, y + 4, room)
    for text in (f"Colour: {scale.name}, {scale.low:.3g} to {scale.high:.3g}.", picture.note):
        for line in lines(printable(text), NOTE, room, 4) if text else ():
            sheet.write(x, y + 10, line, NOTE, palette.faint, role="note")
            y += NOTE * LINE + 1
    return y


def _write_legend(sheet: Sheet, picture: Picture, style: Style, left: float, y: float, room: float) -> float:
    palette, x = PALETTES[style.theme], left
    blocked = any(np.isnan(panel.values).any() for panel in picture.panels)
    legend = [(False, "may not attend")] * blocked + [(True, "no key to attend to")] * any(panel.empty for panel in picture.panels)
    for hatched, meaning in legend:
        wide = SAMPLE[0] + 6 + width(meaning, NOTE)
        if x + wide > left + room:
            x, y = left, y + 18
        pixels = np.array([[[int(palette.blocked[i : i + 2], 16) for i in (1, 3, 5)]]], np.uint8)
        sheet.marks.append(Cells(x, y, *SAMPLE, pixels, name=meaning))
        if hatched:
            sheet.hatch(x, y, *SAMPLE, palette.hatch)
        sheet.write(x + SAMPLE[0] + 6, y + 10, meaning, NOTE, palette.faint, role="legend")
        x += wide + 22
    return y + 18 * bool(legend)
