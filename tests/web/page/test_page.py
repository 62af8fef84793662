"""The page at GET / in a real browser, through everything that people do with it. Each test ends with a look at the console: no error, no
breach of the policy, nothing fetched from elsewhere."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.browser import Visit
from support.server import Server

from service.client import Client

pytestmark = pytest.mark.browser
SENTENCE = "The cat sat on the mat because it was tired"
WORDS = SENTENCE.split()
HOSTILE = "<img src=x onerror=alert(1)>"
Visitor = Callable[..., Visit]


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Visitor]:
    """Opens the page; keywords are those of a browser's context. At the end, every visit is looked through for complaints."""
    visits: list[Visit] = []

    def begin(layer: str = "default", **context: Any) -> Visit:
        page = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **context}).new_page()
        page.set_default_timeout(20000)
        visits.append(Visit(page, server.url).begin(layer))
        return visits[-1]

    yield begin
    for one in visits:
        one.end()


@pytest.fixture(scope="session")
def layers(http: httpx.Client) -> Iterator[None]:
    """Layers of other shapes than `default`."""
    made = {
        "odd": {"d_model": 6, "num_heads": 2, "key_dim": 5, "value_dim": 7, "seed": 2},
        "wide": {"d_model": 48, "num_heads": 12, "seed": 3},
        "grouped": {"d_model": 16, "num_heads": 4, "num_kv_heads": 2, "softcap": 2.0, "alibi": True, "seed": 4},
        **{f"tiny-{number}": {"d_model": 8, "num_heads": 2, "seed": number} for number in (0, 2, 10)},
    }
    for name, spec in made.items():
        assert http.put(f"/layers/{name}", json={"spec": spec}).is_success
    yield
    for name in made:
        http.delete(f"/layers/{name}")


