"""The views of the page in a real browser: heads, heat map, words, statistics, steps, output and model."""

import itertools
import json
import math
import re
from base64 import b64decode, b64encode
from typing import Any

import httpx
import numpy as np
import pytest

from attend.serving.words.small import SmallModel
from attend.wire.schemas.tokens import is_special
from support.browser import Visit
from support.page import WORDS, BeginVisit, Grid, numbers_beside, side, tip, weights_of

pytestmark = pytest.mark.browser


def test_the_shown_weights_are_those_of_the_service(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """Summary, words, and the strongest cell of every thumbnail, compared with the reply to the body that the page sent."""
    visit = begin_visit()
    requested = visit.request_sent_by(lambda: visit.page.fill("#text", "a dog saw one bird"))
    weights = weights_of(http, requested)

    assert requested["tokens"] == {"query": ["a", "dog", "saw", "one", "bird"]}
    assert "8 heads, 5 queries \N{MULTIPLICATION SIGN} 5 keys" in visit.page.inner_text("#summary")
    assert "means nothing" in visit.page.inner_text("#note")
    assert side(visit, "q").all_inner_texts() == side(visit, "k").all_inner_texts() == requested["tokens"]["query"]
    darkness = """canvas => { const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return Array.from({ length: data.length / 4 }, (_, i) => 765 - data[4 * i] - data[4 * i + 1] - data[4 * i + 2]); }"""
    pictures = [np.array(canvas.evaluate(darkness)) for canvas in visit.page.locator("#heads canvas").all()]
    assert len(pictures) == 9
    for picture, square in zip(pictures, [weights.mean(0), *weights], strict=True):
        assert picture.argmax() == square.argmax()


def test_pointing_at_a_cell_of_an_enlarged_head_shows_its_number(begin_visit: BeginVisit, http: httpx.Client) -> None:
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go")))
    grid = Grid(visit, 10, 10)
    for name, square in (("mean", weights.mean(0)), ("3", weights[3])):
        visit.page.locator(f"#heads [data-head='{name}']").click()
        for q, k in ((8, 7), (0, 0), (2, 9)):
            grid.hover(q, k)
            number, words = tip(visit)
            assert words == f"{WORDS[q]} → {WORDS[k]}" and number == pytest.approx(square[q, k], abs=6e-5)
    assert visit.page.inner_text("#matrix-title") == "Head 3"
    assert visit.page.locator("#heads [aria-pressed=true]").inner_text() == "Head 3"


def test_pointing_at_a_word_isolates_its_row_or_column_and_a_click_locks_it(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """From the words and from the heat map's labels; the lock stays when the pointer goes, and Escape ends it."""
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go")))[5]
    visit.page.locator("#heads [data-head='5']").click()

    side(visit, "q").nth(8).hover()
    assert numbers_beside(visit, "k") == pytest.approx(np.where(weights[8] >= 0.005, weights[8], 0), abs=0.0051)
    side(visit, "k").nth(2).hover()
    assert numbers_beside(visit, "q") == pytest.approx(np.where(weights[:, 2] >= 0.005, weights[:, 2], 0), abs=0.0051)
    visit.page.mouse.move(5, 5)
    assert not any(numbers_beside(visit, "q") + numbers_beside(visit, "k"))

    grid = Grid(visit, 10, 10)
    grid.hover(4, -0.9)  # the label of a row
    assert numbers_beside(visit, "k") == pytest.approx(np.where(weights[4] >= 0.005, weights[4], 0), abs=0.0051)
    grid.click(-0.7, 6)  # the label of a column
    visit.page.mouse.move(5, 5)
    assert numbers_beside(visit, "q") == pytest.approx(np.where(weights[:, 6] >= 0.005, weights[:, 6], 0), abs=0.0051)
    assert side(visit, "k").nth(6).get_attribute("aria-pressed") == "true"
    visit.page.keyboard.press("Escape")
    assert not any(numbers_beside(visit, "q"))

    side(visit, "q").nth(1).click()
    visit.page.mouse.move(5, 5)
    assert any(numbers_beside(visit, "k")) and side(visit, "q").nth(1).get_attribute("aria-pressed") == "true"
    side(visit, "q").nth(1).click()
    visit.page.mouse.move(5, 5)
    assert not any(numbers_beside(visit, "k"))


def test_heads_can_be_left_out_of_the_mean(begin_visit: BeginVisit, http: httpx.Client) -> None:
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go")))
    grid = Grid(visit, 10, 10)
    for head in (0, 1, 2, 3, 4, 6):
        visit.page.uncheck(f"#heads input[aria-label='Head {head} on']")
    grid.hover(8, 1)
    assert tip(visit)[0] == pytest.approx(weights[[5, 7]].mean(0)[8, 1], abs=6e-5)
    assert visit.page.inner_text("#matrix-title") == "Mean of 2 heads"
    visit.page.click("[data-copy=json]")
    assert json.loads(visit.page.input_value("#code"))["select"] == {"heads": [5, 7]}
    visit.page.click("#all")
    assert visit.page.inner_text("#matrix-title") == "Mean of 8 heads"


def test_switching_off_a_head_shows_the_change_of_the_output(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """The length of the difference, computed here from two replies; copied code has the head off, too."""
    visit = begin_visit()
    requested = visit.request_sent_by(lambda: visit.page.click("#go"))
    visit.request_sent_by(lambda: visit.page.uncheck("#heads input[aria-label='Head 2 on']"))
    visit.page.locator("#change tbody tr").nth(9).wait_for()
    body = {**requested, "outputs": ["output"], "reply": {"datatype": "FP64"}}
    whole, less = (
        np.array(http.post("/attend", json={**body, "head_scale": scale}).json()["output"]) for scale in ([1] * 8, [1, 1, 0, 1, 1, 1, 1, 1])
    )
    expected = 100 * np.linalg.norm(whole - less, axis=1) / np.linalg.norm(whole, axis=1)
    rows = [line.locator("th, td").all_inner_texts() for line in visit.page.locator("#change tbody tr").all()]
    assert [word for word, _ in rows] == WORDS
    assert [float(percent.split()[0]) for _, percent in rows] == pytest.approx(expected, abs=0.051)
    assert f"without head 2: {expected.mean():.1f} %" in visit.page.inner_text("#change [role=status]")
    visit.page.click("[data-copy=json]")
    assert json.loads(visit.page.input_value("#code"))["head_scale"] == [1, 1, 0, 1, 1, 1, 1, 1]
    visit.page.click("#all")
    assert visit.page.locator("#change").is_hidden()


def steps_of(visit: Visit) -> dict[str, str]:
    """Title and text of each step, without its formula."""
    visit.page.locator("#steps li").first.wait_for()
    return {
        step.locator("strong").inner_text(): " ".join(step.locator("> span").all_inner_texts())
        for step in visit.page.locator("#steps li").all()
    }


def formulas_of(visit: Visit) -> dict[str, str]:
    """Each step that has a formula, in order."""
    steps = visit.page.locator("#steps li").filter(has=visit.page.locator("> code"))
    return {step.locator("strong").inner_text(): step.locator("> code").inner_text() for step in steps.all()}


def table_of(visit: Visit, title: str) -> list[list[str]]:
    """The rows of the table of a step."""
    named = visit.page.get_by_text(title, exact=True)
    rows = visit.page.locator("#steps li").filter(has=visit.page.locator("strong").and_(named)).locator("tbody tr")
    return [row.locator("td").all_text_contents() for row in rows.all()]


def columns_of(visit: Visit, title: str) -> list[list[float]]:
    """The columns of numbers of the table of a step."""
    return [list(column) for column in zip(*[map(only, map(numbers_in, row)) for row in table_of(visit, title)], strict=True)]


def only(numbers: list[float]) -> float:
    [number] = numbers
    return number


def numbers_in(text: str) -> list[float]:
    return [
        float(number.replace("\N{MINUS SIGN}", "-")) for number in re.findall("\N{MINUS SIGN}?[0-9]+(?:[.][0-9]+)?(?:e[-+0-9]+)?", text)
    ]


@pytest.mark.parametrize("layer", ["default", "grouped"])
def test_a_locked_cell_shows_how_its_weight_is_computed(begin_visit: BeginVisit, http: httpx.Client, layers: None, layer: str) -> None:
    """By its layer's steps, with the service's projections and scores; `grouped` has fewer heads of keys, a soft cap, ALiBi and sinks."""
    visit = begin_visit(layer)
    requested = visit.request_sent_by(lambda: visit.page.click("#go"))
    outputs = ["query_projection", "key_projection", "value_projection", "scores", "log_sum_exp", "attention_weights", "output"]
    reply = http.post("/attend", json={**requested, "outputs": outputs, "reply": {"datatype": "FP64"}}).json()
    query, key, value, scores, totals, weights, output = (np.array(reply[name]) for name in outputs)
    visit.page.locator("#heads [data-head='3']").click()
    visit.request_sent_by(lambda: Grid(visit, 10, 10).click(8, 7))
    steps = steps_of(visit)
    assert formulas_of(visit) == http.get(f"/layers/{layer}").json()["steps"]
    assert list(steps) == ["inputs", *formulas_of(visit)]

    rows = np.frombuffer(b64decode(requested["query"]["base64"]), np.float32).reshape(10, -1)
    inputs, of_key = [rows[8], rows[7]], (3 * len(key) // len(query), 7)
    assert columns_of(visit, "inputs")[1:] == [pytest.approx(row, rel=1e-3, abs=1e-6) for row in inputs]
    for name, row in (("query", query[3, 8]), ("key", key[of_key]), ("value", value[of_key])):
        assert columns_of(visit, f"project_{name}")[1:] == [pytest.approx(row, rel=1e-3, abs=1e-6)]
    scale, dot, score = 1 / np.sqrt(query.shape[-1]), query[3, 8] @ key[of_key], scores[3, 8, 7]
    sum_of_others = np.log(np.exp(scores[3, 8]).sum())
    share = np.exp(score - sum_of_others)
    assert visit.page.inner_text("#steps h2") == f"Step by step: {WORDS[8]} → {WORDS[7]}"
    assert numbers_in(steps["scaled_products"]) == pytest.approx([scale, dot, scale * dot], rel=1e-3)
    assert numbers_in(steps["sum_exponentials"]) == pytest.approx([sum_of_others], rel=1e-3)
    assert numbers_in(steps["softmax"])[-1] == pytest.approx(share, rel=1e-3)
    if layer == "grouped":
        capped = 2 * np.tanh(scale * dot / 2)
        assert numbers_in(steps["softcap"])[-1] == pytest.approx(capped, rel=1e-3)
        slope = 2 ** (-8 * (3 + 1) / 4)
        assert numbers_in(steps["add_bias"]) == pytest.approx([capped, -slope, score], rel=1e-3)
        assert numbers_in(steps["sinks"]) == pytest.approx([share, weights[3, 8, 7] / share, weights[3, 8, 7]], rel=1e-3)
        assert numbers_in(steps["sum_with_sinks"]) == pytest.approx([totals[3, 8]], rel=1e-3)
    rows = table_of(visit, "softmax")
    assert [row[0] for row in rows] == WORDS
    assert [numbers_in(row[1])[0] for row in rows] == pytest.approx(scores[3, 8], rel=1e-3)
    assert [numbers_in(row[2])[0] for row in rows] == pytest.approx(np.exp(scores[3, 8] - sum_of_others), rel=1e-3)

    values = value[of_key[0]]
    weighted, added = weights[3, 8, 7] * values[7], weights[3, 8] @ values
    head_scale = [1.0] * len(weights)
    head_scale[3] = 0.0
    body = {**requested, "outputs": ["output"], "head_scale": head_scale, "reply": {"datatype": "FP64"}}
    without = np.array(http.post("/attend", json=body).json()["output"])
    assert columns_of(visit, "weighted_values")[3:] == [pytest.approx(row, rel=1e-3, abs=1e-6) for row in (weighted, added)]
    expected = [output[8] - without[8], output[8]]
    assert columns_of(visit, "output")[1:] == [pytest.approx(row, rel=1e-3, abs=1e-6) for row in expected]
    lengths = [np.linalg.norm(row) for row in reversed(expected)]
    assert numbers_in(steps["output"]) == pytest.approx(lengths, rel=1e-3)

    visit.request_sent_by(lambda: visit.page.check("#causal"))
    Grid(visit, 10, 10).click(2, 5)
    visit.page.locator("#steps li", has_text="a mask of the request keeps i from j").wait_for()
    assert numbers_in(steps_of(visit)["softmax"])[-1] == 0
    visit.page.keyboard.press("Escape")
    assert visit.page.locator("#steps").is_hidden()


@pytest.mark.parametrize("layer", ["negative", "rotated"])
def test_steps_without_numbers_of_their_own_are_shown_too(begin_visit: BeginVisit, http: httpx.Client, layers: None, layer: str) -> None:
    """Their formulas, and the weight after the last of them: differential attention has no scores, and talking heads mix them."""
    visit = begin_visit(layer)
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go")))
    visit.page.locator("#heads [data-head='1']").click()
    visit.request_sent_by(lambda: Grid(visit, 10, 10).click(8, 7))
    steps, formulas = steps_of(visit), formulas_of(visit)
    assert formulas == http.get(f"/layers/{layer}").json()["steps"]
    last = {"negative": "difference", "rotated": "mix_weights"}[layer]
    assert numbers_in(steps[last]) == pytest.approx([weights[1, 8, 7]], rel=1e-3)
    if layer == "rotated":
        assert {"norm_query", "rotate_key", "visible_intervals", "mix_scores", "apply_gate"} <= {*formulas}
        assert steps["mask"].startswith("j is visible to i")
        visit.page.keyboard.press("Escape")
        Grid(visit, 10, 10).click(8, 2)
        visit.page.locator("#steps li", has_text="the layer or the request keeps i from j").wait_for()
        assert numbers_in(steps_of(visit)["mix_weights"]) == [0]


def test_what_a_request_adds_to_the_steps_is_shown(begin_visit: BeginVisit, http: httpx.Client, layers: None) -> None:
    """A soft cap, a bias, dropout and factors of heads, with their numbers, since the layer has no such step."""
    rng = np.random.default_rng(6)
    query, bias = rng.standard_normal((3, 8)), rng.standard_normal((3, 3))
    added = {"softcap": 0.5, "bias": bias.tolist(), "dropout": {"p": 0.25, "seed": 2}, "head_scale": [1, 0.5]}
    body = {"layer": "tiny-2", "query": query.tolist(), **added}
    visit = begin_visit("tiny-2")
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))
    outputs = ["scores", "attention_weights", "head_outputs", "value_projection"]
    reply = http.post("/attend", json={**body, "outputs": outputs, "reply": {"datatype": "FP64"}}).json()
    scores, weights, heads = (np.array(reply[name]) for name in outputs[:3])
    q, k = next((q, k) for q, k in itertools.product(range(3), repeat=2) if weights[1, q, k])
    visit.page.locator("#heads [data-head='1']").click()
    visit.request_sent_by(lambda: Grid(visit, 3, 3).click(q, k))
    visit.page.locator("#steps li", has_text="head_scale").wait_for()

    capped = scores[1, q, k] - bias[q, k]
    assert numbers_in(steps_of(visit)["softcap"])[-1] == pytest.approx(capped, rel=1e-3)
    requested = visit.page.locator("#steps li").filter(has=visit.page.locator("strong", has_text="request")).locator("> span")
    bias_text, dropout_text, head_text = requested.all_inner_texts()
    assert numbers_in(bias_text) == pytest.approx([capped, bias[q, k], scores[1, q, k]], rel=1e-3)
    share = np.exp(scores[1, q, k]) / np.exp(scores[1, q]).sum()
    assert numbers_in(dropout_text.replace("1 \N{MINUS SIGN} ", "")) == pytest.approx([share, 0.25, share / 0.75], rel=1e-3)
    assert weights[1, q, k] == pytest.approx(share / 0.75)
    assert numbers_in(head_text) == pytest.approx([np.linalg.norm(heads[1, q])], rel=1e-3)


@pytest.mark.parametrize("form", ["lists", "flat", "FP32", "FP64", "FP16", "BF16"])
def test_steps_begin_with_the_rows_of_the_inputs_in_each_form(begin_visit: BeginVisit, layers: None, form: str) -> None:
    """Of the shown item of a batch; queries, keys and values of different widths."""
    widths = {"query": (3, 6), "key": (4, 5), "value": (4, 7)}
    inputs = {name: np.random.default_rng(i).standard_normal((2, *shape)) for i, (name, shape) in enumerate(widths.items())}
    if form == "BF16":
        inputs = {name: (rows.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for name, rows in inputs.items()}
    if form == "FP16":
        inputs = {name: rows.astype(np.float16) for name, rows in inputs.items()}

    def sent(rows: np.ndarray[Any, Any]) -> Any:
        if form == "lists":
            return rows.tolist()
        if form == "flat":
            return {"shape": rows.shape, "datatype": "FP64", "data": rows.ravel().tolist()}
        stored = {"FP32": rows.astype(np.float32), "FP64": rows, "FP16": rows, "BF16": rows.astype(np.float32).view(np.uint16)[..., 1::2]}[
            form
        ]
        return {"shape": rows.shape, "datatype": form, "base64": b64encode(stored.tobytes()).decode()}

    visit = begin_visit("odd")
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    body = {"layer": "odd", **{name: sent(rows) for name, rows in inputs.items()}}
    visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))
    visit.page.select_option("#item", "1")
    visit.page.locator("#heads [data-head='1']").click()
    Grid(visit, 3, 4).click(2, 1)
    visit.page.locator("#steps li", has_text="softmax").wait_for()
    assert list(steps_of(visit))[:4] == ["inputs", "project_query", "project_key", "project_value"]
    columns = list(itertools.zip_longest(*[row[1:] for row in table_of(visit, "inputs")]))
    expected = [inputs["query"][1, 2], inputs["key"][1, 1], inputs["value"][1, 1]]
    for column, row in zip(columns, expected, strict=True):
        assert [numbers_in(text)[0] for text in column if text] == pytest.approx(row, rel=1e-3)


def test_shown_results_follow_from_the_shown_numbers(begin_visit: BeginVisit) -> None:
    """Whoever multiplies the numbers of a step as they are shown, and rounds to the digits of the result, gets the shown result."""
    visit = begin_visit("default")
    visit.page.locator("#heads [data-head='5']").click()
    for q, k in ((0, 3), (4, 9), (7, 1)):
        Grid(visit, 10, 10).click(q, k)
        visit.page.locator("#steps h2", has_text=f"{WORDS[q]} → {WORDS[k]}").wait_for()
        visit.page.locator("#steps li", has_text="without this head").wait_for()
        steps = steps_of(visit)
        scale, dot, scaled = numbers_in(steps["scaled_products"])
        assert rounded(dot * scale) == scaled
        score, total, weight = numbers_in(steps["softmax"].replace(" \N{MINUS SIGN} ", " "))
        assert rounded(math.exp(score - total)) == weight
        for title in ("scaled_products", "weighted_values"):
            a, b, products = columns_of(visit, title)[1:4]
            digits = max(4, *(len(repr(abs(number)).partition("e")[0].replace(".", "").strip("0")) for number in products))
            assert len(products) == 8 and products == [rounded(x * y, digits) for x, y in zip(a, b, strict=True)]
            if title == "scaled_products":
                summary = visit.page.locator("#steps summary", has_text="whose sum is").inner_text()
                assert [8, rounded(sum(products))] == numbers_in(summary)
        visit.page.keyboard.press("Escape")


def rounded(value: float, digits: int = 4) -> float:
    """The value with so many significant digits."""
    return float(f"{value:.{digits}g}")


def test_a_cell_of_the_mean_links_to_its_heads(begin_visit: BeginVisit, http: httpx.Client) -> None:
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go")))
    Grid(visit, 10, 10).click(1, 2)
    assert numbers_in(steps_of(visit)["mean"])[1] == pytest.approx(weights[:, 1, 2].mean(), rel=1e-3)
    visit.page.get_by_role("button", name=f"Head 6: {float(f'{weights[6, 1, 2]:.4g}')}").click()
    assert visit.page.inner_text("#matrix-title") == "Head 6"
    visit.page.locator("#steps li", has_text="softmax").wait_for()


def test_all_layers_of_a_model_are_shown_in_one_view(begin_visit: BeginVisit, http: httpx.Client, layers: None) -> None:
    """Layers whose names differ in their last number; a click on a head opens it. `default` belongs to no model."""
    visit = begin_visit()
    assert visit.page.locator("#model").is_hidden()
    visit.request_sent_by(lambda: visit.page.select_option("#layer", "tiny-2"))
    visit.page.locator("#model summary").click()
    visit.page.locator("#model canvas[width='196']").nth(2).wait_for()
    visit.page.locator("#result[aria-busy=false]").wait_for()
    assert visit.page.locator("#model li").all_inner_texts() == ["tiny-0", "tiny-2", "tiny-10"]
    assert visit.page.locator("#model [aria-current=true]").inner_text() == "tiny-2"

    picture = visit.page.locator("#model canvas").nth(2)
    requested = visit.request_sent_by(lambda: picture.click(position={"x": picture.bounding_box()["width"] * 0.75, "y": 20}))
    assert requested["layer"] == "tiny-10" and visit.page.inner_text("#matrix-title") == "Head 1"
    darkness = """canvas => { const { data, width } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return [width, Array.from({ length: data.length / 4 }, (_, i) => 765 - data[4 * i] - data[4 * i + 1] - data[4 * i + 2])]; }"""
    visit.page.locator("#result[aria-busy=false]").wait_for()
    width, dark = picture.evaluate(darkness)
    heads = np.array(dark).reshape(-1, width)
    for square, tile in zip(weights_of(http, requested), (heads[:, :96], heads[:, 100:]), strict=True):
        q, k = np.unravel_index(square.argmax(), square.shape)
        assert tile[int((q + 0.5) * 9.6), int((k + 0.5) * 9.6)] == tile.max()


def test_colours_are_those_of_the_chosen_scale(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """The strengths of each scale, computed here; thumbnails and the numbers of the legend follow the choice, and so do pictures."""
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.fill("#left", "3")))[5]
    largest, smallest = weights.max(), weights[weights > 0].min()
    least = min(max(smallest, largest * 1e-5), largest / 10)
    logarithms = np.log(np.maximum(weights, least) / least) / np.log(largest / least)
    expected = {
        "head": weights / largest,
        "all": weights / 0.875,
        "row": weights / weights.max(1, keepdims=True),
        "one": weights,
        "log": np.where(weights > 0, np.maximum(logarithms, 1 / 512), 0),
    }
    strengths = """async ([data, scale]) => { const { Weights } = await import('/page/weights.js');
        const weights = new Weights(Float32Array.from(data), 10, 10, 0.875);
        return Array.from(data, (_, i) => weights.strengths(scale)(i)); }"""
    figures = {
        "head": {"scale_per_head": True},
        "all": {},
        "row": {"scale_per_head": True},
        "one": {"maximum": 1},
        "log": {"scale_per_head": True, "scale": "log"},
    }
    visit.page.locator("#heads [data-head='5']").click()
    pictures = set()
    for scale, figure in figures.items():
        visit.page.select_option("#scale", scale)
        found = visit.page.evaluate(strengths, [weights.ravel().tolist(), scale])
        np.testing.assert_allclose(np.reshape(found, (10, 10)), expected[scale], rtol=0, atol=1e-5)
        pictures.add(visit.page.locator("#heads [data-head='5'] canvas").evaluate("canvas => canvas.toDataURL()"))
        assert float(visit.page.inner_text("#least")) == pytest.approx(least if scale == "log" else 0, rel=0.05)
        with visit.page.expect_download(), visit.page.expect_request("**/attend/figure") as request:
            visit.page.click("[data-figure=svg]")
        sent = request.value.post_data_json["figure"]
        assert {name: sent[name] for name in sent if "scale" in name or name == "maximum"} == figure
        visit.page.locator("#export-status", has_text="Downloaded").wait_for()
        assert ("pictures have none for rows" in visit.page.inner_text("#export-status")) == (scale == "row")
    assert len(pictures) == 5


