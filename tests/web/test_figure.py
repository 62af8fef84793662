"""POST /attend/figure as callers meet it: what comes back, what it is of, and what is refused."""

import json
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["The", "cat", "sat", "on", "mats"]
QUERY = np.random.RandomState(7).standard_normal((5, 4)).round(3).tolist()
BODY = {"layer": "same", "query": QUERY, "tokens": {"query": WORDS}}


def picture(http, figure, **fields):
    answer = http.post("/attend/figure", json={**BODY, **fields, "figure": figure})
    assert answer.status_code == 200, answer.text
    return answer


def parsed(answer):
    """The SVG's root, and the text of each role."""
    root = ET.fromstring(answer.content)
    texts = {}
    for element in root.iter(f"{SVG}text"):
        texts.setdefault(element.get("class"), []).append(element.text or "")
    return root, texts


def cells(root):
    """Of each panel, the colours of its cells."""
    return {
        group.get("aria-label"): [rect.get("fill") for rect in group]
        for group in root.iter(f"{SVG}g")
        if group.get("aria-label") != "colour bar"
    }


def test_heads_in_a_grid(http, layers):
    root, texts = parsed(picture(http, {"kind": "heads", "format": "svg"}))

    assert texts["title"] == ["Attention weights by head"]
    assert texts["heading"] == ["head 0", "head 1"]
    assert texts["row"] == WORDS
    assert texts["column"] == WORDS * 2
    assert texts["axis"] == ["query", "key", "key"]
    assert {name: len(colours) for name, colours in cells(root).items()} == {"head 0": 25, "head 1": 25}


def test_the_reply_says_where_it_comes_from(http, layers):
    answer = picture(http, {"format": "png", "title": "A picture"})

    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-request-id"]
    assert answer.headers["server-timing"].startswith("decode;dur=")
    fingerprint = layers["same"]["fingerprint"].encode()
    assert fingerprint in answer.content
    assert fingerprint in picture(http, {"format": "svg"}).content
    assert fingerprint in picture(http, {"format": "html"}).content


@pytest.mark.parametrize(
    ("accept", "form", "media"),
    [
        ("*/*", None, "image/png"),
        ("image/svg+xml", None, "image/svg+xml"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", None, "text/html"),
        ("image/png;q=0.1, image/svg+xml", None, "image/svg+xml"),
        ("application/json", "svg", "image/svg+xml"),
        ("text/html", "png", "image/png"),
    ],
)
def test_the_format_beats_accept(http, layers, accept, form, media):
    answer = http.post("/attend/figure", json={**BODY, "figure": {"format": form}}, headers={"Accept": accept})

    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == media


def test_nothing_acceptable_is_said(http, layers):
    answer = http.post("/attend/figure", json=BODY, headers={"Accept": "application/json"})

    assert answer.status_code == 406
    assert "image/png or image/svg+xml or text/html" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("figure", "at", "expected", "got"),
    [
        ({"kind": "head", "heads": [2]}, "/figure/heads/0", 'a head below 2 for layer "same"', "2"),
        ({"kind": "head", "heads": [0, 1]}, "/figure/heads", "one head for a picture of the kind head", "2"),
        ({"heads": [1, 1]}, "/figure/heads/1", "each head once", "1 twice"),
        ({"heads": []}, "/figure/heads", "at least 1 of them", "a list of 0"),
        ({"kind": "concatenation", "heads": [0]}, "/figure/heads", "null, since the concatenation is of all heads", "a list of 1"),
        ({"item": 1}, "/figure/item", "an item below 1", "1"),
        ({"kind": "pie"}, "/figure/kind", 'one of "heads", "head", "mean", "std", "similarity" or "concatenation"', '"pie"'),
        ({"colour": "red"}, "/figure/colour", "no field of that name", '"red"'),
        ({"dpi": 10000}, "/figure/dpi", "less than or equal to 384", "10000"),
        ({"width": 12}, "/figure/width", "greater than or equal to 160", "12"),
        ({"maximum": 0}, "/figure/maximum", "greater than 0", "0"),
        ({"width": 200, "values": True}, "/figure/values", None, None),
    ],
)
def test_what_is_refused_is_refused_with_its_place(http, layers, figure, at, expected, got):
    answer = http.post("/attend/figure", json={**BODY, "figure": figure})

    assert answer.status_code == 422
    problem = answer.json()["errors"][0]
    assert problem["at"] == at
    if expected:
        assert (problem["expected"], problem["got"]) == (expected, got)


def test_a_figure_is_refused_where_none_is_drawn(http, layers):
    answer = http.post("/attend", json={**BODY, "figure": {}})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == "/figure"


def test_the_pictures_values_are_the_weights(http, layers):
    """In the cells of the SVG, rounded; and all three formats come from one picture."""
    weights = http.post("/attend", json=BODY).json()["attention_weights"]
    _, texts = parsed(picture(http, {"format": "svg", "values": True}))

    assert texts["value"] == [f"{value:.2f}" for head in weights for row in head for value in row]
    assert texts["note"] == [f"Colour: attention weight, 0 to {np.max(weights):.3g}."]
    html = picture(http, {"format": "html", "values": True}).text
    assert json.loads(html.partition('id="data">')[2].partition("</script>")[0])["panels"][0]["rows"]["words"] == WORDS


def test_a_png_is_as_large_as_asked(http, layers, tmp_path):
    for width, dpi in ((400, 96), (400, 192), (1000, 48)):
        (tmp_path / "picture.png").write_bytes(picture(http, {"width": width, "dpi": dpi, "format": "png"}).content)
        assert imread(tmp_path / "picture.png").shape[1] == width * dpi // 96