def weights_of(http: httpx.Client, body: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What the service answers to the request that the page sent, [heads, queries, keys]."""
    reply = http.post("/attend", json={**body, "outputs": ["attention_weights"]})
    assert reply.status_code == 200, reply.text
    return np.array(reply.json()["attention_weights"])


class Grid:
    """Where the cells of the heat map are on the screen: found by pointing, from the last cell to where the tooltip changes its words."""

    def __init__(self, visit: Visit, queries: int, keys: int) -> None:
        self.visit, self.queries, self.keys = visit, queries, keys
        visit.page.locator("#matrix").scroll_into_view_if_needed()
        box = visit.page.locator("#matrix canvas").bounding_box()
        self.right, self.bottom = box["x"] + box["width"] - 1, box["y"] + box["height"] - 1
        self.size = 2
        visit.page.mouse.move(self.right - 2, self.bottom - 2)
        _, last = tip(visit)
        while tip(visit)[1] == last:
            self.size += 1
            visit.page.mouse.move(self.right - self.size, self.bottom - 2)

    def at(self, q: float, k: float) -> tuple[float, float]:
        return self.right - (self.keys - k - 0.5) * self.size, self.bottom - (self.queries - q - 0.5) * self.size

    def hover(self, q: float, k: float) -> None:
        self.visit.page.mouse.move(*self.at(q, k))

    def click(self, q: float, k: float) -> None:
        self.visit.page.mouse.click(*self.at(q, k))


def tip(visit: Visit) -> tuple[float, str]:
    """The tooltip: number and words."""
    box = visit.page.locator("#tip")
    box.wait_for()
    return float(box.locator("strong").inner_text()), box.locator("span").inner_text()


def side(visit: Visit, axis: str) -> Any:
    """The words on one side: "q" or "k"."""
    return visit.page.locator(f"#words ul[data-axis={axis}] button")


def numbers_beside(visit: Visit, axis: str) -> list[float]:
    """The weights written beside the words of one side; 0 where none is."""
    return [float(weight or 0) for weight in side(visit, axis).evaluate_all("all => all.map((one) => one.dataset.weight)")]


def test_a_sentence_is_shown_as_the_service_answers(visit: Visitor, http: httpx.Client) -> None:
    """Summary, words, and every thumbnail's strongest cell, against the reply to the very body that the page sent."""
    page = visit()
    asked = page.asking(lambda: page.page.fill("#text", "a dog saw one bird"))
    weights = weights_of(http, asked)

    assert asked["tokens"] == {"query": ["a", "dog", "saw", "one", "bird"]}
    assert "8 heads, 5 queries \N{MULTIPLICATION SIGN} 5 keys" in page.page.inner_text("#summary")
    assert "means nothing" in page.page.inner_text("#note")
    assert side(page, "q").all_inner_texts() == side(page, "k").all_inner_texts() == asked["tokens"]["query"]
    darkness = """canvas => { const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return Array.from({ length: data.length / 4 }, (_, i) => 765 - data[4 * i] - data[4 * i + 1] - data[4 * i + 2]); }"""
    pictures = [np.array(canvas.evaluate(darkness)) for canvas in page.page.locator("#heads canvas").all()]
    assert len(pictures) == 9
    for picture, square in zip(pictures, [weights.mean(0), *weights], strict=True):
        assert picture.argmax() == square.argmax()


def test_a_head_is_enlarged_and_its_numbers_are_under_the_pointer(visit: Visitor, http: httpx.Client) -> None:
    page = visit()
    weights = weights_of(http, page.asking(lambda: page.page.click("#go")))
    grid = Grid(page, 10, 10)
    for name, square in (("mean", weights.mean(0)), ("3", weights[3])):
        page.page.locator(f"#heads [data-head='{name}']").click()
        for q, k in ((8, 7), (0, 0), (2, 9)):
            grid.hover(q, k)
            number, words = tip(page)
            assert words == f"{WORDS[q]} → {WORDS[k]}" and number == pytest.approx(square[q, k], abs=6e-5)
    assert page.page.inner_text("#matrix-title") == "Head 3"
    assert page.page.locator("#heads [aria-pressed=true]").inner_text() == "Head 3"


def test_a_word_isolates_its_row_or_its_column_and_a_click_locks_it(visit: Visitor, http: httpx.Client) -> None:
    """From the words and from the heat map's labels; the lock stays when the pointer goes, and Escape ends it."""
    page = visit()
    weights = weights_of(http, page.asking(lambda: page.page.click("#go")))[5]
    page.page.locator("#heads [data-head='5']").click()

    side(page, "q").nth(8).hover()
    assert numbers_beside(page, "k") == pytest.approx(np.where(weights[8] >= 0.005, weights[8], 0), abs=0.0051)
    side(page, "k").nth(2).hover()
    assert numbers_beside(page, "q") == pytest.approx(np.where(weights[:, 2] >= 0.005, weights[:, 2], 0), abs=0.0051)
    page.page.mouse.move(5, 5)
    assert not any(numbers_beside(page, "q") + numbers_beside(page, "k"))

    grid = Grid(page, 10, 10)
    grid.hover(4, -0.9)  # the label of a row
    assert numbers_beside(page, "k") == pytest.approx(np.where(weights[4] >= 0.005, weights[4], 0), abs=0.0051)
    grid.click(-0.7, 6)  # the label of a column
    page.page.mouse.move(5, 5)
    assert numbers_beside(page, "q") == pytest.approx(np.where(weights[:, 6] >= 0.005, weights[:, 6], 0), abs=0.0051)
    assert side(page, "k").nth(6).get_attribute("aria-pressed") == "true"
    page.page.keyboard.press("Escape")
    assert not any(numbers_beside(page, "q"))

    side(page, "q").nth(1).click()
    page.page.mouse.move(5, 5)
    assert any(numbers_beside(page, "k")) and side(page, "q").nth(1).get_attribute("aria-pressed") == "true"
    side(page, "q").nth(1).click()
    page.page.mouse.move(5, 5)
    assert not any(numbers_beside(page, "k"))


def test_heads_are_taken_out_of_the_mean(visit: Visitor, http: httpx.Client) -> None:
    page = visit()
    weights = weights_of(http, page.asking(lambda: page.page.click("#go")))
    grid = Grid(page, 10, 10)
    for head in (0, 1, 2, 3, 4, 6):
        page.page.uncheck(f"#heads input[aria-label='Head {head} on']")
    grid.hover(8, 1)
    assert tip(page)[0] == pytest.approx(weights[[5, 7]].mean(0)[8, 1], abs=6e-5)
    assert page.page.inner_text("#matrix-title") == "Mean of 2 heads"
    page.page.click("[data-copy=json]")
    assert json.loads(page.page.input_value("#code"))["select"] == {"heads": [5, 7]}
    page.page.click("#all")
    assert page.page.inner_text("#matrix-title") == "Mean of 8 heads"


def test_the_output_changes_where_a_head_is_switched_off(visit: Visitor, http: httpx.Client) -> None:
    """By the length of the difference, computed here from two replies; what is copied has the head off, too."""
    page = visit()
    asked = page.asking(lambda: page.page.click("#go"))
    page.asking(lambda: page.page.uncheck("#heads input[aria-label='Head 2 on']"))
    page.page.locator("#change tbody tr").nth(9).wait_for()
    body = {**asked, "outputs": ["output"], "reply": {"datatype": "FP64"}}
    whole, less = (
        np.array(http.post("/attend", json={**body, "head_scale": scale}).json()["output"]) for scale in ([1] * 8, [1, 1, 0, 1, 1, 1, 1, 1])
    )
    expected = 100 * np.linalg.norm(whole - less, axis=1) / np.linalg.norm(whole, axis=1)
    rows = [line.locator("th, td").all_inner_texts() for line in page.page.locator("#change tbody tr").all()]
    assert [word for word, _ in rows] == WORDS
    assert [float(percent.split()[0]) for _, percent in rows] == pytest.approx(expected, abs=0.051)
    assert f"without head 2: {expected.mean():.1f} %" in page.page.inner_text("#change [role=status]")
    page.page.click("[data-copy=json]")
    assert json.loads(page.page.input_value("#code"))["head_scale"] == [1, 1, 0, 1, 1, 1, 1, 1]
    page.page.click("#all")
    assert page.page.locator("#change").is_hidden()


def steps_of(visit: Visit) -> dict[str, str]:
    """Title and text of each step."""
    visit.page.locator("#steps li").first.wait_for()
    return {step.locator("strong").inner_text(): step.locator("> span").inner_text() for step in visit.page.locator("#steps li").all()}


def numbers_in(text: str) -> list[float]:
    return [
        float(number.replace("\N{MINUS SIGN}", "-")) for number in re.findall("\N{MINUS SIGN}?[0-9]+(?:[.][0-9]+)?(?:e[-+0-9]+)?", text)
    ]


@pytest.mark.parametrize("layer", ["default", "grouped"])
def test_a_cell_is_computed_step_by_step(visit: Visitor, http: httpx.Client, layers: None, layer: str) -> None:
    """With the service's own projections and scores; `grouped` has fewer heads of keys, a soft cap and ALiBi."""
    page = visit(layer)
    asked = page.asking(lambda: page.page.click("#go"))
    outputs = ["query_projection", "key_projection", "scores", "attention_weights"]
    reply = http.post("/attend", json={**asked, "outputs": outputs, "reply": {"datatype": "FP64"}}).json()
    query, key, scores, weights = (np.array(reply[name]) for name in outputs)
    page.page.locator("#heads [data-head='3']").click()
    page.asking(lambda: Grid(page, 10, 10).click(8, 7))
    steps = steps_of(page)

    dot = query[3, 8] @ key[3 * len(key) // len(query), 7]
    assert page.page.inner_text("#steps h2") == f"Step by step: {WORDS[8]} → {WORDS[7]}"
    assert numbers_in(steps["Query · key"]) == pytest.approx([dot], rel=1e-3)
    assert numbers_in(steps["Scale"])[-1] == pytest.approx(dot / np.sqrt(query.shape[-1]), rel=1e-3)
    assert ("Soft cap" in steps and "Bias" in steps) == (layer == "grouped")
    assert numbers_in(steps["Mask"]) == pytest.approx([scores[3, 8, 7]], rel=1e-3)
    assert numbers_in(steps["Softmax"])[-1] == pytest.approx(weights[3, 8, 7], rel=1e-3)
    page.page.locator("#steps summary").last.click()
    rows = [line.locator("td").all_inner_texts() for line in page.page.locator("#steps tbody").last.locator("tr").all()]
    assert [row[0] for row in rows] == WORDS and [numbers_in(row[2])[0] for row in rows] == pytest.approx(weights[3, 8], rel=1e-3)

    page.asking(lambda: page.page.check("#causal"))
    Grid(page, 10, 10).click(2, 5)
    page.page.locator("#steps li", has_text="A mask keeps").wait_for()
    assert numbers_in(steps_of(page)["Softmax"])[-1] == 0
    page.page.keyboard.press("Escape")
    assert page.page.locator("#steps").is_hidden()


def test_a_cell_of_the_mean_leads_to_its_heads(visit: Visitor, http: httpx.Client) -> None:
    page = visit()
    weights = weights_of(http, page.asking(lambda: page.page.click("#go")))
    Grid(page, 10, 10).click(1, 2)
    assert numbers_in(steps_of(page)["Mean"])[1] == pytest.approx(weights[:, 1, 2].mean(), rel=1e-3)
    page.page.get_by_role("button", name=f"Head 6: {float(f'{weights[6, 1, 2]:.4g}')}").click()
    assert page.page.inner_text("#matrix-title") == "Head 6"
    page.page.locator("#steps li", has_text="Softmax").wait_for()


def test_all_layers_of_a_model_in_one_view(visit: Visitor, http: httpx.Client, layers: None) -> None:
    """Layers whose names differ in their last number; a click on a head leads to it. `default` belongs to none."""
    page = visit()
    assert page.page.locator("#model").is_hidden()
    page.asking(lambda: page.page.select_option("#layer", "tiny-2"))
    page.page.locator("#model summary").click()
    page.page.locator("#model canvas[width='100']").nth(2).wait_for()
    page.page.locator("#result[aria-busy=false]").wait_for()
    assert page.page.locator("#model li").all_inner_texts() == ["tiny-0", "tiny-2", "tiny-10"]
    assert page.page.locator("#model [aria-current=true]").inner_text() == "tiny-2"

    picture = page.page.locator("#model canvas").nth(2)
    asked = page.asking(lambda: picture.click(position={"x": picture.bounding_box()["width"] * 0.75, "y": 20}))
    assert asked["layer"] == "tiny-10" and page.page.inner_text("#matrix-title") == "Head 1"
    darkness = """canvas => { const { data, width } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return [width, Array.from({ length: data.length / 4 }, (_, i) => 765 - data[4 * i] - data[4 * i + 1] - data[4 * i + 2])]; }"""
    page.page.locator("#result[aria-busy=false]").wait_for()
    width, dark = picture.evaluate(darkness)
    heads = np.array(dark).reshape(-1, width)
    for square, tile in zip(weights_of(http, asked), (heads[:, :48], heads[:, 52:]), strict=True):
        q, k = np.unravel_index(square.argmax(), square.shape)
        assert tile[int((q + 0.5) * 4.8), int((k + 0.5) * 4.8)] == tile.max()


def bert(folder: Path) -> Path:
    """A folder with a tiny BERT of two layers, as `save_pretrained` writes it."""
    rng = np.random.default_rng(7)
    tensors = {}
    for layer in range(2):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            tensors[f"encoder.layer.{layer}.attention.{name}.weight"] = rng.standard_normal((8, 8)).astype(np.float32)
            tensors[f"encoder.layer.{layer}.attention.{name}.bias"] = rng.standard_normal(8).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "bert",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "position_embedding_type": "absolute",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("way", ["chosen", "dropped"])
def test_the_layers_of_a_models_folder_are_added(visit: Visitor, http: httpx.Client, tmp_path: Path, way: str) -> None:
    """All of them, as the service reads them from the folder itself; then they are shown as one model."""
    folder = bert(tmp_path / f"bert {way}")
    page = visit()
    if way == "chosen":
        page.page.set_input_files("#folder", folder)
    else:
        drop(page, folder)
    page.page.locator("#upload-parts").wait_for()
    assert page.page.input_value("#upload-name") == f"bert-{way}"
    asked = page.asking(lambda: page.page.click("#upload-parts .main"))
    assert asked["layer"] == f"bert-{way}-0" and page.page.inner_text("#upload-status") == f"Added bert-{way}-0 to bert-{way}-1"
    assert page.page.locator("#model li").all_text_contents() == [f"bert-{way}-0", f"bert-{way}-1"]
    with Client(str(http.base_url)) as client:
        for number in range(2):
            assert client.put_layer_from("other", folder, layer=number).fingerprint == client.layer(f"bert-{way}-{number}").fingerprint
            client.delete_layer(f"bert-{way}-{number}")
        client.delete_layer("other")


def drop(page: Visit, path: Path) -> None:
    """Drops a file or folder on the page, as a file manager does."""
    session = page.page.context.new_cdp_session(page.page)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": data})


def test_a_layer_file_is_added_or_refused(visit: Visitor, http: httpx.Client, tmp_path: Path) -> None:
    """What is missing is given in the form; what is no safetensors file is refused by name."""
    file = bert(tmp_path / "bert") / "model.safetensors"
    page = visit()
    drop(page, file)
    page.page.locator("#upload-parts").wait_for()
    page.page.fill("#upload-name", "dropped")
    page.refusal(lambda: page.page.click("#upload-parts .main"), "**/layers/dropped")
    page.page.locator("#upload-error", has_text="Expected").wait_for()
    page.page.fill("#upload-prefix", "encoder.layer.1")
    page.page.fill("#upload-spec", '{"num_heads": 2}')
    assert page.asking(lambda: page.page.click("#upload-parts .main"))["layer"] == "dropped"
    assert page.page.locator("#upload-error").inner_text() == ""
    http.delete("/layers/dropped")

    (tmp_path / "bert" / "notes.txt").write_text("no tensors")
    page.page.set_input_files("#file", tmp_path / "bert" / "notes.txt")
    page.page.locator("#upload-error", has_text="got notes.txt").wait_for()


def test_statistics_stand_beside(visit: Visitor, http: httpx.Client) -> None:
    """Entropy, confidence and the strongest link, worked out here from the weights; a head's row leads to its picture."""
    page = visit()
    weights = weights_of(http, page.asking(lambda: page.page.click("#go")))
    rows = [line.locator("th, td").all_inner_texts() for line in page.page.locator("#numbers tbody tr").all()]
    titles = page.page.locator("#numbers thead th").all_inner_texts()
    assert titles[:3] == ["Head", "Entropy", "Confidence"] and titles[-1] == "Strongest link"
    assert [row[0] for row in rows] == [str(head) for head in range(8)]
    entropy = -(weights * np.log(weights)).sum(-1).mean(-1)
    assert [float(row[1]) for row in rows] == pytest.approx(entropy, abs=0.0051)
    assert [float(row[2]) for row in rows] == pytest.approx(weights.max(-1).mean(-1), abs=0.0051)
    for row, square in zip(rows, weights, strict=True):
        q, k = np.unravel_index(square.argmax(), square.shape)
        assert row[-1] == f"{WORDS[q]} → {WORDS[k]} {square.max():.2f}"
    page.page.click("#numbers [aria-label='Head 6']")
    assert page.page.inner_text("#matrix-title") == "Head 6" and page.page.inner_text("#numbers .shown button") == "6"


def test_statistics_that_are_not_defined_say_why(visit: Visitor) -> None:
    """Of a request with dropout the weights are shown, and in place of its statistics the reason."""
    page = visit()
    page.asking(lambda: page.page.check("input[value=request]", force=True))
    body = {"query": np.eye(3, 64).tolist(), "dropout": {"p": 0.5, "seed": 1}}
    page.asking(lambda: page.page.fill("#request", json.dumps(body)))
    assert side(page, "q").count() == 3 and page.page.locator("#numbers tbody tr").count() == 0
    assert "Expected no dropout" in page.page.inner_text("#numbers-error")


def test_masks_of_every_kind(visit: Visitor, http: httpx.Client) -> None:
    """Causal, window, lengths, single cells: what the page asks, and what its tooltip then says."""
    page = visit()
    grid = Grid(page, 10, 10)
    assert page.asking(lambda: page.page.check("#causal"))["causal"] is True
    grid.hover(2, 3)
    assert tip(page)[0] == 0
    assert page.asking(lambda: page.page.fill("#left", "2"))["window"] == {"left": 2, "right": None}
    grid.hover(5, 2)
    assert tip(page)[0] == 0
    assert page.asking(lambda: page.page.fill("#length", "4"))["valid_lens"] == 4
    grid.hover(4, 4)
    assert tip(page)[0] == 0
    asked = page.asking(lambda: page.page.uncheck("#causal"))
    assert "causal" not in asked
    for field in ("#left", "#length"):
        asked = page.asking(lambda field=field: page.page.fill(field, ""))
    assert set(asked) == {"layer", "query", "tokens", "outputs", "reply"}

    page.page.click("#block")
    asked = page.asking(lambda: grid.click(8, 7))
    assert [(q, k) for q, row in enumerate(asked["block_mask"]) for k, one in enumerate(row) if one] == [(8, 7)]
    grid.hover(8, 7)
    assert tip(page)[0] == 0 and weights_of(http, asked)[:, 8, 7].max() == 0
    assert page.page.inner_text("#blocked") == "1 single cell blocked"
    page.asking(lambda: grid.click(0, 1))
    assert page.page.inner_text("#blocked") == "2 single cells blocked"
    page.asking(lambda: grid.click(0, 1))
    assert "block_mask" not in page.asking(lambda: page.page.click("#unblock"))


def test_two_sentences_have_words_of_their_own(visit: Visitor, http: httpx.Client, layers: None) -> None:
    """Cross-attention, on a layer whose keys and values have other widths than its queries."""
    page = visit("odd")
    page.asking(lambda: page.page.check("#cross"))
    asked = page.asking(lambda: page.page.fill("#keys", "one two three"))
    assert [asked[name]["shape"] for name in ("query", "key", "value")] == [[10, 6], [3, 5], [3, 7]]
    assert side(page, "q").all_inner_texts() == WORDS and side(page, "k").all_inner_texts() == ["one", "two", "three"]
    grid = Grid(page, 10, 3)
    grid.hover(9, 1)
    assert tip(page)[1] == "tired → two" and tip(page)[0] == pytest.approx(weights_of(http, asked).mean(0)[9, 1], abs=6e-5)

    page.refusal(lambda: page.page.check("#causal"))
    assert "Expected an offset" in page.page.inner_text("#offset-error")
    assert page.asking(lambda: page.page.fill("#offset", "end"))["query_offset"] == "end"
    assert page.page.locator("#offset-error").inner_text() == ""
    assert page.asking(lambda: page.page.uncheck("#cross"))["tokens"]["key"] == WORDS


def test_a_request_is_pasted(visit: Visitor, http: httpx.Client) -> None:
    """Its masks come to the controls, its words to the axes, its batch to a choice; what it asks to have replied is set aside."""
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
    page = visit()
    page.asking(lambda: page.page.check("input[value=request]", force=True))
    asked = page.asking(lambda: page.page.fill("#request", json.dumps(body)))
    weights = weights_of(http, {name: body[name] for name in body if name not in ("outputs", "reply")})

    assert page.page.is_checked("#causal") and page.page.input_value("#offset") == "2" and page.page.is_disabled("#length")
    assert asked["valid_lens"] == [5, 4] and asked["outputs"] == ["attention_weights"]
    assert side(page, "q").all_inner_texts() == ["a", "b", "c"] and side(page, "k").all_inner_texts() == ["0", "1", "2", "3", "4"]
    page.page.select_option("#item", "1")
    assert side(page, "q").all_inner_texts() == ["x", "y", "z"]
    Grid(page, 3, 5).hover(2, 3)
    assert tip(page) == (pytest.approx(weights[1].mean(0)[2, 3], abs=6e-5), "z → 3")
    assert "causal" not in page.asking(lambda: page.page.uncheck("#causal"))
    page.asking(lambda: page.page.check("input[value=sentence]", force=True))
    assert side(page, "q").all_inner_texts() == WORDS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"query": [[1, 2], [3]]}', "at /query/1"),
        ('{"query": [[1,', "JSON"),
        ('{"query": [[1, 2]]}', "Expected 64 values per query"),
        ("[1]", "a JSON object"),
        ('{"query": {"shape": [0, 64], "datatype": "FP32", "data": []}}', "nothing to show"),
        ('{"query": [[0]], "mask": 1}', "since libraries disagree"),
    ],
)
def test_what_is_wrong_with_a_pasted_request_stands_below_it(visit: Visitor, text: str, said: str) -> None:
    page = visit()
    page.asking(lambda: page.page.check("input[value=request]", force=True))
    with page.page.expect_response("**/attend"):
        page.page.fill("#request", text)
    page.page.locator("#result[aria-busy=false]").wait_for()
    assert said in page.page.inner_text("#request-error")
    assert page.page.get_attribute("#request", "aria-invalid") == "true"
    assert page.page.get_attribute("#request", "aria-describedby") == "request-error"