def test_the_map_of_effects_is_that_of_the_small_model(begin_visit: BeginVisit) -> None:
    """A click on a cell opens its head. There is none between two sentences, and of layers that are no model's."""
    visit = begin_visit("small-layer-1")
    text = "Anna gave the book to Ben and Anna gave the book to"
    visit.request_sent_by(lambda: visit.page.fill("#text", text))
    visit.page.locator("#model summary").click()
    visit.page.locator("#effects tbody tr").nth(1).wait_for()
    expected = SmallModel().effects(text)
    rows = [row.locator("td").all_inner_texts() for row in visit.page.locator("#effects tbody tr").all()]
    assert [[only(numbers_in(cell)) for cell in row] for row in rows] == pytest.approx(expected.change.round(2), abs=0.0051)
    assert f"“{expected.answer}”, with probability {expected.probability:.2f}" in visit.page.inner_text("#effects .hint")
    requested = visit.request_sent_by(lambda: visit.page.click("#effects [aria-label^='Head 3 of small-layer-0']"))
    assert requested["layer"] == "small-layer-0" and visit.page.inner_text("#matrix-title") == "Head 3"
    visit.request_sent_by(lambda: visit.page.fill("#offset", "0"))
    visit.request_sent_by(lambda: visit.page.check("#cross"))
    visit.page.locator("#result[aria-busy=false]").wait_for()
    assert visit.page.locator("#effects").is_hidden()


