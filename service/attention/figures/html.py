"""A picture -> one HTML file that needs nothing else: the SVG, the numbers and words behind it, and a script that shows a cell's value
under the pointer or under the arrow keys.

Words are data for the script, never markup: they are put into the page as text. A Content-Security-Policy in the page admits this one
script and this one style sheet, by their hashes, and no network at all.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from xml.etree import ElementTree as ET

import numpy as np

from service.attention.figures.colours import PALETTES
from service.attention.figures.picture import Axis, Picture, Style
from service.attention.figures.sheet import Sheet
from service.attention.figures.svg import svg_tree
from service.attention.figures.words import printable

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{meta}
<title>{title}</title>
<style>{style}</style>
</head>
<body data-theme="{theme}">
<main>
<div id="figure" tabindex="0" role="application" aria-roledescription="heat map" aria-label="{title}" aria-describedby="help">
{svg}
<div id="cursor" hidden></div>
</div>
<p id="value" role="status" aria-live="polite">&nbsp;</p>
<p id="help">Point at a cell for its value, or use the arrow keys; Page Up and Page Down go from panel to panel, Escape leaves.</p>
<noscript><p>Values need the script in this file.</p></noscript>
<div id="tip" hidden></div>
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def draw_html(picture: Picture, style: Style, sheet: Sheet, about: Mapping[str, str], check: Callable[[], None]) -> bytes:
    """The page."""
    script, sheet_of_styles = _part("page.js"), _part("page.css")
    policy = f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; style-src '{_hash(sheet_of_styles)}'"
    page = PAGE.format(
        policy=policy,
        meta="\n".join(f'<meta name="{escape(name)}" content="{escape(value)}">' for name, value in about.items()),
        title=escape(printable(picture.title)),
        style=sheet_of_styles,
        theme=style.theme,
        svg=ET.tostring(svg_tree(sheet, about, check), encoding="unicode"),
        data=_data(picture, style, sheet),
        script=script,
    )
    return page.encode()


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def _data(picture: Picture, style: Style, sheet: Sheet) -> str:
    """What the script knows. `<` is written as its code, so that nothing in it can end the element it stands in."""
    with np.errstate(over="ignore"):  # what float32 cannot hold is shown as infinity
        numbers = [panel.values.astype("<f4").tobytes() for panel in picture.panels]
    panels = [
        {
            "title": printable(panel.title),
            "place": [round(number, 2) for number in place],
            "rows": _axis(panel.rows),
            "columns": _axis(panel.columns),
            "empty": list(panel.empty),
            "values": b64encode(values).decode(),
        }
        for panel, place, values in zip(picture.panels, sheet.panels, numbers, strict=True)
    ]
    palette = PALETTES[style.theme]
    document = {"size": [sheet.width, sheet.height], "ink": palette.ink, "panels": panels}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _axis(axis: Axis) -> dict[str, object]:
    words = [printable(word) for word in axis.words] if axis.pooled == 1 else []
    return {"name": axis.name, "total": axis.total, "pooled": axis.pooled, "words": words, "groups": list(axis.groups)}
