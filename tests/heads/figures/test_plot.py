"""Figures from arrays and labels: pooling against float64 NumPy, and the drawing, with any labels."""

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from attend.attention.call import WeightBlock
from attend.errors import DeadlinePassed, InvalidRequest, TooLarge
from attend.heads.figures import FigureSpec, Picture, compose, draw, geometry
from attend.heads.figures.geometry import column_ticks, cut, printable, row_ticks, width, wrapped
from attend.heads.figures.kinds import Pooling, mean_across, pool_array, std_across
from attend.heads.figures.plot import THEMES, Plot, colour_map, ink_on, settings
from attend.heads.figures.spec import Axis, Panel, Scale
from attend.heads.metrics.compute import OVERFLOWED

HEADS, QUERIES, KEYS = 3, 23, 17
HOSTILE = (
    "$x_1$",
    "<script>alert(1)</script>",
    "a\nb",
    "😀",
    "漢字",
    "שלום",
    "x" * 200,
    "\u202eevil",
    "\x00",
    "&amp;",
    "]]>",
    "",
    "-->",
    "ﬃ",
)
RNG = np.random.RandomState(11)


def rgb(colour):
    """#rrggbb as three numbers of 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))


def blocks_of(weights, visible, block):
    """The weights as a layer yields them: `block` query rows at a time."""
    for start in range(0, weights.shape[2], block):
        rows = slice(start, min(start + block, weights.shape[2]))
        some = visible[:, :, rows] if visible is not None and visible.shape[2] > 1 else visible
        yield WeightBlock(rows, weights[:, :, rows], some)


def pooled_by_hand(weights, visible, steps, pool):
    """[heads, q, k] -> cells, in a loop over the cells."""
    heads, q, k = weights.shape
    cells = np.full((heads, -(-q // steps[0]), -(-k // steps[1])), np.nan)
    for h, i, j in np.ndindex(cells.shape):
        here = np.s_[h, i * steps[0] : (i + 1) * steps[0], j * steps[1] : (j + 1) * steps[1]]
        if visible[here].any():
            cells[h, i, j] = getattr(weights[here][visible[here]], pool)()
    return cells


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("steps", [(1, 1), (5, 1), (1, 7), (4, 3), (23, 17)])
@pytest.mark.parametrize("block", [1, 6, 23])
@pytest.mark.parametrize("masked", ["nothing", "one for all", "each head"])
def test_cells_pool_the_pairs_that_may_attend(pool, steps, block, masked):
    weights = RNG.random_sample((2, HEADS, QUERIES, KEYS))
    shape = {"nothing": (2, HEADS, QUERIES, KEYS), "one for all": (1, 1, QUERIES, KEYS), "each head": (2, HEADS, QUERIES, KEYS)}[masked]
    visible = np.ones(shape, bool) if masked == "nothing" else RNG.random_sample(shape) < 0.3
    everywhere = np.broadcast_to(visible, weights.shape)

    given = None if masked == "nothing" else torch.from_numpy(visible)
    made = Pooling(1, (QUERIES, KEYS), *steps, pool)(blocks_of(torch.from_numpy(weights), given, block))

    np.testing.assert_allclose(made["pooled"].numpy(), pooled_by_hand(weights[1], everywhere[1], steps, pool), rtol=1e-13)


@pytest.mark.parametrize(("across", "by_hand"), [(mean_across, np.mean), (std_across, np.std)])
def test_heads_are_reduced_before_pooling(across, by_hand):
    weights = RNG.random_sample((1, HEADS, QUERIES, KEYS))
    visible = np.tri(QUERIES, KEYS, dtype=bool)

    rows = blocks_of(torch.from_numpy(weights), torch.from_numpy(visible[None, None]), 4)
    made = Pooling(0, (QUERIES, KEYS), 3, 2, "max", across)(rows)

    expected = pooled_by_hand(by_hand(weights[0] * visible, 0)[None], visible[None], (3, 2), "max")
    np.testing.assert_allclose(made["pooled"].numpy(), expected, rtol=1e-13)


def test_negative_numbers_are_pooled():
    values = RNG.standard_normal((7, 11)) - 5

    for pool in ("mean", "max"):
        expected = pooled_by_hand(values[None], np.ones((1, 7, 11), bool), (2, 3), pool)[0]
        np.testing.assert_allclose(pool_array(torch.from_numpy(values), 2, 3, pool).numpy(), expected, rtol=1e-13)


def picture_of(panels=1, rows=13, columns=13, words=None, title="A title", columns_words=None):
    """Panels of random weights, one pair blocked, and one row without keys."""
    values = RNG.random_sample((panels, rows, columns))
    values[:, 0, -1] = np.nan
    values[:, rows // 2] = np.nan
    sides = Axis("query", rows, labels=tuple(words or ())), Axis("key", columns, labels=tuple(columns_words or words or ()))
    made = tuple(Panel(f"head {i}" if panels > 1 else "", *sides, values[i], (rows // 2,)) for i in range(panels))
    return Picture(title, made, Scale("attention weight", 0.0, 1.0), ("Pooled: not at all.",), {"Title": title})


def boxes_of(picture, spec):
    """The plot; the rectangles of panels and colour bar; role, text and rectangle of every label. In pixels from the lower left corner."""
    with settings(spec.theme):
        plot = Plot(picture, spec)
        plot.draw()
        plot.figure.draw_without_rendering()  # places the labels
        labels = []
        for artist in plot.figure.findobj(Text):
            if artist.get_gid() in plot.texts and artist.get_text():
                role, _, whole = plot.texts[artist.get_gid()]
                labels.append((role, whole, artist.get_window_extent().extents))
        panels = [axes.get_window_extent().extents for axes in plot.figure.axes[: len(picture.panels)]]
        bar = plot.figure.axes[-1].get_window_extent().extents
    return plot, panels, bar, labels


def overlap(one, other, slack=1.0):
    """Whether two rectangles share more than `slack` pixels in both directions."""
    return all(min(one[2 + i], other[2 + i]) - max(one[i], other[i]) > slack for i in (0, 1))


def longer(n):
    return [f"word{'s' * (7 * i % 19)}{i}" for i in range(n)]


@pytest.mark.parametrize("sheet_width", [pytest.param(None, marks=pytest.mark.slow), 420, 2400])
@pytest.mark.parametrize(
    ("shape", "worded"),
    [
        *((shape, True) for shape in [(1, 1, 1), (1, 3, 41), (1, 41, 3), (1, 120, 90), (2, 7, 7), (8, 13, 13), (17, 5, 11)]),
        *((shape, False) for shape in [(1, 13, 13), (12, 29, 29), (1, 1, 300)]),
    ],
)
def test_labels_do_not_overlap_and_are_not_cut_off(sheet_width, shape, worded):
    panels, rows, columns = shape
    words = (longer(rows), longer(columns)) if worded else (None, None)
    picture = picture_of(panels, rows, columns, words[0], "A title of some length that has to be broken", words[1])

    plot, panels_at, bar, labels = boxes_of(picture, FigureSpec(width=sheet_width, values=False))

    assert {"title", "axis", "scale", "legend", "note"} <= {role for role, _, _ in labels}
    for label in labels:
        left, bottom, right, top = label[2]
        assert left >= 0 and bottom >= 0 and right <= plot.width and top <= plot.height, label
        assert not any(overlap(label[2], panel) for panel in [*panels_at, bar]), label
    for i, label in enumerate(labels):
        assert not any(overlap(label[2], other[2]) for other in labels[i + 1 :]), label


def test_labels_are_escaped():
    """They are text of the SVG's elements; there are no other elements. PNG and page are drawn, too."""
    picture = picture_of(1, len(HOSTILE), len(HOSTILE), HOSTILE, "<b>$\\frac{1}{2}$ \x00 &")

    root = ET.fromstring(draw(picture, FigureSpec(format="svg")))

    rows = [element for element in root.iter("{http://www.w3.org/2000/svg}text") if element.get("class") == "row"]
    for element, word in zip(rows, filter(None, HOSTILE), strict=True):
        assert element.text in (printable(word), cut(printable(word), 12.0, 130.0))
        assert "".join(element.itertext()).endswith(printable(word))
    tags = {element.tag.partition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "metadata", "g", "path", "text", "defs", "clipPath", "rect", "use", "pattern", "image"}
    page = draw(picture, FigureSpec(format="html")).decode()
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)</script>" not in page and "<b>" not in page
    assert draw(picture, FigureSpec()).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("word", "shown"), [("a\nb", "a\\nb"), ("\u202eevil", "\\u202eevil"), ("\x00", "\\x00"), ("$x$ <b> 漢😀", "$x$ <b> 漢😀")]
)
def test_invisible_characters_are_escaped(word, shown):
    assert printable(word) == shown