def test_the_table_has_the_statistics_of_the_service(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """Entropy, confidence and the strongest link, computed here from the weights; a click on a row opens its head."""
    visit = begin_visit()
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.click("#go")))
    rows = [line.locator("th, td").all_inner_texts() for line in visit.page.locator("#numbers tbody tr").all()]
    titles = visit.page.locator("#numbers thead th").all_inner_texts()
    assert titles[:3] == ["Head", "Entropy", "Confidence"] and titles[-1] == "Strongest link"
    assert [row[0] for row in rows] == [str(head) for head in range(8)]
    entropy = -(weights * np.log(weights)).sum(-1).mean(-1)
    assert [float(row[1]) for row in rows] == pytest.approx(entropy, abs=0.0051)
    assert [float(row[2]) for row in rows] == pytest.approx(weights.max(-1).mean(-1), abs=0.0051)
    for row, square in zip(rows, weights, strict=True):
        q, k = np.unravel_index(square.argmax(), square.shape)
        assert row[-1] == f"{WORDS[q]} → {WORDS[k]} {square.max():.2f}"
    visit.page.click("#numbers [aria-label='Head 6']")
    assert visit.page.inner_text("#matrix-title") == "Head 6" and visit.page.inner_text("#numbers .shown button") == "6"


def test_undefined_statistics_are_explained(begin_visit: BeginVisit) -> None:
    """With dropout the weights are shown, and the reason in place of statistics."""
    visit = begin_visit()
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    body = {"query": np.eye(3, 64).tolist(), "dropout": {"p": 0.5, "seed": 1}}
    visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))
    assert side(visit, "q").count() == 3 and visit.page.locator("#numbers tbody tr").count() == 0
    assert "Expected no dropout" in visit.page.inner_text("#numbers-error")


