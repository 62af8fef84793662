"""A sheet -> PNG, by matplotlib's object interface: artists of this figure alone on an Agg canvas. pyplot is never loaded, no global
setting is read that is not given here, and none is changed."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from service.attention.figures.colours import rgb
from service.attention.figures.sheet import Cells, Label, Line, Sheet
from service.attention.figures.words import drawable, fonts
from service.tensors import Array

POINTS = 72 / 96  # of a CSS pixel


def draw_png(sheet: Sheet, about: Mapping[str, str], dpi: int, check: Callable[[], None]) -> bytes:
    """The picture at `dpi`, 96 of which make a pixel of a CSS pixel. `about` becomes its text chunks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from matplotlib.transforms import Affine2D

    figure = Figure(figsize=(sheet.width / 96, sheet.height / 96), dpi=dpi, facecolor=sheet.paper)
    canvas = FigureCanvasAgg(figure)
    scale = dpi / 96
    place = Affine2D().scale(scale, -scale).translate(0, sheet.height * scale)
    plain, bold = (FontProperties(fname=file) for file in fonts())
    check()
    for mark in sheet.marks:
        if isinstance(mark, Cells):
            _cells(figure, mark, sheet, scale)
        elif isinstance(mark, Line):
            line = Line2D([mark.x1, mark.x2], [mark.y1, mark.y2], linewidth=mark.width * POINTS, color=mark.colour, transform=place)
            figure.add_artist(line)
        else:
            font = (bold if mark.bold else plain).copy()
            font.set_size(mark.size * POINTS)
            figure.add_artist(_text(Text, mark, font, place))
    check()
    out = io.BytesIO()
    canvas.print_png(out, metadata={"Software": None, **about})  # type: ignore[no-untyped-call]  # matplotlib says no types there
    return out.getvalue()


def _cells(figure: Any, mark: Cells, sheet: Sheet, scale: float) -> None:
    """The cells pixel by pixel, with sharp edges: each device pixel takes the cell its middle lies in, or the paper in the gaps."""
    left, right = round(mark.x * scale), round((mark.x + mark.width) * scale)
    top, bottom = round(mark.y * scale), round((mark.y + mark.height) * scale)
    rows, columns = mark.pixels.shape[:2]
    i, gap_i = _pixels(bottom - top, rows, mark.gap * scale)
    j, gap_j = _pixels(right - left, columns, mark.gap * scale)
    image = mark.pixels[i[:, None], j]
    image[gap_i[:, None] | gap_j] = rgb(sheet.paper)
    figure.figimage(image, left, round(sheet.height * scale) - bottom, origin="upper")


def _pixels(length: int, cells: int, gap: float) -> tuple[Array, Array]:
    """For each device pixel along one side: its cell, and whether it lies in the gap between that cell and the next."""
    middle = np.arange(length) + 0.5
    cell = np.minimum((middle * cells / length).astype(np.intp), cells - 1)
    free, wide = np.zeros(length, np.bool_), round(gap)
    if wide:
        free[:-wide] = cell[wide:] != cell[:-wide]
    return cell, free


def _text(kind: Any, mark: Label, font: Any, place: Any) -> Any:
    """A label as an artist: no mathematics, no TeX, whatever it says."""
    return kind(
        mark.x,
        mark.y,
        drawable(mark.text),
        fontproperties=font,
        color=mark.colour,
        horizontalalignment={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
        verticalalignment="baseline",
        rotation=90 if mark.rotated else 0,
        rotation_mode="anchor",
        parse_math=False,
        usetex=False,
        transform=place,
    )