def test_refusals_stand_where_they_belong(visit: Visitor) -> None:
    page = visit()
    for field, value, place, said in (
        ("#left", "-3", "#window-error", "greater than or equal to 0"),
        ("#length", "99", "#length-error", "at most 10"),
        ("#offset", "soon", "#offset-error", "an integer"),
    ):
        page.refusal(lambda field=field, value=value: page.page.fill(field, value))
        assert said in page.page.inner_text(place) and page.page.get_attribute(field, "aria-invalid") == "true"
        page.asking(lambda field=field: page.page.fill(field, ""))
        assert page.page.inner_text(place) == "" and page.page.get_attribute(field, "aria-invalid") is None
    page.refusal(lambda: page.page.fill("#text", " "), "**/words")
    assert "at least one word" in page.page.inner_text("#text-error")


def test_nothing_of_an_earlier_request_can_be_used_after_a_refusal(visit: Visitor) -> None:
    """It is greyed and inert, its summary is gone, and the page says that there is a refusal; the next reply ends this."""
    page = visit()
    page.page.click("[data-copy=json]")
    page.refusal(lambda: page.page.fill("#length", "99"))
    assert page.page.locator("#shown[inert]").count() == 1 and page.page.inner_text("#summary") == ""
    assert "beside its field" in page.page.inner_text("#problem")
    page.page.locator("#heads [data-head='2']").click(force=True)
    assert page.page.inner_text("#matrix-title") == "Mean of 8 heads"

    page.asking(lambda: page.page.fill("#length", "4"))
    assert page.page.locator("[inert]").count() == 0 and page.page.locator("#problem").is_hidden()
    assert page.page.locator("#code").is_hidden() and page.page.inner_text("#taken") == ""


