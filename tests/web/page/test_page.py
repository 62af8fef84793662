"""The page at GET / in a real browser: its controls, refusals, address and exports, by pointer and keyboard, on a screen and on a phone."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from support.browser import Visit
from support.page import WORDS, BeginVisit, Grid, numbers_beside, side, tip, weights_of
from support.server import Server

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"


def test_each_mask_control_changes_the_request_and_the_weights(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """Causal, window, lengths, single cells: the request of the page, and its tooltip."""
    visit = begin_visit()
    grid = Grid(visit, 10, 10)
    assert visit.request_sent_by(lambda: visit.page.check("#causal"))["causal"] is True
    grid.hover(2, 3)
    assert tip(visit)[0] == 0
    assert visit.request_sent_by(lambda: visit.page.fill("#left", "2"))["window"] == {"left": 2, "right": None}
    grid.hover(5, 2)
    assert tip(visit)[0] == 0
    assert visit.request_sent_by(lambda: visit.page.fill("#length", "4"))["valid_lens"] == 4
    grid.hover(4, 4)
    assert tip(visit)[0] == 0
    requested = visit.request_sent_by(lambda: visit.page.uncheck("#causal"))
    assert "causal" not in requested
    for field in ("#left", "#length"):
        requested = visit.request_sent_by(lambda field=field: visit.page.fill(field, ""))
    assert set(requested) == {"layer", "query", "tokens", "outputs", "reply"}

    visit.page.click("#block")
    requested = visit.request_sent_by(lambda: grid.click(8, 7))
    assert [(q, k) for q, row in enumerate(requested["block_mask"]) for k, one in enumerate(row) if one] == [(8, 7)]
    grid.hover(8, 7)
    assert tip(visit)[0] == 0 and weights_of(http, requested)[:, 8, 7].max() == 0
    assert visit.page.inner_text("#blocked") == "1 single cell blocked"
    visit.request_sent_by(lambda: grid.click(0, 1))
    assert visit.page.inner_text("#blocked") == "2 single cells blocked"
    visit.request_sent_by(lambda: grid.click(0, 1))
    assert "block_mask" not in visit.request_sent_by(lambda: visit.page.click("#unblock"))


def test_two_sentences_are_queries_and_keys(begin_visit: BeginVisit, http: httpx.Client, layers: None) -> None:
    """Cross-attention, on a layer whose keys and values have other widths than its queries."""
    visit = begin_visit("odd")
    visit.request_sent_by(lambda: visit.page.check("#cross"))
    requested = visit.request_sent_by(lambda: visit.page.fill("#keys", "one two three"))
    assert [requested[name]["shape"] for name in ("query", "key", "value")] == [[10, 6], [3, 5], [3, 7]]
    assert side(visit, "q").all_inner_texts() == WORDS and side(visit, "k").all_inner_texts() == ["one", "two", "three"]
    grid = Grid(visit, 10, 3)
    grid.hover(9, 1)
    assert tip(visit)[1] == "tired → two" and tip(visit)[0] == pytest.approx(weights_of(http, requested).mean(0)[9, 1], abs=6e-5)

    visit.refusal(lambda: visit.page.check("#causal"))
    refused = "Expected a query offset, such as 0 or end: causal needs it, since there are 10 queries and 3 keys."
    assert visit.page.inner_text("#offset-error") == refused
    assert visit.request_sent_by(lambda: visit.page.fill("#offset", "end"))["query_offset"] == "end"
    assert visit.page.locator("#offset-error").inner_text() == ""
    assert visit.request_sent_by(lambda: visit.page.uncheck("#cross"))["tokens"]["key"] == WORDS


def test_a_pasted_request_is_sent_and_shown(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """Its masks set the controls, its tokens label the axes, its batch items can be chosen; its `reply` and `outputs` are replaced."""
    rng = np.random.default_rng(5)
    query, key = rng.standard_normal((2, 3, 64)).round(3).tolist(), rng.standard_normal((2, 5, 64)).round(3).tolist()
    body = {
        "query": query,
        "key": key,
        "causal": True,
        "query_offset": 2,
        "valid_lens": [5, 4],
        "outputs": ["output"],
        "reply": {"decimals": 1},
    }
    body["tokens"] = {"query": [["a", "b", "c"], ["x", "y", "z"]]}
    visit = begin_visit()
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    requested = visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))
    weights = weights_of(http, {name: body[name] for name in body if name not in ("outputs", "reply")})

    assert visit.page.is_checked("#causal") and visit.page.input_value("#offset") == "2" and visit.page.is_disabled("#length")
    assert requested["valid_lens"] == [5, 4] and requested["outputs"] == ["attention_weights"]
    assert side(visit, "q").all_inner_texts() == ["a", "b", "c"] and side(visit, "k").all_inner_texts() == ["0", "1", "2", "3", "4"]
    visit.page.select_option("#item", "1")
    assert side(visit, "q").all_inner_texts() == ["x", "y", "z"]
    visit.page.locator("#heads [data-head=mean]").click()
    Grid(visit, 3, 5).hover(2, 3)
    assert tip(visit) == (pytest.approx(weights[1].mean(0)[2, 3], abs=6e-5), "z → 3")
    assert "causal" not in visit.request_sent_by(lambda: visit.page.uncheck("#causal"))
    visit.request_sent_by(lambda: visit.page.check("input[value=sentence]", force=True))
    assert side(visit, "q").all_inner_texts() == WORDS


def test_the_refusal_of_a_pasted_request_is_shown_below_it(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    valid = json.dumps({"query": [[0.5] * 64]})
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    for text, message in (
        ('{"query": [[1, 2], [3]]}', "at /query/1"),
        ('{"query": [[1,', "JSON"),
        ('{"query": [[1, 2]]}', "Expected 64 values per query"),
        ("[1]", "a JSON object"),
        ('{"query": {"shape": [0, 64], "datatype": "FP32", "data": []}}', "nothing to show"),
        ('{"query": [[0]], "mask": 1}', "since libraries disagree"),
    ):
        with visit.page.expect_response("**/attend"):
            visit.page.fill("#request", text)
        visit.page.locator("#result[aria-busy=false]").wait_for()
        assert message in visit.page.inner_text("#request-error")
        assert visit.page.get_attribute("#request", "aria-invalid") == "true"
        assert visit.page.get_attribute("#request", "aria-describedby") == "request-error"
        visit.request_sent_by(lambda: visit.page.fill("#request", valid))
        assert visit.page.inner_text("#request-error") == "" and visit.page.get_attribute("#request", "aria-invalid") is None


def test_a_refusal_is_shown_at_its_field(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    for field, value, place, message in (
        ("#left", "-3", "#window-error", "at least 0"),
        ("#length", "99", "#length-error", "at most 10 real keys, since there are no more"),
        ("#length", "few", "#length-error", "a whole number of real keys"),
        ("#offset", "soon", "#offset-error", "a whole number, or end, as the query offset"),
    ):
        visit.refusal(lambda field=field, value=value: visit.page.fill(field, value))
        assert message in visit.page.inner_text(place) and visit.page.get_attribute(field, "aria-invalid") == "true"
        visit.request_sent_by(lambda field=field: visit.page.fill(field, ""))
        assert visit.page.inner_text(place) == "" and visit.page.get_attribute(field, "aria-invalid") is None
    visit.refusal(lambda: visit.page.fill("#text", " "), "**/words")
    assert "at least one word" in visit.page.inner_text("#text-error")


def test_a_text_that_is_too_long_can_be_cut_to_what_fits(begin_visit: BeginVisit) -> None:
    """In either field. Punctuation marks count as words."""
    visit = begin_visit("small-layer-1")
    text = "Anna saw the cat, " * 14
    visit.refusal(lambda: visit.page.fill("#text", text), "**/words")
    assert "at most 63 words" in visit.page.inner_text("#text-error")
    requested = visit.request_sent_by(lambda: visit.page.get_by_role("button", name="Keep the first 63 words").click())
    assert len(requested["tokens"]["query"]) == 64 and requested["tokens"]["query"][-1] == "the"
    assert text.startswith(visit.page.input_value("#text")) and visit.page.inner_text("#text-error") == ""
    visit.request_sent_by(lambda: visit.page.fill("#offset", "0"))
    visit.request_sent_by(lambda: visit.page.check("#cross"))
    visit.refusal(lambda: visit.page.fill("#keys", text), "**/words")
    requested = visit.request_sent_by(lambda: visit.page.click("#keys-error button"))
    assert len(requested["tokens"]["key"]) == 64


def test_after_a_refusal_the_earlier_result_is_inert(begin_visit: BeginVisit) -> None:
    """It is greyed and inert without its summary, and the page says that there is a refusal, until the next reply."""
    visit = begin_visit()
    visit.page.click("[data-copy=json]")
    visit.refusal(lambda: visit.page.fill("#length", "99"))
    assert visit.page.locator("#shown[inert]").count() == 1 and visit.page.inner_text("#summary") == ""
    assert "beside its field" in visit.page.inner_text("#problem")
    visit.page.locator("#heads [data-head='2']").click(force=True)
    assert visit.page.inner_text("#matrix-title") == "Mean of 8 heads"

    visit.request_sent_by(lambda: visit.page.fill("#length", "4"))
    assert visit.page.locator("[inert]").count() == 0 and visit.page.locator("#problem").is_hidden()
    assert visit.page.locator("#code").is_hidden() and visit.page.inner_text("#export-status") == ""


@pytest.mark.parametrize("height", [720, 900])
def test_the_button_that_sends_is_in_view_at_once(begin_visit: BeginVisit, height: int) -> None:
    """Also on a low screen; on one of 900 pixels the form is there as a whole, and the place for files below it."""
    visit = begin_visit(viewport={"width": 1280, "height": height})
    for name in ("#go", "#upload summary") if height == 900 else ("#go",):
        box = visit.page.locator(name).bounding_box()
        assert box["y"] + box["height"] <= height


def test_a_click_on_an_example_sends_it(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    requested = visit.request_sent_by(lambda: visit.page.get_by_role("button", name="Trophy").click())
    assert visit.page.input_value("#text").startswith("The trophy") and requested["tokens"]["query"][:2] == ["The", "trophy"]


def test_fields_of_lengths_and_offsets_have_hints(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    for field, meaning in (("#length", "padding"), ("#offset", "where the first query stands among the keys")):
        described = visit.page.locator(field).get_attribute("aria-describedby")
        assert described and meaning in " ".join(visit.page.inner_text(f"#{name}") for name in described.split())


def test_the_address_restores_the_state(begin_visit: BeginVisit, layers: None) -> None:
    """A link in another tab shows the same, as does a reload; it contains only what differs from the page's initial state."""
    visit = begin_visit("wide")
    visit.request_sent_by(lambda: visit.page.goto(visit.url + "/#layer=wide"))
    assert visit.page.url.endswith("/#layer=wide")
    visit.request_sent_by(lambda: visit.page.fill("#text", "a dog & a bird"))
    visit.request_sent_by(lambda: visit.page.check("#causal"))
    visit.page.click("#block")
    visit.request_sent_by(lambda: Grid(visit, 5, 5).click(4, 1))
    visit.page.locator("#heads [data-head='3']").click()
    visit.page.locator("#heads input").nth(7).uncheck()
    visit.page.select_option("#scale", "row")
    side(visit, "q").nth(2).click()
    visit.page.click("[data-copy=link]")
    link = visit.page.input_value("#code")

    other = begin_visit()
    requested = other.request_sent_by(lambda: other.page.goto(link))
    for _ in range(2):
        assert requested["layer"] == "wide" and requested["causal"] is True and requested["block_mask"][4][1] == 1
        assert side(other, "q").all_inner_texts() == ["a", "dog", "&", "a", "bird"]
        assert other.page.inner_text("#matrix-title") == "Head 3" and other.page.input_value("#scale") == "row"
        assert other.page.locator("#heads input").nth(7).is_checked() is False
        assert side(other, "q").nth(2).get_attribute("aria-pressed") == "true"
        assert other.page.url == link
        requested = other.request_sent_by(lambda: other.page.reload())


