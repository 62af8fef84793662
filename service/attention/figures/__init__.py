"""Figures of what heads do: arrays and labels in, the bytes of a PNG, an SVG or a standalone HTML page out.

    weights --reductions--> cells --panels--> Picture --layout, plot--> png | svg --html--> html

Knows no request. matplotlib is loaded when something is drawn, not before; only one thread at a time may call `draw`.
"""

from collections.abc import Callable

from service.attention.figures.panels import compose, operation_for
from service.attention.figures.picture import FigureSpec, Format, Picture


def draw(picture: Picture, spec: FigureSpec, check: Callable[[], None] = lambda: None) -> bytes:
    """The bytes of the picture, in the format of the specification. `check` is called at intervals, and may raise to end the drawing.

    Raises TooLarge where a PNG would have too many pixels, InvalidRequest where the picture cannot have the width or the values asked for.
    """
    from service.attention.figures.html import write_html
    from service.attention.figures.plot import Plot, settings

    check()
    with settings(spec.theme):
        plot = Plot(picture, spec, check)
        if spec.format == "png":
            return plot.png()
        svg = plot.svg()
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}\n'.encode() if spec.format == "svg" else write_html(plot, svg)


__all__ = ["FigureSpec", "Format", "Picture", "compose", "draw", "operation_for"]