def test_a_switch_hides_special_tokens(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """In pictures, words and numbers. A cell blocked then is addressed by its place in the whole matrix."""
    visit = begin_visit()
    assert visit.page.locator("#special").is_hidden()
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    body = {"query": np.eye(4, 64).tolist(), "tokens": {"query": ["[CLS]", "a", "b", "[SEP]"]}}
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.fill("#request", json.dumps(body)))).mean(0)
    visit.page.locator("#heads [data-head=mean]").click()
    assert side(visit, "k").count() == 4
    assert visit.request_sent_by(lambda: visit.page.check("#special"))["tokens"]["omit"] == "special"
    assert side(visit, "q").all_inner_texts() == side(visit, "k").all_inner_texts() == ["a", "b"]
    assert visit.page.locator("#heads canvas").first.evaluate("canvas => [canvas.width, canvas.height]") == [2, 2]
    grid = Grid(visit, 2, 2)
    grid.hover(0, 1)
    assert tip(visit) == (pytest.approx(weights[1, 2], abs=6e-5), "a → b")
    visit.page.click("#block")
    requested = visit.request_sent_by(lambda: grid.click(0, 1))
    assert [(q, k) for q, row in enumerate(requested["block_mask"]) for k, one in enumerate(row) if one] == [(1, 2)]