def test_the_address_restores_a_pasted_request_and_its_masks(begin_visit: BeginVisit) -> None:
    """Masks that the controls cannot show stay unchanged in the request; one that the user cleared stays cleared."""
    body = {"query": np.eye(4, 64).reshape(2, 2, 64).tolist(), "valid_lens": [1, 2], "causal": True, "window": {"left": 1, "right": 0}}
    visit = begin_visit()
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))
    visit.request_sent_by(lambda: visit.page.uncheck("#causal"))
    visit.page.select_option("#item", "1")
    visit.page.locator("#heads [data-head=mean]").click()
    visit.page.uncheck("#heads input[aria-label='Head 1 on']")
    requested = visit.request_sent_by(lambda: visit.page.reload())
    assert requested["valid_lens"] == [1, 2] and requested["window"] == {"left": 1, "right": 0} and "causal" not in requested
    assert visit.page.input_value("#item") == "1" and visit.page.inner_text("#matrix-title") == "Mean of 7 heads"
    visit.request_sent_by(lambda: visit.page.goto(visit.url + "/#layer=default"))
    assert side(visit, "q").all_inner_texts() == visit.page.input_value("#text").split() and visit.page.is_enabled("#length")


def test_an_invalid_address_is_ignored(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    visit.request_sent_by(lambda: visit.page.goto(visit.url + "/#head=99&off=x&cell=7,a&blocked=1,b&item=5&layer=default&more=1"))
    assert visit.page.inner_text("#matrix-title") == "Mean of 8 heads" and visit.page.url.endswith("/#layer=default")


def test_a_server_that_does_not_answer_is_reported(browser: Any, start: Callable[..., Server]) -> None:
    server = start()
    visit = Visit(browser.new_page(), server.url).begin()
    server.stop()
    visit.page.click("#go")
    visit.page.locator("#problem").wait_for()
    assert "does not answer" in visit.page.inner_text("#problem")


def test_words_are_not_interpreted_as_html(begin_visit: BeginVisit) -> None:
    """In labels, tooltip, words, announcements, errors, names of layers, clipboard."""
    visit = begin_visit()
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    tokens = {"query": [HOSTILE, "<script>alert(2)</script>"]}
    body = {"query": np.eye(2, 64).tolist(), "tokens": tokens}
    visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))
    assert side(visit, "q").all_inner_texts() == tokens["query"]
    Grid(visit, 2, 2).hover(0, 1)
    assert tip(visit)[1] == f"{HOSTILE} → {tokens['query'][1]}"
    side(visit, "q").first.click()
    assert HOSTILE in visit.page.inner_text("#live")
    visit.refusal(lambda: visit.page.fill("#request", json.dumps({**body, HOSTILE: 1})))
    assert HOSTILE in visit.page.inner_text("#request-error")
    assert visit.page.locator("img").count() == 0 and visit.page.locator("main script").count() == 0