def test_examples_are_clicked(visit: Visitor) -> None:
    page = visit()
    asked = page.asking(lambda: page.page.get_by_role("button", name="Trophy").click())
    assert page.page.input_value("#text").startswith("The trophy") and asked["tokens"]["query"][:2] == ["The", "trophy"]


def test_lengths_and_offsets_are_explained_beside_their_fields(visit: Visitor) -> None:
    page = visit()
    for field, meaning in (("#length", "padding"), ("#offset", "Where the first query stands among the keys")):
        described = page.page.locator(field).get_attribute("aria-describedby")
        assert described and meaning in " ".join(page.page.inner_text(f"#{name}") for name in described.split())


def test_special_tokens_are_hidden_by_a_switch(visit: Visitor, http: httpx.Client) -> None:
    """From pictures, words and numbers. A cell that is then blocked is counted in the whole matrix."""
    page = visit()
    assert page.page.locator("#special").is_hidden()
    page.asking(lambda: page.page.check("input[value=request]", force=True))
    body = {"query": np.eye(4, 64).tolist(), "tokens": {"query": ["[CLS]", "a", "b", "[SEP]"]}}
    weights = weights_of(http, page.asking(lambda: page.page.fill("#request", json.dumps(body)))).mean(0)
    assert side(page, "k").count() == 4
    page.page.check("#special")
    assert side(page, "q").all_inner_texts() == side(page, "k").all_inner_texts() == ["a", "b"]
    assert page.page.locator("#heads canvas").first.evaluate("canvas => [canvas.width, canvas.height]") == [2, 2]
    grid = Grid(page, 2, 2)
    grid.hover(0, 1)
    assert tip(page) == (pytest.approx(weights[1, 2], abs=6e-5), "a → b")
    page.page.click("#block")
    asked = page.asking(lambda: grid.click(0, 1))
    assert [(q, k) for q, row in enumerate(asked["block_mask"]) for k, one in enumerate(row) if one] == [(1, 2)]