def test_the_page_and_the_service_agree_on_special_tokens(begin_visit: BeginVisit) -> None:
    """The page recognises them itself, to show the switch."""
    tokens = ["[CLS]", "[sep]", "[MASK]", "<s>", "</s>", "<unk>", "<pad>", "<|im_end|>", "<\uff5cend\uff5c>", "<start_of_turn>", "<", "cat"]
    known = "async (tokens) => { const { isSpecial } = await import('/page/request.js'); return tokens.map(isSpecial); }"
    assert begin_visit().page.evaluate(known, tokens) == [is_special(token) for token in tokens]


def test_three_rows_of_32_heads_are_visible(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """On a screen of 1280 pixels."""
    assert http.put("/layers/many", json={"spec": {"d_model": 64, "num_heads": 32, "seed": 6}}).is_success
    visit = begin_visit("many", viewport={"width": 1280, "height": 900})
    sizes = "all => [all.scrollHeight, all.clientHeight, new Set([...all.children].map((one) => one.offsetTop)).size]"
    heads = visit.page.locator("#heads").evaluate(sizes)
    assert heads[0] == heads[1] and heads[2] == 3
    assert all(label.evaluate("one => one.scrollWidth <= one.clientWidth") for label in visit.page.locator("#heads button").all())
    http.delete("/layers/many")


def test_all_rows_of_the_output_are_visible_or_the_page_says_that_there_are_more(begin_visit: BeginVisit) -> None:
    """Of twenty words all; of more, one is cut in the middle, until the end is scrolled to."""
    visit = begin_visit(viewport={"width": 1280, "height": 900})
    visit.request_sent_by(lambda: visit.page.fill("#text", " ".join(WORDS * 2)))
    visit.page.uncheck("#heads input[aria-label='Head 2 on']")
    visit.page.locator("#change tbody tr").nth(19).wait_for()
    ends = """scroller => { const end = scroller.getBoundingClientRect().bottom;
        return Array.from(scroller.querySelectorAll('tr'), (line) => end - line.getBoundingClientRect().bottom); }"""
    table, more = visit.page.locator("#change .tall"), visit.page.locator("#change .more")
    assert min(table.evaluate(ends)) >= -1 and more.is_hidden()
    visit.request_sent_by(lambda: visit.page.fill("#text", " ".join(WORDS * 3)))
    visit.page.locator("#change tbody tr").nth(29).wait_for()
    more.wait_for()
    height = table.locator("tr").first.evaluate("row => row.offsetHeight")
    assert any(-0.75 * height < distance < -0.25 * height for distance in table.evaluate(ends))
    table.evaluate("scroller => scroller.scrollTo(0, 1e6)")
    more.wait_for(state="hidden")


def test_long_texts_have_a_logarithmic_scale_unless_another_is_chosen(begin_visit: BeginVisit) -> None:
    """On a linear one, each of many weights is as pale as none. The address keeps a choice alone."""
    visit = begin_visit()
    scale = visit.page.locator("#scale")
    for count, expected in ((64, "head"), (65, "log"), (10, "head")):
        visit.request_sent_by(lambda count=count: visit.page.fill("#text", " ".join(WORDS[i % 10] for i in range(count))))
        assert scale.input_value() == expected and "scale=" not in visit.page.url
    scale.select_option("row")
    visit.request_sent_by(lambda: visit.page.fill("#text", " ".join(WORDS * 7)))
    assert scale.input_value() == "row" and "scale=row" in visit.page.url
    visit.request_sent_by(lambda: visit.page.reload())
    assert scale.input_value() == "row"


def test_the_view_of_all_layers_uses_the_width(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """Rows of twelve heads are as wide as their panel, also after the window has become narrower."""
    for number in range(2):
        assert http.put(f"/layers/broad-{number}", json={"spec": {"d_model": 24, "num_heads": 12, "seed": number}}).is_success
    visit = begin_visit("broad-1")
    visit.page.locator("#model summary").click()
    for width in (1440, 1100):
        visit.page.set_viewport_size({"width": width, "height": 900})
        visit.page.wait_for_function(
            """() => { const [list, picture] = ['ol', 'canvas'].map((name) => document.querySelector(`#model ${name}`));
            return picture.width > 500 && picture.width <= list.clientWidth && picture.width > list.clientWidth - 40; }"""
        )
    for number in range(2):
        http.delete(f"/layers/broad-{number}")


def test_words_that_the_model_does_not_know_are_said(begin_visit: BeginVisit) -> None:
    """In either sentence, and in inputs that a model gave."""
    visit = begin_visit("small-layer-0")
    assert "does not know" not in visit.page.inner_text("#note")
    visit.refusal(lambda: visit.page.check("#cross"))
    assert "Expected a query offset, such as 0 or end: rope needs it" in visit.page.inner_text("#offset-error")
    visit.request_sent_by(lambda: visit.page.fill("#offset", "0"))
    visit.request_sent_by(lambda: visit.page.fill("#keys", "the quokka sat"))
    assert 'In the second sentence: It does not know "quokka"' in visit.page.inner_text("#note")
    visit.request_sent_by(lambda: visit.page.fill("#text", "the zebu sat"))
    assert 'It does not know "zebu"' in visit.page.inner_text("#note") and '"quokka"' in visit.page.inner_text("#note")


def test_the_strongest_link_is_of_a_word_that_sees_several(begin_visit: BeginVisit, http: httpx.Client) -> None:
    """The first word of a causal layer gives itself all its weight, whatever the head does."""
    visit = begin_visit()
    with visit.page.expect_response("**/attend/analysis"):
        weights = weights_of(http, visit.request_sent_by(lambda: visit.page.check("#causal")))
    assert np.all(weights[:, 0, 0] == 1)
    visit.page.wait_for_function("document.getElementById('numbers').inert === false")
    links = visit.page.locator("#numbers td.link").all_inner_texts()
    for link, square in zip(links, weights[:, 1:], strict=True):
        q, k = np.unravel_index(square.argmax(), square.shape)
        assert link == f"{WORDS[q + 1]} → {WORDS[k]} {square.max():.2f}"


def test_the_strongest_link_is_not_clipped(begin_visit: BeginVisit) -> None:
    visit = begin_visit(viewport={"width": 1280, "height": 900})
    visit.page.locator("#numbers tbody tr").first.wait_for()
    assert visit.page.locator("#numbers .wide").evaluate("element => element.scrollWidth <= element.clientWidth")
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 1280


def test_512_by_512_weights_of_12_heads_are_shown(begin_visit: BeginVisit, layers: None) -> None:
    """With all views of a short sentence. The milliseconds from reply to paint are printed (pytest -rP), not asserted."""
    visit = begin_visit("wide")
    words = [f"w{i}" for i in range(512)]
    visit.request_sent_by(lambda: visit.page.fill("#text", " ".join(words)))
    assert "12 heads, 512 queries \N{MULTIPLICATION SIGN} 512 keys" in visit.page.inner_text("#summary")
    assert side(visit, "k").count() == 512
    visit.page.wait_for_function("performance.getEntriesByName('attend:paint').length >= 2")
    paints = visit.page.evaluate("performance.getEntriesByName('attend:paint').map((entry) => entry.duration)")
    print(f"painted {paints[-1]:.0f} ms after the reply")
    visit.page.locator("#heads [data-head='11']").click()
    visit.page.locator("#matrix").scroll_into_view_if_needed()
    box = visit.page.locator("#matrix canvas").bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] - 1.5, box["y"] + box["height"] - 1.5)
    assert tip(visit)[1] == "w511 → w511"
    for _ in range(4):
        visit.page.click("#larger")
    visit.page.locator("#matrix").scroll_into_view_if_needed()
    visit.page.locator("#matrix").evaluate("element => element.scrollTo(1e6, 1e6)")
    box = visit.page.locator("#matrix canvas").bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)
    assert tip(visit)[1] == "w511 → w511"
    requested = visit.request_sent_by(lambda: (visit.page.locator("#matrix").focus(), visit.page.keyboard.press("b")))
    assert requested["block_mask"]["shape"] == [512, 512]


def test_a_layer_of_negative_weights_has_numbers_of_its_heads_without_their_weights(
    begin_visit: BeginVisit, http: httpx.Client, layers: None
) -> None:
    """The relative change of the output without each head, as the service has it for the request that the page sent."""
    visit = begin_visit("negative")
    with visit.page.expect_response("**/attend/analysis") as caught:
        visit.request_sent_by(lambda: visit.page.check("#causal"))
    expected = caught.value.json()["metrics"]["zero_ablation"]["relative_change"]
    table = visit.page.locator("#numbers table")
    assert table.locator("thead th").all_inner_texts() == ["Head", "Ablation"]
    assert [float(cell) for cell in table.locator("tbody td").all_inner_texts()] == pytest.approx(expected, abs=0.0051)