def test_copied_code_reproduces_the_shown_numbers(browser: Any, begin_visit: BeginVisit, http: httpx.Client) -> None:
    """The curl command in a shell, the program in an interpreter and the posted body give the same weights."""
    visit = begin_visit(permissions=["clipboard-read", "clipboard-write"])
    visit.page.evaluate("document.getElementById('special').checked = true")  # hidden without special tokens
    visit.request_sent_by(lambda: visit.page.fill("#text", "it's the cat's \"mat\" $HOME `x` \\n"))
    requested = visit.request_sent_by(lambda: visit.page.check("#causal"))
    copied = {}
    for kind in ("json", "curl", "python"):
        visit.page.click(f"[data-copy={kind}]")
        visit.page.locator("#export-status", has_text="Copied").wait_for()
        copied[kind] = visit.page.evaluate("navigator.clipboard.readText()")
        assert copied[kind] == visit.page.input_value("#code")
    weights = weights_of(http, requested)

    assert len(copied["curl"]) < 600 and len(copied["python"]) < 600
    np.testing.assert_array_equal(weights_of(http, json.loads(copied["json"])), weights)
    done = subprocess.run(["bash", "-c", copied["curl"]], capture_output=True, check=True)
    np.testing.assert_array_equal(np.array(json.loads(done.stdout)["attention_weights"]), weights)
    program = copied["python"] + "print(result.attention_weights.tolist(), query.tokens)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    shape, rest = done.stdout.split("\n", 1)
    assert shape == str(weights.shape) and rest.startswith(str(weights.astype(np.float32).tolist()))
    assert '"mat"' not in rest and "'\"', 'mat', '\"'" in rest


