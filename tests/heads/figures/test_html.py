"""The HTML page of POST /attend/figure in a real browser, opened from a file, without a network."""

import json

import httpx
import numpy as np
import pytest

pytestmark = pytest.mark.browser
WORDS = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "$x_1$", "a\nb", "漢字", "\u202eevil", "😀"]
SHOWN = [*WORDS[:3], "a\\nb", "漢字", "\\u202eevil", "😀"]
HEADS = [0, 3, 5]
BODY = {
    "query": np.random.RandomState(3).standard_normal((7, 64)).round(3).tolist(),
    "causal": True,
    "block_mask": [[int(i == 4)] * 7 for i in range(7)],
    "tokens": {"query": WORDS},
}


@pytest.fixture(params=["light", "dark"])
def page(request, browser, http: httpx.Client, tmp_path):
    """The opened page of three heads. At the end, asserts that it logged no message and fetched only itself."""
    figure = {"format": "html", "heads": HEADS, "title": "<b>Heads</b> & more", "theme": request.param}
    answer = http.post("/attend/figure", json={**BODY, "figure": figure})
    assert answer.status_code == 200, answer.text
    file = tmp_path / "heads.html"
    file.write_bytes(answer.content)
    opened, complaints, fetched = browser.new_page(viewport={"width": 1250, "height": 900}), [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda request: fetched.append(request.url))
    opened.goto(file.as_uri())
    yield opened
    assert complaints == []
    assert [url for url in fetched if url != file.as_uri()] == []
    opened.close()


@pytest.fixture(scope="module")
def weights(http: httpx.Client):
    return np.array(http.post("/attend", json={**BODY, "outputs": ["attention_weights"]}).json()["attention_weights"])


def cell_centre(page, panel, row, column):
    """The position of a cell's middle on the screen."""
    x, y, width, high = json.loads(page.locator("#data").text_content())["panels"][panel]["place"]
    box = page.locator("#figure svg").bounding_box()
    scale = box["width"] / json.loads(page.locator("#data").text_content())["size"][0]
    return box["x"] + scale * (x + (column + 0.5) * width / 7), box["y"] + scale * (y + (row + 0.5) * high / 7)


def sentence(head, row, column, number):
    """The sentence below the picture about one cell."""
    return f"head {head}, query {row} “{SHOWN[row]}” → key {column} “{SHOWN[column]}”: {number}"


def tooltip(page):
    """The text beside the pointer: the cell, and its value."""
    return f"{page.locator('#tip span').inner_text()}: {page.locator('#tip strong').inner_text()}"


def test_tokens_are_escaped(page):
    assert page.locator("svg text.row").all_text_contents()[3] == "a\\nb"
    assert page.locator("svg text.title").inner_html() == "&lt;b&gt;Heads&lt;/b&gt; &amp; more"
    assert page.title() == "<b>Heads</b> & more"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.locator("svg text.row").first.locator("title").text_content() == WORDS[0]


def test_hovering_shows_the_value_and_the_tokens(page, weights):
    for panel, row, column in ((0, 0, 0), (1, 5, 2), (2, 6, 6), (2, 1, 0)):
        page.mouse.move(*cell_centre(page, panel, row, column))

        shown = tooltip(page)
        start, _, number = shown.rpartition(" ")
        assert start == sentence(HEADS[panel], row, column, "").rstrip()
        assert float(number) == pytest.approx(weights[HEADS[panel], row, column], rel=1e-3)
    page.mouse.move(*cell_centre(page, 0, 1, 5))
    assert tooltip(page) == sentence(0, 1, 5, "may not attend")
    page.mouse.move(*cell_centre(page, 0, 4, 1))
    assert tooltip(page) == sentence(0, 4, 1, "no key to attend to")
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()


def test_every_cell_is_reachable_by_keyboard(page, weights):
    value = page.locator("#value")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "figure"
    assert value.inner_text() == sentence(0, 0, 0, 1)
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "PageDown"):
        page.keyboard.press(key)
    assert value.inner_text().startswith(sentence(3, 2, 1, ""))
    assert float(value.inner_text().rpartition(" ")[2]) == pytest.approx(weights[3, 2, 1], rel=1e-3)
    page.keyboard.press("End")
    assert value.inner_text() == sentence(3, 2, 6, "may not attend")
    for key in ("PageDown", "PageDown", "Home", "ArrowLeft", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert value.inner_text() == sentence(5, 0, 0, 1)
    cursor, (x, y) = page.locator("#cursor").bounding_box(), cell_centre(page, 2, 0, 0)
    assert abs(cursor["x"] + cursor["width"] / 2 - x) < 2 and abs(cursor["y"] + cursor["height"] / 2 - y) < 2
    page.keyboard.press("Escape")
    assert page.locator("#cursor").is_hidden()


def test_a_tap_shows_the_value(browser, http: httpx.Client, tmp_path, weights):
    """Until another tap, also with the finger lifted; the help speaks of taps."""
    file = tmp_path / "heads.html"
    file.write_bytes(http.post("/attend/figure", json={**BODY, "figure": {"format": "html", "heads": HEADS}}).content)
    context = browser.new_context(viewport={"width": 700, "height": 900}, is_mobile=True, has_touch=True)
    phone = context.new_page()
    phone.goto(file.as_uri())
    assert phone.inner_text("#help") == "Tap a cell for its value."
    for panel, row, column in ((0, 0, 0), (1, 5, 2)):
        phone.touchscreen.tap(*cell_centre(phone, panel, row, column))
        start, _, number = tooltip(phone).rpartition(" ")
        assert start == sentence(HEADS[panel], row, column, "").rstrip()
        assert float(number) == pytest.approx(weights[HEADS[panel], row, column], rel=1e-3)
    context.close()


def test_on_a_phone_the_page_is_no_wider_than_the_screen(page):
    page.set_viewport_size({"width": 360, "height": 640})

    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#figure").evaluate("element => element.scrollTo(300, 0)")
    page.mouse.move(*cell_centre(page, 2, 1, 1))
    assert tooltip(page).startswith(sentence(5, 1, 1, ""))
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
