"""Draws a picture with matplotlib, one axes for each panel and one for the colour bar, and writes it as a PNG or an SVG.

Only matplotlib's object interface is used, never pyplot, and its settings are restored after each figure: nothing that the process has set
changes a picture. Text in an SVG stays text. The same picture gives the same bytes.
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from attend.errors import InvalidRequest, TooLarge
from attend.heads.figures import geometry
from attend.heads.figures.geometry import HEADING, LINE, MARGIN, NOTE, TEXT, TITLE, PlotArea, Ticks, cut, drawable, printable
from attend.heads.figures.spec import FigureSpec, Panel, Picture, Scale, Theme
from attend.tensors import Array

MAX_PIXELS = 1 << 25  # of a PNG
MAX_SHAPES = 2500  # cells that are drawn as shapes; with more cells, each panel is one image
MAX_VALUES = 2500  # cells that may hold numbers
SMALLEST_VALUE = 7.5  # font size of numbers in cells
GRIDDED = 8.0  # pixels of a cell from which there are lines between cells
HATCH = "/////"
PIXEL = 0.75  # a CSS pixel in points
SVG = "http://www.w3.org/2000/svg"
FONTS = "'DejaVu Sans', 'Verdana', sans-serif"
THEMES: Mapping[Theme, dict[str, str]] = {  # faint: axis names and notes; blocked: cells that may not attend; hatch: rows without keys
    "light": {"paper": "#ffffff", "ink": "#1a1d21", "faint": "#565d66", "blocked": "#d9dce0", "hatch": "#8d949d"},
    "dark": {"paper": "#15181d", "ink": "#eceff2", "faint": "#a7afb9", "blocked": "#40464f", "hatch": "#868e98"},
}
DIVERGING: Mapping[Theme, list[str]] = {
    "light": ["#0b4f8a", "#5aa3d6", "#f6f6f6", "#e39a4c", "#8a4300"],
    "dark": ["#8fd0ff", "#2f78b0", "#1e2228", "#b06a22", "#ffc27a"],
}


def colour_map(spec: FigureSpec, scale: Scale) -> Colormap:
    """The colour map of a scale; NaN has the colour of blocked cells."""
    if scale.diverging:
        chosen: Colormap = LinearSegmentedColormap.from_list("diverging", DIVERGING[spec.theme])
    else:
        chosen = matplotlib.colormaps[spec.colours]
    return chosen.with_extremes(bad=THEMES[spec.theme]["blocked"])


def ink_on(colours: Array) -> Array:
    """Black or white for each RGBA colour, whichever has more contrast with it as WCAG 2 defines it, (L1 + 0.05) / (L2 + 0.05)."""
    channels = colours[..., :3]
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where((luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05), "#000000", "#ffffff")


@contextmanager
def settings(theme: Theme) -> Iterator[None]:
    """matplotlib's defaults with our changes, independent of the process's own; restored afterwards."""
    colours = THEMES[theme]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        ours: dict[Any, Any] = {
            "svg.fonttype": "none", "svg.hashsalt": "attend", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana"],
            "text.parse_math": False, "axes.unicode_minus": False, "hatch.linewidth": PIXEL, "hatch.color": colours["hatch"],
            "text.color": colours["ink"], "axes.labelcolor": colours["faint"], "axes.edgecolor": colours["faint"],
            "xtick.color": colours["faint"], "ytick.color": colours["faint"], "xtick.labelcolor": colours["ink"],
            "ytick.labelcolor": colours["ink"],
        }  # fmt: skip
        matplotlib.rcParams.update(ours)
        yield


for prefix, uri in (("", SVG), ("xlink", "http://www.w3.org/1999/xlink")):
    ET.register_namespace(prefix, uri)


class Plot:
    """The matplotlib figure of a picture; construct, draw, write and free it within `settings`."""

    def __init__(self, picture: Picture, spec: FigureSpec, check: Callable[[], None] = lambda: None) -> None:
        self.picture, self.spec, self.check = picture, spec, check
        self.about = {name: printable(text) for name, text in picture.about.items()}
        self.geometry, self.colours = geometry.Geometry(picture, spec), THEMES[spec.theme]
        check()
        scale = picture.scale
        self.map, self.norm = colour_map(spec, scale), (LogNorm if scale.logarithmic else Normalize)(scale.low, scale.high)
        self.cells = sum(panel.values.size for panel in picture.panels)
        self.texts: dict[str, tuple[str, str, str]] = {}  # id -> role, text as drawn, uncut text
        self.colour_bars: list[Any] = []
        self.width, self.height = self.geometry.width, self.geometry.height
        self.figure = Figure(figsize=(self.width / 96, self.height / 96), dpi=spec.dpi, facecolor=self.colours["paper"])

    def draw(self) -> None:
        """Draw all parts. Raises TooLarge for a PNG of too many pixels, InvalidRequest for values without room, and what `check` raises."""
        pixels = round(self.width * self.height * (self.spec.dpi / 96) ** 2)
        if self.spec.format == "png" and pixels > MAX_PIXELS:
            raise TooLarge.where("/figure/dpi", f"a picture of at most {MAX_PIXELS} pixels", str(pixels))
        self._write("title", self.geometry.title, MARGIN, TITLE, self.colours["ink"], weight="bold")
        for panel, area in zip(self.picture.panels, self.geometry.areas, strict=True):
            self.check()
            self._panel(panel, area)
        self._bar(self.geometry.bar)
        if self.geometry.legend:
            self._legend()
        self._write("note", self.geometry.notes, self.geometry.notes_y, NOTE, self.colours["faint"])

    def free(self) -> None:
        """Cut the references by which matplotlib's objects refer to each other. They would stay until a full garbage collection, which
        among so many objects pauses all threads for tenths of a second."""
        parts = [*self.figure.get_children(), *(part for axes in self.figure.axes for part in axes.get_children())]
        for part in (*parts, *self.colour_bars, self.figure.canvas, self.figure):
            part.__dict__.clear()

    def _axes(self, area: PlotArea) -> Axes:
        size = area.width / self.width, area.height / self.height
        axes: Axes = self.figure.add_axes((area.x / self.width, 1 - area.y / self.height - size[1], *size))
        axes.add_artist(_CheckBetween(self.check))
        return axes

    def _register(self, artist: Text, role: str, text: str, uncut: str = "") -> None:
        """Give the artist an id, by which `svg` finds its uncut text."""
        self.texts[key := f"{role}-{len(self.texts)}"] = role, text, uncut or text
        artist.set_gid(key)

    def _write(self, role: str, lines: Sequence[str], y: float, size: float, colour: str, **style: Any) -> None:
        """Lines of text below `y`."""
        for i, line in enumerate(lines):
            corner = MARGIN / self.width, 1 - (y + (i + 0.8) * size * LINE) / self.height
            self._register(self.figure.text(*corner, drawable(line), fontsize=size * PIXEL, color=colour, **style), role, line)

    def _panel(self, panel: Panel, area: PlotArea) -> None:
        axes, rows, columns = self._axes(area), panel.rows.cells, panel.columns.cells
        cell = area.width / columns, area.height / rows
        values = np.clip(panel.shares, self.picture.scale.low, self.picture.scale.high)
        if self.cells <= MAX_SHAPES:
            mesh = axes.pcolormesh(values, cmap=self.map, norm=self.norm, snap=True, gid=f"cells-{len(self.figure.axes)}")
            if min(cell) >= GRIDDED:
                mesh.set(edgecolor=self.colours["paper"], linewidth=PIXEL)
        else:
            extent = (0, columns, rows, 0)
            axes.imshow(values, cmap=self.map, norm=self.norm, aspect="auto", interpolation="none", extent=extent)
            if min(cell) >= GRIDDED:
                axes.vlines(range(1, columns), 0, rows, colors=self.colours["paper"], linewidth=PIXEL)
                axes.hlines(range(1, rows), 0, columns, colors=self.colours["paper"], linewidth=PIXEL)
        axes.set(xlim=(0, columns), ylim=(rows, 0), frame_on=False)
        axes.xaxis.set_visible(area.has_columns)
        axes.yaxis.set_visible(area.has_rows)
        if panel.title:
            self._heading(axes, panel.title, area.width + (geometry.GAP - 4 if self.geometry.columns > 1 else 0))
        for _, run in groupby(enumerate(panel.empty), lambda pair: pair[1] - pair[0]):
            empty = [row for _, row in run]
            axes.axhspan(empty[0], empty[-1] + 1, facecolor="none", edgecolor=self.colours["hatch"], hatch=HATCH, linewidth=0)
        for i in range(1, len(panel.columns.groups)):
            axes.axvline(i * columns / len(panel.columns.groups), color=self.colours["ink"], linewidth=1.2 * PIXEL)
        self._values(axes, panel, cell)
        longest = self.geometry.longest
        if area.has_rows:
            self._ticks(axes.yaxis, "row", geometry.row_ticks(panel.rows, area.height, longest), panel.rows.name, area.height)
        if area.has_columns:
            self._ticks(axes.xaxis, "column", geometry.column_ticks(panel.columns, area.width, longest), panel.columns.name, area.width)

    def _heading(self, axes: Axes, title: str, room: float) -> None:
        text = cut(printable(title), HEADING, room)
        self._register(axes.set_title(drawable(text), fontsize=HEADING * PIXEL, pad=6 * PIXEL), "heading", text, title)

    def _ticks(self, axis: Any, role: str, ticks: Ticks, name: str, room: float) -> None:
        self.check()
        texts = [cut(text, ticks.size, self.geometry.longest) for text in ticks.texts]
        self.check()
        axis.set_ticks(ticks.at, [drawable(text) for text in texts])
        axis.set_tick_params(length=0, pad=5 * PIXEL, labelsize=ticks.size * PIXEL)
        for label, text, uncut in zip(axis.get_ticklabels(), texts, ticks.texts, strict=True):
            if ticks.upright:
                label.set(rotation=90, rotation_mode="anchor", ha="right", va="center")
            self._register(label, role, text, uncut)
        shown = cut(name, TEXT, max(room, 60))
        self._register(axis.set_label_text(shown, fontsize=TEXT * PIXEL), "axis", shown, name)

    def _values(self, axes: Axes, panel: Panel, cell: tuple[float, float]) -> None:
        """Numbers in the cells if they fit. Raises InvalidRequest if they are requested and do not fit."""
        if self.spec.values is False or (self.cells > MAX_VALUES and not self.spec.values):
            return
        texts = [[_cell_text(value) for value in row] for row in panel.values[:MAX_VALUES, :MAX_VALUES].tolist()]
        widest = max(geometry.width(text, 1.0) for row in texts for text in row)
        size = min(max(11.0, 0.16 * min(cell)), 18.0, 0.6 * cell[1], (cell[0] - 6) / (widest or 1.0))
        if self.cells > MAX_VALUES or (widest and size < SMALLEST_VALUE):
            if self.spec.values:
                wanted = f"cells that numbers fit into, at most {MAX_VALUES} in all; a larger width, fewer heads or words, or null"
                raise InvalidRequest.where("/figure/values", wanted, f"{self.cells} cells of {cell[0]:.0f} x {cell[1]:.0f} pixels")
            return
        inks = ink_on(self.map(self.norm(np.clip(panel.shares, self.picture.scale.low, self.picture.scale.high))))
        for i, row in enumerate(texts):
            for j, text in enumerate(row):
                if text:
                    artist = axes.text(j + 0.5, i + 0.5, text, fontsize=size * PIXEL, color=inks[i, j], ha="center", va="center_baseline")
                    self._register(artist, "value", text)

    def _bar(self, area: PlotArea) -> None:
        """The colour bar with its numbers and its name."""
        low, high, ticks = self.picture.scale.low, self.picture.scale.high, None
        if not self.picture.scale.logarithmic:
            inner, apart = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high), 0.07 * (high - low)
            ticks = [low, *(tick for tick in inner if low + apart < tick < high - apart), high]
        bar = self.figure.colorbar(ScalarMappable(self.norm, self.map), cax=self._axes(area), format="{x:.3g}", ticks=ticks)
        self.colour_bars.append(bar)
        assert bar.solids is not None
        bar.solids.set(rasterized=False, gid="colour-bar")  # matplotlib would clear a bitmap of the whole picture for it, without a pause
        bar.outline.set_visible(False)
        bar.minorticks_off()
        bar.ax.tick_params(length=4 * PIXEL, pad=3 * PIXEL, labelsize=NOTE * PIXEL)
        for label in bar.ax.get_yticklabels():
            self._register(label, "scale", label.get_text())
        bar.set_label(self.picture.scale.name, fontsize=TEXT * PIXEL)
        self._register(bar.ax.yaxis.label, "colours", self.picture.scale.name)

    def _legend(self) -> None:
        """The meaning of grey and hatched cells."""
        hatched: dict[str, Any] = {"edgecolor": self.colours["hatch"], "hatch": HATCH, "linewidth": 0}
        patches = [
            Patch(facecolor=self.colours["blocked"], label=name, **(hatched if name == geometry.NO_KEY else {}))
            for name in self.geometry.legend
        ]
        legend = self.figure.legend(
            handles=patches, ncols=self.geometry.legend_columns, bbox_to_anchor=(MARGIN / self.width, 1 - self.geometry.foot / self.height),
            loc="upper left", borderpad=0, borderaxespad=0, handletextpad=0.5, labelspacing=0.4, frameon=False, fontsize=NOTE * PIXEL,
            labelcolor=self.colours["faint"],
        )  # fmt: skip
        for text in legend.get_texts():
            self._register(text, "legend", text.get_text())

    def png(self) -> bytes:
        out = io.BytesIO()
        metadata = {"Software": None, **self.about}
        FigureCanvasAgg(self.figure).print_png(out, metadata=metadata)  # type: ignore[no-untyped-call]  # matplotlib does not annotate it
        return out.getvalue()

    def svg(self) -> str:
        """matplotlib's SVG element with uncut texts and a title, and without a style sheet, which would apply to a whole page."""
        out = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(self.figure).print_svg(out, metadata=metadata)  # type: ignore[no-untyped-call]  # matplotlib does not annotate it
        self.check()
        root = ET.fromstring(out.getvalue())
        root.remove(next(child for child in root if child.find(f"{{{SVG}}}style") is not None))
        size = {"width": str(self.width), "height": str(self.height), "role": "img", "aria-labelledby": "picture"}
        root.attrib.update(size | {"font-family": FONTS, "stroke-linejoin": "round"})
        title, about = ET.Element(f"{{{SVG}}}title", {"id": "picture"}), ET.Element(f"{{{SVG}}}metadata")
        title.text, about.text = self.about.get("Title", ""), json.dumps(self.about, ensure_ascii=False)
        root[:0] = [title, about]
        for group in root.iter(f"{{{SVG}}}g"):
            if found := self.texts.get(group.get("id", "")):
                self._restore_text(group, *found)
            elif group.get("id", "").startswith("cells"):
                group.set("shape-rendering", "crispEdges")  # no seams between cells
        return ET.tostring(root, encoding="unicode")

    def _restore_text(self, group: ET.Element, role: str, text: str, uncut: str) -> None:
        """Put a text into its group of the SVG, without boxes for missing letters, and with the uncut text as title."""
        del group.attrib["id"]
        for element in group:
            element.attrib |= {"class": role, "style": element.get("style", "").replace(f"font-family: {FONTS}; ", "")}
            element.text = text
            if uncut != text:
                ET.SubElement(element, f"{{{SVG}}}title").text = printable(uncut)


class _CheckBetween(Artist):
    """Draws nothing, and calls `check` after the cells and before the labels of its axes: each may take a second."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.check = check
        self.set_zorder(1.5)  # above images and meshes, below lines and labels

    def draw(self, renderer: Any) -> None:
        self.check()


def _cell_text(value: float) -> str:
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"
