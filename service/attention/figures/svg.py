"""A sheet -> SVG: cells as rectangles (as one image where they are many), words as text, which a reader can find, copy and enlarge.

Written with the standard library's XML tree: it escapes what a word may hold, so that no word becomes an element. matplotlib's own SVG
would draw words as outlines, in the glyphs of one font, under ids that change with a global setting.
"""

import io
import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from xml.etree import ElementTree as ET

from service.attention.figures.sheet import Cells, Label, Line, Sheet
from service.tensors import Array

RECTANGLES = 6000  # cells of a picture up to which each is an element of its own; a colour bar always is
NAMESPACE = "http://www.w3.org/2000/svg"
FONT = "DejaVu Sans, Verdana, sans-serif"


def draw_svg(sheet: Sheet, about: Mapping[str, str], check: Callable[[], None]) -> bytes:
    """The picture as a document of its own."""
    tree = ET.tostring(svg_tree(sheet, about, check), encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tree}\n'.encode()


def svg_tree(sheet: Sheet, about: Mapping[str, str], check: Callable[[], None]) -> ET.Element:
    """The element `svg`. Everything is said in attributes, nothing in styles, so that the strictest page may hold it."""
    size = {"width": str(sheet.width), "height": str(sheet.height), "viewBox": f"0 0 {sheet.width} {sheet.height}"}
    root = ET.Element("svg", {"xmlns": NAMESPACE, **size, "font-family": FONT, "role": "img", "aria-labelledby": "picture"})
    ET.SubElement(root, "title", {"id": "picture"}).text = about.get("Title", "")
    ET.SubElement(root, "metadata").text = json.dumps(dict(about), ensure_ascii=False)  # no elements: an HTML parser would leave the SVG
    ET.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": sheet.paper})
    total = sum(mark.pixels[..., 0].size for mark in sheet.marks if isinstance(mark, Cells))
    for mark in sheet.marks:
        if isinstance(mark, Cells):
            check()
            (_rectangles if total <= RECTANGLES or mark.pixels.shape[1] == 1 else _image)(root, mark)
        elif isinstance(mark, Line):
            ends = {name: _short(getattr(mark, name)) for name in ("x1", "y1", "x2", "y2")}
            ET.SubElement(root, "line", {**ends, "stroke": mark.colour, "stroke-width": _short(mark.width)})
        else:
            _text(root, mark)
    return root


def _rectangles(root: ET.Element, mark: Cells) -> None:
    rows, columns = mark.pixels.shape[:2]
    width, height = mark.width / columns, mark.height / rows
    group = ET.SubElement(root, "g", {"class": "cells", "aria-label": mark.name})
    if not mark.gap:
        group.set("shape-rendering", "crispEdges")  # no seams between cells that touch
    size = {"width": _short(width - mark.gap), "height": _short(height - mark.gap)}
    for i, row in enumerate(mark.pixels):
        for j, pixel in enumerate(row):
            place = {"x": _short(mark.x + j * width), "y": _short(mark.y + i * height)}
            ET.SubElement(group, "rect", {**place, **size, "fill": "#" + pixel.tobytes().hex()})


def _image(root: ET.Element, mark: Cells) -> None:
    """A pixel for each cell, which the reader enlarges without smoothing."""
    href = "data:image/png;base64," + b64encode(_tiny_png(mark.pixels)).decode()
    place = {name: _short(getattr(mark, name)) for name in ("x", "y", "width", "height")}
    attributes = {"class": "cells", "aria-label": mark.name, "preserveAspectRatio": "none", "image-rendering": "pixelated"}
    ET.SubElement(root, "image", {**attributes, **place, "href": href})


def _tiny_png(pixels: Array) -> bytes:
    from matplotlib.image import imsave

    out = io.BytesIO()
    imsave(out, pixels, format="png", metadata={"Software": ""})
    return out.getvalue()


def _text(root: ET.Element, mark: Label) -> None:
    attributes = {"class": mark.role, "x": _short(mark.x), "y": _short(mark.y), "font-size": _short(mark.size), "fill": mark.colour}
    if mark.anchor != "start":
        attributes["text-anchor"] = mark.anchor
    if mark.bold:
        attributes["font-weight"] = "bold"
    if mark.rotated:
        attributes["transform"] = f"rotate(-90 {_short(mark.x)} {_short(mark.y)})"
    element = ET.SubElement(root, "text", attributes)
    element.text = mark.text
    if mark.whole:
        ET.SubElement(element, "title").text = mark.whole


def _short(number: float) -> str:
    """Two decimals of a pixel are enough."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