@pytest.mark.parametrize("letter", ["\U000e0001", "m", "i", "\u0301"], ids=["invisible", "wide", "narrow", "without width"])
def test_no_text_is_longer_than_the_longest_when_it_is_escaped_and_measured(monkeypatch, letter):
    """An invisible letter is escaped to ten. Of a label, no more letters are measured than may fit in its room."""
    measured = []
    monkeypatch.setattr(geometry, "width", lambda text, size, bold=False: measured.append(len(text)) or width(text, size, bold))
    labels = tuple(f"{i}{letter * 5000}" for i in range(7))
    assert all(len(printable(label)) == 1001 and printable(label).endswith("…") for label in labels)
    axis = Axis("query", 7, labels=labels)
    for ticks in (row_ticks(axis, 500, 130.0), column_ticks(axis, 500, 130.0)):
        drawn = [cut(text, ticks.size, 130.0) for text in ticks.texts]
        assert all(text.endswith("…") and width(text, ticks.size) <= 130.0 for text in drawn)
    assert max(measured) < 70  # letters of 0.25 times a font size of 9 in 130 pixels, with an ellipsis


def test_a_png_has_the_colours_of_its_cells(tmp_path):
    """The middle of every cell of a known pattern; NaN is grey."""
    from matplotlib.image import imread

    values = np.eye(5)
    values[3] = np.nan
    axis = Axis("query", 5)
    picture = Picture("Eye", (Panel("", axis, axis, values),), Scale("weight", 0.0, 1.0))
    for theme in ("light", "dark"):
        spec = FigureSpec(theme=theme, dpi=192, values=False)
        (tmp_path / "eye.png").write_bytes(draw(picture, spec))
        pixels = np.rint(imread(tmp_path / "eye.png")[..., :3] * 255).astype(int)
        with settings(theme):
            plot = Plot(picture, spec)

        assert pixels.shape[:2] == (plot.height * 2, plot.width * 2)
        area, paper = plot.geometry.areas[0], rgb(THEMES[theme]["paper"])
        for i, j in np.ndindex(5, 5):
            middle = pixels[int(2 * (area.y + (i + 0.5) * area.height / 5)), int(2 * (area.x + (j + 0.5) * area.width / 5))]
            expected = rgb(THEMES[theme]["blocked"]) if i == 3 else np.rint(255 * np.array(plot.map(float(i == j))[:3])).astype(int)
            assert np.abs(middle - expected).max() <= 1
        assert tuple(pixels[0, 0]) == paper
        down = pixels[round(2 * area.y) + 4 : round(2 * (area.y + area.height)) - 4, int(2 * (area.x + 1.5 * area.width / 5))]
        assert (np.abs(down - paper) <= 1).all(-1).sum() >= 4  # a gap between each two cells


