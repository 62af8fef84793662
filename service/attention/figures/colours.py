"""Colours: two themes, maps that people who are colour-blind can read, and ink that stands out on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from service.attention.figures.picture import Scale, Style, Theme
from service.tensors import Array

STEPS = 256


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a theme beside its maps."""

    paper: str
    ink: str
    faint: str  # of what is said beside: axis names, notes, ticks
    blocked: str  # pairs that may not attend
    hatch: str  # over rows that have no key
    diverging: tuple[str, ...]


PALETTES: Mapping[Theme, Palette] = {
    "light": Palette("#ffffff", "#1a1d21", "#565d66", "#d9dce0", "#8d949d", ("#0b4f8a", "#5aa3d6", "#f6f6f6", "#e39a4c", "#8a4300")),
    "dark": Palette("#15181d", "#eceff2", "#a7afb9", "#40464f", "#868e98", ("#8fd0ff", "#2f78b0", "#1e2228", "#b06a22", "#ffc27a")),
}


def rgb(colour: str) -> tuple[int, int, int]:
    """#rrggbb as three numbers of 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@cache
def table(name: str, theme: Theme, diverging: bool) -> Array:
    """The map as uint8 [256, 3]."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    ours = LinearSegmentedColormap.from_list("diverging", PALETTES[theme].diverging)
    chosen = ours if diverging else matplotlib.colormaps[name]
    made: Array = np.rint(chosen(np.linspace(0, 1, STEPS))[:, :3] * 255).astype(np.uint8)
    return made


def coloured(values: Array, scale: Scale, style: Style) -> Array:
    """uint8 [rows, columns, 3]; what lies beyond the scale takes its end, NaN the colour of what is blocked."""
    blocked = np.isnan(values)
    at = np.rint(np.where(blocked, 0, scale.share(values)) * (STEPS - 1)).astype(np.intp)
    pixels: Array = table(style.colours, style.theme, scale.diverging)[at]
    pixels[blocked] = rgb(PALETTES[style.theme].blocked)
    return pixels


def ink_on(pixel: Array) -> str:
    """Black or white, whichever stands out more on the colour: contrast as WCAG 2 defines it, (L1 + 0.05) / (L2 + 0.05)."""
    channels = np.asarray(pixel, np.float64) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"
