"""Writes a picture as a standalone HTML page: its SVG, its values and labels, and the heat-map viewer.

Labels are data for the script, never markup. The page's Content-Security-Policy allows this one script, by its hash, and no network.
"""

import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template

import numpy as np

from attend.heads.figures.geometry import printable
from attend.heads.figures.plot import Plot
from attend.heads.figures.spec import Axis


def write_html(plot: Plot, svg: str) -> bytes:
    """The page of a plot whose SVG is given."""
    picture = plot.picture
    script = _asset("assets/heatmap.js") + _asset("heads/figures/figure.js")
    page = Template(_asset("heads/figures/figure.html")).substitute(
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        meta="\n".join(f'<meta name="{escape(name)}" content="{escape(printable(text))}">' for name, text in picture.about.items()),
        title=escape(printable(picture.title)),
        tip_style=_asset("assets/heatmap.css"),
        theme=plot.spec.theme,
        svg=svg,
        data=_page_data(plot),
        script=script,
    )
    return page.encode()


def _asset(path: str) -> str:
    """A file of the package, without the imports of a script, whose sources precede it in the page."""
    return "".join(line for line in files("attend").joinpath(path).read_text("utf-8").splitlines(True) if not line.startswith("import "))


def _page_data(plot: Plot) -> str:
    """The data of the script as JSON, with `<` escaped so that it cannot end the script element."""
    panels = []
    for panel, area in zip(plot.picture.panels, plot.geometry.areas, strict=True):
        with np.errstate(over="ignore"):  # overflow is shown as infinity
            values = b64encode(panel.values.astype("<f4").tobytes()).decode()
        cell_area = [area.x, area.y, area.width, area.height]
        sides = {"rows": _axis_data(panel.rows), "columns": _axis_data(panel.columns)}
        panels.append({"title": printable(panel.title), "place": cell_area, **sides, "empty": panel.empty, "values": values})
    document = {"size": [plot.width, plot.height], "panels": panels}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _axis_data(axis: Axis) -> Mapping[str, object]:
    words = [printable(label) for label in axis.labels] if axis.pooled == 1 else []
    return {"name": axis.name, "total": axis.total, "pooled": axis.pooled, "words": words, "groups": axis.groups}