def test_pictures_are_downloaded_in_each_format(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    visit.page.locator("#heads [data-head='2']").click()
    formats = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}
    for kind, (file_format, start) in itertools.product(("heads", "shown"), formats.items()):
        visit.page.select_option("#kind", kind)
        with visit.page.expect_download() as caught, visit.page.expect_request("**/attend/figure") as request:
            visit.page.click(f"[data-figure={file_format}]")
        assert caught.value.suggested_filename == f"attention-{'head' if kind == 'shown' else 'heads'}.{file_format}"
        assert caught.value.path().read_bytes()[: len(start)].lower() == start.lower()
        assert request.value.post_data_json["figure"]["heads"] == ([2] if kind == "shown" else list(range(8)))


def test_the_refusal_of_a_picture_is_shown_beside_its_button(begin_visit: BeginVisit) -> None:
    """For example, of a layer that was removed meanwhile."""
    visit = begin_visit()
    visit.page.route("**/attend/figure", lambda route: route.continue_(post_data=route.request.post_data.replace('"default"', '"gone"', 1)))
    visit.refusal(lambda: visit.page.click("[data-figure=svg]"), "**/attend/figure")
    visit.page.locator("#export-error", has_text="Expected a loaded layer").wait_for()
    assert visit.page.inner_text("#export-status") == ""


