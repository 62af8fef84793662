"""Draws figures of heads from arrays and labels, as a PNG, an SVG or a standalone HTML page.

    spec.py      the options of a figure, and its content: `Picture`
    kinds.py     weights or outputs to a `Picture`, for each kind of figure
    geometry.py  positions and sizes of its parts
    plot.py      a `Picture` to a PNG or an SVG
    html.py      a plot to an HTML page

matplotlib is loaded by the first figure. Only one thread at a time may call `draw`.
"""

from collections.abc import Callable

from attend.heads.figures.kinds import compose, operation_for
from attend.heads.figures.spec import FigureSpec, Format, Picture


def draw(picture: Picture, spec: FigureSpec, check: Callable[[], None] = lambda: None) -> bytes:
    """The bytes of the picture, in the format of the spec. `check` is called at intervals and may raise to stop the drawing.

    Raises TooLarge for a PNG of too many pixels, InvalidRequest if panels or values do not fit.
    """
    from attend.heads.figures.html import write_html
    from attend.heads.figures.plot import Plot, settings

    check()
    with settings(spec.theme):
        plot = Plot(picture, spec, check)
        try:
            plot.draw()
            if spec.format == "png":
                return plot.png()
            svg = plot.svg()
        finally:
            plot.free()
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}\n'.encode() if spec.format == "svg" else write_html(plot, svg)


__all__ = ["FigureSpec", "Format", "Picture", "compose", "draw", "operation_for"]