def test_numbers_in_cells_have_enough_contrast():
    """Contrast of at least 4.5 : 1 (WCAG AA) with every colour that a cell can have."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.asarray(colour) / 255]
        return np.dot(linear, (0.2126, 0.7152, 0.0722))

    for theme in ("light", "dark"):
        for name, signs in product(("viridis", "cividis"), (False, True)):
            colours = colour_map(FigureSpec(theme=theme, colours=name), Scale("", -1.0, 1.0, diverging=signs))(np.linspace(0, 1, 256))
            for colour, ink in zip(colours[:, :3] * 255, ink_on(colours), strict=True):
                low, high = sorted((luminance(colour), luminance(rgb(ink))))
                assert (high + 0.05) / (low + 0.05) >= 4.5


def test_many_cells_are_drawn_as_one_image():
    small, large = (ET.fromstring(draw(picture_of(1, n, n), FigureSpec(format="svg"))) for n in (13, 90))

    images = [len(root.findall(".//{http://www.w3.org/2000/svg}image")) for root in (small, large)]
    assert len(small.findall(".//{http://www.w3.org/2000/svg}g[@id='cells-1']/")) == 13 * 13
    assert images == [0, 1]  # the colour bar is of shapes: for an image of it, matplotlib clears a bitmap of the whole picture


def outputs_of_heads():
    """Two panels that share no axis, with names wider than small panels."""
    spec = FigureSpec("concatenation", 0, 5, 5, tuple(range(8)), title="x" * 300)
    tensors = {name: torch.from_numpy(RNG.standard_normal((1, 5, 64))) for name in ("concatenated", "output")}
    return compose(spec, tensors, {})


@pytest.mark.parametrize("wide", [None, 215, 300, 520, 1000])
@pytest.mark.parametrize("kind", ["words", "heads", "outputs", "one"])
def test_long_texts_stay_on_the_sheet_and_off_the_colour_bar(kind, wide):
    """Titles, tokens and names that are too long are wrapped or cut; the SVG has the whole text."""
    titles = {"words": "long title " * 40, "heads": "漢字" * 150, "one": "x" * 999}
    picture = (
        outputs_of_heads()
        if kind == "outputs"
        else {
            "words": lambda: picture_of(1, 13, 13, list(HOSTILE[:13]), titles["words"]),
            "heads": lambda: picture_of(7, 13, 13, None, titles["heads"]),
            "one": lambda: picture_of(1, 1, 1, ["a word that goes on and on"], titles["one"]),
        }[kind]()
    )

    plot, _, bar, labels = boxes_of(picture, FigureSpec(width=wide, values=False))

    for label in labels:
        left, bottom, right, top = label[2]
        assert left >= 0 and bottom >= 0 and right <= plot.width and top <= plot.height, label
        if label[0] == "heading":
            assert right <= bar[0], label
    assert 1 < len(plot.geometry.title) <= 3


def test_a_title_is_wrapped_between_words_and_within_a_long_word():
    assert wrapped("ab cdefgh i", 10.0, width("cdefgh", 10.0), 9) == ["ab", "cdefgh", "i"]
    assert "".join(wrapped("x" * 50, 12.0, 100.0, 99)) == "x" * 50
    assert wrapped("xy", 12.0, 1.0, 9) == ["x", "y"]
    assert all(width(line, 12.0) <= 100 for line in wrapped("漢字 and Wide letters " * 9, 12.0, 100.0, 99))
    first, second = wrapped("x" * 50, 12.0, 100.0, 2)
    assert set(first) == {"x"} and second.endswith("x…") and width(second, 12.0) <= 100


@pytest.mark.parametrize(("maximum", "logarithmic"), [(None, False), (0.5, False), (None, True), (0.5, True), (2.0, False)])
def test_similarity_has_the_requested_scale(maximum, logarithmic):
    spec = FigureSpec("similarity", 0, 3, 3, (0, 1), maximum=maximum, logarithmic=logarithmic)
    cosines = torch.tensor([[[1.0, 0.25], [0.25, 1.0]]], dtype=torch.float64)

    scale = compose(spec, {"cosine_similarity": cosines, OVERFLOWED: torch.tensor(False)}, {}).scale

    high = maximum or 1.0
    assert scale == Scale("cosine similarity", min(0.25, high / 10) if logarithmic else 0.0, high, logarithmic=logarithmic)


def test_long_words_are_cut_with_an_ellipsis():
    assert printable("ab" * 10**6) == "ab" * 500 + "…"
    shown = cut("x" * 200, 12.0, 100.0)
    assert shown == "x" * (len(shown) - 1) + "…" and width(shown, 12.0) <= 100 < width("x" + shown, 12.0)


@pytest.mark.parametrize("size", [1e-320, 1e-30, 1.0, 1e38, 1.7e308])
def test_numbers_of_any_size_are_drawn(size):
    spec = FigureSpec("concatenation", 0, 3, 3, (0, 1), format="html")
    values = torch.tensor([[[-1.0, 0.5], [0.25, 1.0], [0.0, -0.5]]], dtype=torch.float64) * size

    picture = compose(spec, {"concatenated": values}, {})

    assert draw(picture, spec).startswith(b"<!DOCTYPE html>")
    assert picture.scale.low == -picture.scale.high
    assert len(scale_labels(picture, spec)) >= 3


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_and_infinity_are_refused(wrong):
    with pytest.raises(InvalidRequest, match="finite numbers in concatenated"):
        compose(FigureSpec("concatenation"), {"concatenated": torch.full((1, 1, 2), wrong)}, {})
    weights = torch.tensor([[[[0.5, wrong]]]])
    made = Pooling(0, (1, 2), 1, 1)(iter([(slice(0, 1), weights, None)]))
    with pytest.raises(InvalidRequest, match="finite numbers to draw for head"):
        compose(FigureSpec("heads", keys=2), made, {})


def test_axis_numbers_are_round():
    for total, pooled, length in ((97, 1, 300), (900, 8, 240), (8192, 23, 700)):
        for ticks in (row_ticks, column_ticks):
            positions = [int(text) for text in ticks(Axis("key", total, pooled), length, 130.0).texts]
            steps = {b - a for a, b in pairwise(positions)}
            assert positions[0] == 0 and len(steps) == 1
            assert str(steps.pop()).rstrip("0") in ("1", "2", "5")


def scale_labels(picture, spec):
    """The numbers beside the colour bar."""
    root = ET.fromstring(draw(picture, replace(spec, format="svg")))
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text") if element.get("class") == "scale"]


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale("", 0.0, 0.36), ["0", "0.1", "0.2", "0.3", "0.36"]),
        (Scale("", 0.0, 0.9999), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Scale("", -4.0, 4.0, diverging=True), ["-4", "-2", "0", "2", "4"]),
        (Scale("", 2e-4, 1.0, logarithmic=True), ["0.001", "0.01", "0.1", "1"]),
    ],
)
def test_numbers_of_the_colour_bar_are_round_between_its_ends(scale, labels):
    axis = Axis("query", 3)
    picture = Picture("", (Panel("", axis, axis, np.eye(3)),), scale)

    assert scale_labels(picture, FigureSpec()) == labels


def test_a_logarithmic_scale_shows_small_weights_in_different_colours():
    axis = Axis("query", 2)
    picture = Picture("", (Panel("", axis, axis, np.array([[1e-3, 1e-2], [np.nan, 0.0]])),), Scale("", 1e-4, 1.0, logarithmic=True))

    root = ET.fromstring(draw(picture, FigureSpec(format="svg", values=False)))

    cells = [element.get("style").partition("fill: ")[2][:7] for element in root.find(".//*[@id='cells-1']")]
    assert len(set(cells)) == 4 and cells[2] == THEMES["light"]["blocked"]
    assert cells[3] == "#440154"  # the first colour: below the scale


@pytest.mark.parametrize("logarithmic", [False, True])
def test_each_head_may_have_a_scale_of_its_own(logarithmic):
    """Heads that differ by a factor have the same colours; their titles and numbers have the factor."""
    weights = np.array([[0.9, 0.02, np.nan], [0.3, 0.0, 0.6]])
    tensors = {"pooled": torch.from_numpy(np.stack([weights, weights / 7]))}
    spec = FigureSpec(heads=(3, 5), queries=2, keys=3, scale_per_head=True, logarithmic=logarithmic, format="svg", width=900)

    picture = compose(spec, tensors, {})
    root = ET.fromstring(draw(picture, spec))
    one, other = ([element.get("style") for element in root.find(f".//*[@id='cells-{i}']")] for i in (1, 2))
    shared = ET.fromstring(draw(compose(replace(spec, scale_per_head=False), tensors, {}), spec))

    assert one == other and len(set(one)) > 3
    assert [panel.title for panel in picture.panels] == ["head 3, up to 0.9", "head 5, up to 0.13"]
    assert (picture.scale.high, picture.scale.name) == (1.0, "share of the head's largest weight")
    np.testing.assert_array_equal(picture.panels[1].values, weights / 7)
    assert [element.get("style") for element in shared.find(".//*[@id='cells-2']")] != one


def test_numbers_that_do_not_fit_into_cells_are_refused():
    with pytest.raises(InvalidRequest, match="cells that numbers fit into"):
        draw(picture_of(1, 40, 40), FigureSpec(width=400, values=True))
    with pytest.raises(InvalidRequest, match="room for panels"):
        draw(picture_of(1, 5, 5, ["a rather long word indeed"] * 5), FigureSpec(width=160))


def test_the_pixels_of_a_png_are_limited():
    with pytest.raises(TooLarge, match="at most 33554432 pixels"):
        draw(picture_of(), FigureSpec(width=4096, dpi=384))


@pytest.mark.parametrize("file_format", ["png", "svg", "html"])
def test_drawing_stops_when_a_check_raises(file_format):
    """At each of its checks."""

    class Clock:
        looks, allowed = 0, 10**6

        def check(self):
            self.looks += 1
            if self.looks > self.allowed:
                raise DeadlinePassed

    whole = Clock()
    draw(picture_of(2), FigureSpec(format=file_format), whole.check)
    assert whole.looks >= 2
    for allowed in range(whole.looks):
        short = Clock()
        short.allowed = allowed
        with pytest.raises(DeadlinePassed):
            draw(picture_of(2), FigureSpec(format=file_format), short.check)


DETERMINISM = """
import sys
from hashlib import sha256
import matplotlib
matplotlib.rcParams.update({"svg.hashsalt": sys.argv[1], "font.size": float(sys.argv[2]), "lines.linewidth": float(sys.argv[2])})
from attend.heads.figures import FigureSpec, draw
from heads.figures import test_plot
test_plot.RNG.seed(3)
picture = test_plot.picture_of(2, 13, 13, test_plot.HOSTILE[:13])
settings = lambda: {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}  # which asking for would load
before = settings()
for file_format in ("png", "svg", "html"):
    print(sha256(draw(picture, FigureSpec(format=file_format))).hexdigest())
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""


def test_two_processes_draw_the_same_bytes():
    """With other settings of matplotlib in one of them, which are unchanged afterwards."""
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-c", DETERMINISM, "b", "19"]
    there = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tests)})

    assert there.stderr == ""
    RNG.seed(3)
    picture = picture_of(2, 13, 13, HOSTILE[:13])
    here = [sha256(draw(picture, FigureSpec(format=file_format))).hexdigest() for file_format in ("png", "svg", "html")]
    assert there.stdout.split() == here