def test_the_address_has_the_state(visit: Visitor, layers: None) -> None:
    """A link, opened elsewhere, shows the same, as does a reload; it has no more than what differs from the page's first state."""
    page = visit("wide")
    assert page.page.url.endswith("/#layer=wide")
    page.asking(lambda: page.page.fill("#text", "a dog & a bird"))
    page.asking(lambda: page.page.check("#causal"))
    page.page.click("#block")
    page.asking(lambda: Grid(page, 5, 5).click(4, 1))
    page.page.locator("#heads [data-head='3']").click()
    page.page.locator("#heads input").nth(7).uncheck()
    page.page.select_option("#scale", "row")
    side(page, "q").nth(2).click()
    page.page.click("[data-copy=link]")
    link = page.page.input_value("#code")

    other = visit()
    asked = other.asking(lambda: other.page.goto(link))
    for _ in range(2):
        assert asked["layer"] == "wide" and asked["causal"] is True and asked["block_mask"][4][1] == 1
        assert side(other, "q").all_inner_texts() == ["a", "dog", "&", "a", "bird"]
        assert other.page.inner_text("#matrix-title") == "Head 3" and other.page.input_value("#scale") == "row"
        assert other.page.locator("#heads input").nth(7).is_checked() is False
        assert side(other, "q").nth(2).get_attribute("aria-pressed") == "true"
        assert other.page.url == link
        asked = other.asking(lambda: other.page.reload())


