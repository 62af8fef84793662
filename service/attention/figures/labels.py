"""Makes labels printable, measures them, and cuts or wraps them to a width. Labels are never markup or mathematics.

Widths are those of DejaVu Sans, which comes with matplotlib, so that the layout is the same on every machine.
"""

from bisect import bisect_right
from functools import cache, lru_cache
from textwrap import wrap

JOINERS = {"\u200c", "\u200d"}  # invisible, but part of words in Persian and Hindi, and of emoji
MAX_LETTERS = 1000
ELLIPSIS = "…"


def printable(text: str) -> str:
    """The text, at most MAX_LETTERS of it, with invisible characters escaped as in Python: a newline becomes \\n."""
    text = text if len(text) <= MAX_LETTERS else text[:MAX_LETTERS] + ELLIPSIS
    return "".join(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)


@cache
def _characters() -> frozenset[int]:
    """The code points that DejaVu Sans has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def drawable(text: str) -> str:
    """The text with a box for each character that DejaVu Sans lacks; for PNG, since readers of SVG have other fonts."""
    return "".join(c if ord(c) in _characters() else "□" for c in text)


@lru_cache(4096)
def _unit_width(text: str, bold: bool) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=100)
    return float(text_to_path.get_text_width_height_descent(drawable(text), font, ismath=False)[0]) / 100 if text else 0.0


def width(text: str, size: float, bold: bool = False) -> float:
    """The width of the text at a font size, in the unit of the size."""
    return size * _unit_width(text, bold)


def cut(text: str, size: float, room: float, bold: bool = False) -> str:
    """The text, or its beginning and an ellipsis if it is wider than `room`."""
    if width(text, size, bold) <= room:
        return text
    kept = bisect_right(range(len(text)), room, key=lambda n: width(text[:n] + ELLIPSIS, size, bold)) - 1
    return text[: max(kept, 0)].rstrip() + ELLIPSIS


def wrapped(text: str, size: float, room: float, most: int, bold: bool = False) -> list[str]:
    """The text in at most `most` lines no wider than `room`; the last line is cut if there is more."""
    letters = max(1, int(len(text) * room / max(width(text, size, bold), room)))
    lines = wrap(text, letters)
    while letters > 1 and max((width(line, size, bold) for line in lines), default=0) > room:
        letters = max(1, letters * 19 // 20)
        lines = wrap(text, letters)
    return lines if len(lines) <= most else [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), size, room, bold)]
