"""Pictures of what heads do: arrays and words in, the bytes of a PNG, an SVG or an HTML page out.

    weights --pooling--> raster --kinds--> picture --layout--> sheet --png | svg | html--> bytes

Knows no request. matplotlib is loaded when something is drawn, not before; `draw` is for one thread at a time.
"""

from collections.abc import Callable
from typing import Literal

from service.attention.figures.html import draw_html
from service.attention.figures.kinds import Kind, Subject, compose, needs
from service.attention.figures.layout import lay_out
from service.attention.figures.picture import Picture, Style
from service.attention.figures.png import draw_png
from service.attention.figures.svg import draw_svg
from service.attention.figures.words import printable
from service.errors import TooLarge

Format = Literal["png", "svg", "html"]
PIXELS = 1 << 25  # of a PNG


def draw(picture: Picture, style: Style, form: Format, check: Callable[[], None] = lambda: None) -> bytes:
    """The picture's bytes, the same for the same picture. `check` is called now and then, and may raise to end it.

    Raises TooLarge where a PNG would have too many pixels, InvalidRequest where the style asks for what does not fit.
    """
    check()
    sheet = lay_out(picture, style)
    about = {name: printable(value) for name, value in picture.about.items()}
    if form == "svg":
        return draw_svg(sheet, about, check)
    if form == "html":
        return draw_html(picture, style, sheet, about, check)
    pixels = round(sheet.width * sheet.height * (style.dpi / 96) ** 2)
    if pixels > PIXELS:
        raise TooLarge.where("/figure/dpi", f"a picture of at most {PIXELS} pixels", str(pixels))
    return draw_png(sheet, about, style.dpi, check)


__all__ = ["Format", "Kind", "Picture", "Style", "Subject", "compose", "draw", "needs"]