def test_the_address_has_a_pasted_request_and_the_masks_over_it(visit: Visitor) -> None:
    """Masks that the controls cannot show stay as they are in the request; one that the user emptied stays away."""
    body = {"query": np.eye(4, 64).reshape(2, 2, 64).tolist(), "valid_lens": [1, 2], "causal": True, "window": {"left": 1, "right": 0}}
    page = visit()
    page.asking(lambda: page.page.check("input[value=request]", force=True))
    page.asking(lambda: page.page.fill("#request", json.dumps(body)))
    page.asking(lambda: page.page.uncheck("#causal"))
    page.page.select_option("#item", "1")
    page.page.uncheck("#heads input[aria-label='Head 1 on']")
    asked = page.asking(lambda: page.page.reload())
    assert asked["valid_lens"] == [1, 2] and asked["window"] == {"left": 1, "right": 0} and "causal" not in asked
    assert page.page.input_value("#item") == "1" and page.page.inner_text("#matrix-title") == "Mean of 7 heads"
    page.asking(lambda: page.page.goto(page.url + "/#layer=default"))
    assert side(page, "q").all_inner_texts() == WORDS and page.page.is_enabled("#length")


def test_an_address_with_nonsense_does_no_harm(visit: Visitor) -> None:
    page = visit()
    page.asking(lambda: page.page.goto(page.url + "/#head=99&off=x&cell=7,a&blocked=1,b&item=5&layer=default&more=1"))
    assert page.page.inner_text("#matrix-title") == "Mean of 8 heads" and page.page.url.endswith("/#layer=default")