def test_the_page_is_operable_by_keyboard(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """The cursor of the heat map announces its cell; letters lock a row or column and block a cell; words announce their links."""
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go"))).mean(0)
    keyboard, live = visit.page.keyboard, visit.page.locator("#live")
    visit.page.locator("#smaller").focus()
    keyboard.press("Tab")
    keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.id") == "matrix"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        keyboard.press(key)
    assert live.inner_text() == f"Mean of 8 heads: sat to cat, {weights[2, 1]:.4f}"
    keyboard.press("r")
    assert "Locked: sat attends to" in live.inner_text() and side(visit, "q").nth(2).get_attribute("aria-pressed") == "true"
    keyboard.press("c")
    assert side(visit, "k").nth(1).get_attribute("aria-pressed") == "true"
    keyboard.press("Escape")
    assert visit.page.locator("#words [aria-pressed=true]").count() == 0
    requested = visit.request_sent_by(lambda: keyboard.press("b"))
    assert requested["block_mask"][2][1] == 1
    keyboard.press("End")
    keyboard.press("PageDown")
    assert live.inner_text().startswith("Mean of 8 heads: tired to tired")

    side(visit, "q").first.focus()
    keyboard.press("Tab")
    strongest = WORDS[int(weights[1].argmax())]
    assert live.inner_text().startswith(f"cat attends to {strongest} {weights[1].max():.2f}")
    keyboard.press("Enter")
    assert side(visit, "q").nth(1).get_attribute("aria-pressed") == "true"
    visit.page.locator("#heads [data-head='4']").focus()
    keyboard.press("Enter")
    assert visit.page.inner_text("#matrix-title") == "Head 4"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_no_accessibility_violations(begin_visit: BeginVisit, layers: None, scheme: str, width: int) -> None:
    """In both colours, on a wide and a narrow screen, with all sections open, and then with a refusal."""
    from axe_playwright_python.sync_playwright import Axe

    visit = begin_visit("tiny-2", color_scheme=scheme, viewport={"width": width, "height": 844})
    assert visit.page.get_attribute("html", "data-theme") == scheme
    visit.page.uncheck("#heads input[aria-label='Head 1 on']")
    visit.page.locator("#heads [data-head='0']").click()
    visit.request_sent_by(lambda: visit.page.check("#cross"))
    Grid(visit, 10, 7).click(1, 2)
    visit.page.locator("#steps li", has_text="softmax").wait_for()
    for summary in visit.page.locator("summary").all():
        if summary.is_visible():
            summary.click()
    visit.page.locator("#change tbody tr").first.wait_for()
    visit.page.locator("#model canvas[width='196']").nth(2).wait_for()
    visit.page.click("[data-copy=curl]")
    shown = Axe().run(visit.page).response["violations"]
    visit.refusal(lambda: visit.page.fill("#length", "99"))
    refused = Axe().run(visit.page).response["violations"]
    for found in (shown, refused):
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []


def test_the_chosen_colours_are_kept_after_a_reload(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    visit.page.select_option("#theme", "dark")
    assert visit.page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    visit.page.reload()
    visit.page.locator("#result[aria-busy=false] #heads button").first.wait_for()
    assert visit.page.get_attribute("html", "data-theme") == "dark"


def test_the_page_fits_a_phone(begin_visit: BeginVisit) -> None:
    """Nothing is wider than the screen; a tap, of which the help speaks, shows a number and locks a word."""
    visit = begin_visit(viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    help_of_phones = visit.page.inner_text("#matrix-help")
    assert help_of_phones.startswith("Tap a cell") and not any(word in help_of_phones for word in ("Point", "Click", "Escape", "Keys"))
    matrix = visit.page.locator("#matrix canvas")
    matrix.scroll_into_view_if_needed()
    box = matrix.bounding_box()
    visit.page.touchscreen.tap(box["x"] + box["width"] - 5, box["y"] + box["height"] - 5)
    assert tip(visit)[1] == "tired → tired"
    side(visit, "q").nth(2).tap()
    assert any(numbers_beside(visit, "k"))
    visit.page.locator("#heads [data-head='1']").tap()
    assert visit.page.inner_text("#matrix-title") == "Head 1"

    table = visit.page.locator("#numbers .wide")
    assert "cut" in (table.get_attribute("class") or "") and visit.page.locator("#numbers .more").is_visible()
    table.evaluate("element => element.scrollTo(1e6, 0)")
    visit.page.locator("#numbers .more").wait_for(state="hidden")


def test_the_page_opens_with_a_telling_head_of_a_trained_model(browser: Any, server: Server, http: httpx.Client) -> None:
    """Causal as that model is. What it says of a head is measured on the words that are shown: an induction head of its own sentence rests
    on the first word of another one. Another layer gets back the page's own defaults."""
    visit = Visit(browser.new_page(), server.url)
    with visit.page.expect_response("**/attend") as caught:
        visit.open()
    visit.page.locator("#result[aria-busy=false] #heads button").first.wait_for()
    sent = caught.value.request.post_data_json
    assert sent["layer"] == "small-layer-1" and sent["causal"] is True and visit.page.is_checked("#causal")
    heads = (weights := weights_of(http, sent))[:, 1:, 1:]  # without <s>
    rows = [[head[i, : i + 1] / head[i, : i + 1].sum() for i in range(1, len(head))] for head in heads]
    telling = int(np.argmax([np.std([-row @ np.log(row) / np.log(len(row)) for row in of_head]) for of_head in rows]))
    assert visit.page.inner_text("#matrix-title") == f"Head {telling}" and "means nothing" not in visit.page.inner_text("#note")
    words = [word.lower() for word in sent["tokens"]["query"]]
    share = induction_share(words, weights[telling])
    visit.page.locator("#role", has_text=f"gives {share:.2f} of its weight to what followed it then").wait_for()
    assert share > 0.8

    body = visit.request_sent_by(lambda: visit.page.select_option("#layer", "default"))
    assert "causal" not in body and visit.page.inner_text("#matrix-title") == "Mean of 8 heads"
    visit.page.locator("#heads [data-head='1']").click()
    assert visit.page.inner_text("#role") == ""  # the vectors of that layer mean nothing

    visit.request_sent_by(lambda: visit.page.select_option("#layer", "small-layer-1"))
    other = visit.request_sent_by(lambda: visit.page.fill("#text", "Anna gave the book to Ben and Anna gave the book to Tom"))
    words, weights = [word.lower() for word in other["tokens"]["query"]], weights_of(http, other)
    assert 0.3 < induction_share(words, weights[1]) < 0.5 < weights[1, :, 0].mean()
    visit.page.locator("#role", has_text=f"Here a word gives the first word {weights[1, :, 0].mean():.2f} of its weight").wait_for()
    rows = [line.locator("td").all_inner_texts() for line in visit.page.locator("#numbers tbody tr").all()]
    shown = visit.page.locator("#numbers thead th").all_inner_texts().index("Next") - 1
    assert [float(row[shown]) for row in rows] == pytest.approx([induction_share(words, head) for head in weights], abs=0.0051)
    visit.end()


def induction_share(words: list[str], weights: Any) -> float:
    """The mean share of the weight [q, k] of a repeated word on what followed it earlier."""
    repeated = [q for q, word in enumerate(words) if word in words[:q]]
    return float(np.mean([sum(weights[q, k + 1] for k in range(q) if words[k] == words[q]) for q in repeated]))