def test_a_server_that_is_gone_is_said_to_be(browser: Any, start: Callable[..., Server]) -> None:
    server = start()
    page = Visit(browser.new_page(), server.url).begin()
    server.stop()
    page.page.click("#go")
    page.page.locator("#problem").wait_for()
    assert "does not answer" in page.page.inner_text("#problem")


def test_words_are_never_read_as_html(visit: Visitor) -> None:
    """Wherever words get to: labels, tooltip, words, announcements, errors, layers' names, clipboard."""
    page = visit()
    page.asking(lambda: page.page.check("input[value=request]", force=True))
    tokens = {"query": [HOSTILE, "<script>alert(2)</script>"]}
    body = {"query": np.eye(2, 64).tolist(), "tokens": tokens}
    page.asking(lambda: page.page.fill("#request", json.dumps(body)))
    assert side(page, "q").all_inner_texts() == tokens["query"]
    Grid(page, 2, 2).hover(0, 1)
    assert tip(page)[1] == f"{HOSTILE} → {tokens['query'][1]}"
    side(page, "q").first.click()
    assert HOSTILE in page.page.inner_text("#live")
    page.refusal(lambda: page.page.fill("#request", json.dumps({**body, HOSTILE: 1})))
    assert HOSTILE in page.page.inner_text("#request-error")
    assert page.page.locator("img").count() == 0 and page.page.locator("main script").count() == 0


def test_what_is_copied_gives_what_is_shown(browser: Any, visit: Visitor, http: httpx.Client) -> None:
    """The curl command in a shell, the program in an interpreter, the body by hand: each the same weights."""
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    page.asking(lambda: page.page.fill("#text", "it's the cat's \"mat\" $HOME `x` \\n"))
    asked = page.asking(lambda: page.page.check("#causal"))
    copied = {}
    for kind in ("json", "curl", "python"):
        page.page.click(f"[data-copy={kind}]")
        page.page.locator("#taken", has_text="Copied").wait_for()
        copied[kind] = page.page.evaluate("navigator.clipboard.readText()")
        assert copied[kind] == page.page.input_value("#code")
    weights = weights_of(http, asked)

    assert len(copied["curl"]) < 600 and len(copied["python"]) < 600
    np.testing.assert_array_equal(weights_of(http, json.loads(copied["json"])), weights)
    done = subprocess.run(["bash", "-c", copied["curl"]], capture_output=True, check=True)
    np.testing.assert_array_equal(np.array(json.loads(done.stdout)["attention_weights"]), weights)
    program = copied["python"] + "print(result.attention_weights.tolist(), query.tokens)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    shape, rest = done.stdout.split("\n", 1)
    assert shape == str(weights.shape) and rest.startswith(str(weights.astype(np.float32).tolist()))
    assert '"mat"' not in rest and "'\"', 'mat', '\"'" in rest


@pytest.mark.parametrize(
    ("form", "start"),
    [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")],
)
@pytest.mark.parametrize("kind", ["heads", "shown"])
def test_pictures_are_downloaded(visit: Visitor, form: str, start: bytes, kind: str) -> None:
    page = visit()
    page.page.locator("#heads [data-head='2']").click()
    page.page.select_option("#kind", kind)
    with page.page.expect_download() as caught, page.page.expect_request("**/attend/figure") as request:
        page.page.click(f"[data-figure={form}]")
    assert caught.value.suggested_filename == f"attention-{'head' if kind == 'shown' else 'heads'}.{form}"
    assert caught.value.path().read_bytes()[: len(start)].lower() == start.lower()
    assert request.value.post_data_json["figure"]["heads"] == ([2] if kind == "shown" else list(range(8)))


def test_a_picture_that_is_refused_says_why_beside_its_button(visit: Visitor) -> None:
    """No picture of a layer that is gone by then."""
    page = visit()
    page.page.route("**/attend/figure", lambda route: route.continue_(post_data=route.request.post_data.replace('"default"', '"gone"', 1)))
    page.refusal(lambda: page.page.click("[data-figure=svg]"), "**/attend/figure")
    page.page.locator("#take-error", has_text="Expected a loaded layer").wait_for()
    assert page.page.inner_text("#taken") == ""


def test_everything_by_keyboard(visit: Visitor, http: httpx.Client) -> None:
    """The heat map's cursor says what it stands on; letters lock a row or a column and block a cell; words say what they attend to."""
    page = visit()
    weights = weights_of(http, page.asking(lambda: page.page.click("#go"))).mean(0)
    keyboard, live = page.page.keyboard, page.page.locator("#live")
    page.page.locator("#smaller").focus()
    keyboard.press("Tab")
    keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.id") == "matrix"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        keyboard.press(key)
    assert live.inner_text() == f"Mean of 8 heads: sat to cat, {weights[2, 1]:.4f}"
    keyboard.press("r")
    assert "Locked: sat attends to" in live.inner_text() and side(page, "q").nth(2).get_attribute("aria-pressed") == "true"
    keyboard.press("c")
    assert side(page, "k").nth(1).get_attribute("aria-pressed") == "true"
    keyboard.press("Escape")
    assert page.page.locator("#words [aria-pressed=true]").count() == 0
    asked = page.asking(lambda: keyboard.press("b"))
    assert asked["block_mask"][2][1] == 1
    keyboard.press("End")
    keyboard.press("PageDown")
    assert live.inner_text().startswith("Mean of 8 heads: tired to tired")

    side(page, "q").first.focus()
    keyboard.press("Tab")
    strongest = WORDS[int(weights[1].argmax())]
    assert live.inner_text().startswith(f"cat attends to {strongest} {weights[1].max():.2f}")
    keyboard.press("Enter")
    assert side(page, "q").nth(1).get_attribute("aria-pressed") == "true"
    page.page.locator("#heads [data-head='4']").focus()
    keyboard.press("Enter")
    assert page.page.inner_text("#matrix-title") == "Head 4"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
@pytest.mark.parametrize("state", ["shown", "refused"])
def test_axe_finds_nothing(visit: Visitor, layers: None, scheme: str, width: int, state: str) -> None:
    """The accessibility rules of axe, in both colours, on a wide and a narrow screen, with all that opens, and with a refusal."""
    from axe_playwright_python.sync_playwright import Axe

    page = visit("tiny-2", color_scheme=scheme, viewport={"width": width, "height": 844})
    assert page.page.get_attribute("html", "data-theme") == scheme
    page.page.uncheck("#heads input[aria-label='Head 1 on']")
    page.page.locator("#heads [data-head='0']").click()
    page.asking(lambda: page.page.check("#cross"))
    Grid(page, 10, 7).click(1, 2)
    page.page.locator("#steps li", has_text="Softmax").wait_for()
    for summary in page.page.locator("summary").all():
        if summary.is_visible():
            summary.click()
    page.page.locator("#change tbody tr").first.wait_for()
    page.page.locator("#model canvas[width='100']").nth(2).wait_for()
    page.page.click("[data-copy=curl]")
    if state == "refused":
        page.refusal(lambda: page.page.fill("#length", "99"))
    found = Axe().run(page.page).response["violations"]
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []


def test_colours_are_chosen_and_kept(visit: Visitor) -> None:
    page = visit()
    page.page.select_option("#theme", "dark")
    assert page.page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    page.page.reload()
    page.page.locator("#result[aria-busy=false] #heads button").first.wait_for()
    assert page.page.get_attribute("html", "data-theme") == "dark"


def test_a_phone(visit: Visitor) -> None:
    """Nothing is wider than the screen; a tap shows a number and locks a word."""
    page = visit(viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    matrix = page.page.locator("#matrix canvas")
    matrix.scroll_into_view_if_needed()
    box = matrix.bounding_box()
    page.page.touchscreen.tap(box["x"] + box["width"] - 5, box["y"] + box["height"] - 5)
    assert tip(page)[1] == "tired → tired"
    side(page, "q").nth(2).tap()
    assert any(numbers_beside(page, "k"))
    page.page.locator("#heads [data-head='1']").tap()
    assert page.page.inner_text("#matrix-title") == "Head 1"

    table = page.page.locator("#numbers .wide")
    assert "cut" in (table.get_attribute("class") or "") and page.page.locator("#numbers .more").is_visible()
    table.evaluate("element => element.scrollTo(1e6, 0)")
    page.page.locator("#numbers .more").wait_for(state="hidden")


def test_the_strongest_link_is_not_clipped(visit: Visitor) -> None:
    page = visit(viewport={"width": 1280, "height": 900})
    page.page.locator("#numbers tbody tr").first.wait_for()
    assert page.page.locator("#numbers .wide").evaluate("element => element.scrollWidth <= element.clientWidth")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 1280


def test_512_by_512_with_12_heads(visit: Visitor, layers: None) -> None:
    """All that a short sentence has. The milliseconds from reply to paint are told (pytest -rP), not judged."""
    page = visit("wide")
    words = [f"w{i}" for i in range(512)]
    page.asking(lambda: page.page.fill("#text", " ".join(words)))
    assert "12 heads, 512 queries \N{MULTIPLICATION SIGN} 512 keys" in page.page.inner_text("#summary")
    assert side(page, "k").count() == 512
    page.page.wait_for_function("performance.getEntriesByName('attend:paint').length >= 2")
    paints = page.page.evaluate("performance.getEntriesByName('attend:paint').map((entry) => entry.duration)")
    print(f"painted {paints[-1]:.0f} ms after the reply")
    page.page.locator("#heads [data-head='11']").click()
    page.page.locator("#matrix").scroll_into_view_if_needed()
    box = page.page.locator("#matrix canvas").bounding_box()
    page.page.mouse.move(box["x"] + box["width"] - 1.5, box["y"] + box["height"] - 1.5)
    assert tip(page)[1] == "w511 → w511"
    for _ in range(4):
        page.page.click("#larger")
    page.page.locator("#matrix").scroll_into_view_if_needed()
    page.page.locator("#matrix").evaluate("element => element.scrollTo(1e6, 1e6)")
    box = page.page.locator("#matrix canvas").bounding_box()
    page.page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)
    assert tip(page)[1] == "w511 → w511"
    asked = page.asking(lambda: (page.page.locator("#matrix").focus(), page.page.keyboard.press("b")))
    assert asked["block_mask"]["shape"] == [512, 512]
