"""POST /attend/figure over HTTP: formats, values in the picture, and refusals."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import httpx
import numpy as np
import pytest
from matplotlib.image import imread
from safetensors.numpy import save

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
    panels = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("cells-")]
    return [[cell.get("style").partition("fill: ")[2][:7] for cell in panel] for panel in panels]


def test_the_default_picture_is_a_grid_of_all_heads(http, layers):
    root, texts = parsed(picture(http, {"kind": "heads", "format": "svg"}))

    assert texts["title"] == ["Attention weights by head, layer same"]
    assert texts["heading"] == ["head 0", "head 1"]
    assert texts["row"] == WORDS
    assert texts["column"] == WORDS * 2
    assert sorted(texts["axis"]) == ["key", "key", "query"]
    assert texts["colours"] == ["attention weight"]
    assert [len(colours) for colours in cells(root)] == [25, 25]


@pytest.mark.parametrize(("omit", "kept"), [(["sat", "on"], [0, 1, 4]), ("special", [1, 2, 4])])
def test_tokens_can_be_left_out(http, layers, omit, kept):
    """Rows and columns go; the other cells stay as they are."""
    words = [word if i in kept or omit != "special" else "[SEP]" for i, word in enumerate(WORDS)]
    figure = {"kind": "heads", "format": "svg", "maximum": 1}
    whole, _ = parsed(picture(http, figure))
    part, texts = parsed(picture(http, figure, tokens={"query": words, "omit": omit}))

    left_out = sorted({*words} - {words[i] for i in kept})
    assert texts["row"] == [words[i] for i in kept] and texts["column"] == texts["row"] * 2
    assert texts["note"][-1] == f"Left out: {', '.join(left_out)}."
    for some, every in zip(cells(part), cells(whole), strict=True):
        assert some == [every[5 * i + j] for i in kept for j in kept]


def test_left_out_positions_are_in_no_kind_of_picture(http, layers):
    """Outputs lose their rows; similarities are of the other queries."""
    tokens = {"query": WORDS, "omit": ["cat"]}
    _, texts = parsed(picture(http, {"kind": "concatenation", "format": "svg"}, tokens=tokens))
    assert texts["row"] == ["The", "sat", "on", "mats"] * 2
    similar, all_alike = (picture(http, {"kind": "similarity", "format": "svg"}, tokens=t).content for t in (tokens, {"query": WORDS}))
    assert similar != all_alike
    _, texts = parsed(picture(http, {"kind": "mean", "format": "svg"}, key=[[0.1] * 4] * 2, tokens={"query": WORDS, "omit": ["cat"]}))
    assert texts["row"] == ["The", "sat", "on", "mats"] and texts["column"] == ["0", "1"]


@pytest.mark.parametrize("path", ["/attend", "/attend/plan", "/attend/analysis", "/attend/figure"])
@pytest.mark.parametrize(
    ("tokens", "at", "expected", "got"),
    [
        ({"omit": WORDS}, "/tokens/omit", "at least one query that is not omitted", f"all {len(WORDS)} omitted"),
        ({"query": ["[CLS]"] * len(WORDS), "omit": "special"}, "/tokens/omit", "at least one query that is not omitted", "all"),
        ({"omit": ["sat", "satt"]}, "/tokens/omit/1", "a token of the queries or keys", '"satt" (did you mean sat?)'),
        ({"query": None, "omit": ["cat"]}, "/tokens/omit/0", "a token of the queries or keys", '"cat"'),
    ],
)
def test_every_endpoint_refuses_an_omission_of_everything_or_of_an_unknown_token(http, layers, path, tokens, at, expected, got):
    answer = http.post(path, json={**BODY, "tokens": {"query": WORDS, **tokens}})
    assert answer.status_code == 422
    [problem] = answer.json()["errors"]
    assert (problem["at"], problem["expected"]) == (at, expected) and problem["got"].startswith(got)


def test_each_item_of_a_batch_keeps_a_query_and_a_key(http, layers):
    words = [["a", "[PAD]"], ["[CLS]", "[SEP]"]]
    body = {"layer": BODY["layer"], "query": [[[0.5] * 4] * 2] * 2, "tokens": {"query": words, "omit": "special"}}
    [problem] = http.post("/attend/analysis", json=body).json()["errors"]
    assert problem["expected"] == "at least one query of item 1 that is not omitted"


def test_a_picture_has_layer_and_fingerprint_in_its_metadata(http, layers):
    answer = picture(http, {"format": "png", "title": "A picture"})

    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-request-id"]
    assert answer.headers["server-timing"].startswith("decode;dur=")
    fingerprint = layers["same"]["fingerprint"].encode()
    assert fingerprint in answer.content
    assert fingerprint in picture(http, {"format": "svg"}).content
    assert fingerprint in picture(http, {"format": "html"}).content


@pytest.mark.parametrize(
    ("accept", "file_format", "media"),
    [
        ("*/*", None, "image/png"),
        ("image/svg+xml", None, "image/svg+xml"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", None, "text/html"),
        ("image/png;q=0.1, image/svg+xml", None, "image/svg+xml"),
        ("application/json", "svg", "image/svg+xml"),
        ("text/html", "png", "image/png"),
    ],
)
def test_figure_format_takes_precedence_over_accept(http, layers, accept, file_format, media):
    answer = http.post("/attend/figure", json={**BODY, "figure": {"format": file_format}}, headers={"Accept": accept})

    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == media


def test_an_accept_without_a_picture_type_is_406(http, layers):
    answer = http.post("/attend/figure", json=BODY, headers={"Accept": "application/json"})

    assert answer.status_code == 406
    assert "image/png or image/svg+xml or text/html" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("figure", "at", "expected", "got"),
    [
        ({"kind": "head", "heads": [2]}, "/figure/heads/0", 'a head below 2 for layer "same"', "2"),
        ({"kind": "head", "heads": [0, 1]}, "/figure/heads", "one head for a picture of kind head", "2"),
        ({"heads": [1, 1]}, "/figure/heads/1", "each head once", "1 twice"),
        ({"heads": []}, "/figure/heads", "a list of at least 1", "a list of 0"),
        ({"kind": "concatenation", "heads": [0]}, "/figure/heads", "null, since the concatenation is of all heads", "a list of 1"),
        ({"item": 1}, "/figure/item", "an item below 1", "1"),
        ({"kind": "pie"}, "/figure/kind", 'one of "concatenation", "head", "heads", "mean", "similarity", "std"', '"pie"'),
        ({"colour": "red"}, "/figure/colour", "no field of that name", 'a field "colour" (did you mean colours?)'),
        ({"dpi": 10000}, "/figure/dpi", "at most 384", "10000"),
        ({"width": 12}, "/figure/width", "at least 200", "12"),
        ({"maximum": 0}, "/figure/maximum", "more than 0", "0"),
        ({"scale_per_head": True, "maximum": 0.5}, "/figure/maximum", "null, since each head has a scale of its own", "0.5"),
        ({"width": 200, "values": True}, "/figure/values", None, None),
    ],
)
def test_refusals_have_a_pointer(http, layers, figure, at, expected, got):
    answer = http.post("/attend/figure", json={**BODY, "figure": figure})

    assert answer.status_code == 422
    problem = answer.json()["errors"][0]
    assert problem["at"] == at
    if expected:
        assert (problem["expected"], problem["got"]) == (expected, got)


def test_negative_weights_have_colours_of_their_own(http, layers):
    """0 is in the middle of the scale; kinds and options for numbers from 0 on are refused."""
    http.put("/layers/differential", json={"spec": {"d_model": 8, "num_heads": 2, "differential": {"lambda_init": 1.0}, "gain": 3.0}})
    body = {"layer": "differential", "query": np.tile(QUERY, 2).tolist()}
    weights = np.array(http.post("/attend", json={**body, "outputs": ["attention_weights"]}).json()["attention_weights"])
    assert weights.min() < -0.01 < 0.01 < weights.max()

    root, texts = parsed(http.post("/attend/figure", json={**body, "figure": {"kind": "heads", "format": "svg"}}))
    drawn = http.post("/attend/figure", json={**body, "figure": {"kind": "similarity", "format": "svg"}})

    largest = f"{np.abs(weights).max():.3g}"
    assert texts["note"] == [f"Colour: attention weight, -{largest} to {largest}."]
    is_blue_by_head = ([int(colour[1:3], 16) < int(colour[5:7], 16) for colour in colours] for colours in cells(root))
    for head, is_blue in zip(weights, is_blue_by_head, strict=True):
        clear = np.abs(head.ravel()) > 0.02 * np.abs(weights).max()
        assert (np.array(is_blue) == (head.ravel() < 0))[clear].all()
    assert parsed(drawn)[1]["note"] == ["Colour: cosine similarity, -1 to 1."]
    for field, value in (("pool", "max"), ("scale", "log")):
        refused = http.post("/attend/figure", json={**body, "figure": {"kind": "mean", field: value}}).json()["errors"][0]
        assert (refused["at"], refused["got"]) == (f"/figure/{field}", value)
    http.delete("/layers/differential")


@pytest.mark.parametrize("shape", [[0, 3, 64], [2, 0, 64], [0, 64]])
def test_requests_without_queries_or_keys_are_refused(http, shape):
    answer = http.post("/attend/figure", json={"query": {"shape": shape, "datatype": "FP32", "data": []}})

    assert answer.status_code == 422
    [problem] = answer.json()["errors"]
    assert problem == {"at": "/query", "expected": "at least one query and one key to draw", "got": "none"}


def test_the_field_figure_is_refused_on_other_endpoints(http, layers):
    answer = http.post("/attend", json={**BODY, "figure": {}})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == "/figure"


def test_the_values_in_a_picture_are_the_weights(http, layers):
    """In the cells of the SVG, rounded; all three formats are of one picture."""
    weights = http.post("/attend", json=BODY).json()["attention_weights"]
    _, texts = parsed(picture(http, {"format": "svg", "values": True}))

    assert texts["value"] == [f"{value:.2f}" for head in weights for row in head for value in row]
    assert texts["note"] == [f"Colour: attention weight, 0 to {np.max(weights):.3g}."]
    html = picture(http, {"format": "html", "values": True}).text
    assert json.loads(html.partition('id="data">')[2].partition("</script>")[0])["panels"][0]["rows"]["words"] == WORDS


def test_a_png_has_the_requested_size(http, layers, tmp_path):
    for width, dpi in ((400, 96), (400, 192), (1000, 48)):
        (tmp_path / "picture.png").write_bytes(picture(http, {"width": width, "dpi": dpi, "format": "png"}).content)
        assert imread(tmp_path / "picture.png").shape[1] == width * dpi // 96


def shown(answer):
    """The panels behind an HTML page: their titles, words, and numbers as float32 [rows, columns]."""
    document = json.loads(answer.text.partition('id="data">')[2].partition("</script>")[0])
    for panel in document["panels"]:
        rows, columns = (-(-panel[side]["total"] // panel[side]["pooled"]) for side in ("rows", "columns"))
        panel["values"] = np.frombuffer(base64.b64decode(panel["values"]), "<f4").reshape(rows, columns)
    return document["panels"]


CROSS = {
    "layer": "cross",
    "query": np.random.RandomState(1).standard_normal((2, 5, 4)).round(3).tolist(),
    "key": np.random.RandomState(2).standard_normal((2, 7, 3)).round(3).tolist(),
    "value": np.random.RandomState(3).standard_normal((2, 7, 5)).round(3).tolist(),
    "tokens": {"query": [[*"abcde"], [*"fghij"]], "key": ["1", "2", "3", "4", "5", "6", "7"]},
}
MASKS = {
    "nothing": {},
    "causal": {"causal": True, "query_offset": "end"},
    "lengths": {"valid_lens": [3, 4]},
    "per head": {"attend_mask": (np.random.RandomState(4).random_sample((2, 2, 5, 7)) < 0.4).astype(int).tolist()},
    "dropout": {"dropout": {"p": 0.4, "seed": 5}},
    "bias": {"bias": [[0, "-inf", 1, 2, -1, 0.5, 0]] * 5},
}


def cosine(one, other):
    """Between the shares of two heads, [q, k] each, in the rows that have a key in both."""
    rows = (one.sum(1) > 0) & (other.sum(1) > 0)
    one, other = (head[rows] / head[rows].sum(1, keepdims=True) for head in (one, other))
    return (one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())


def blocked_in(fields):
    """Which pairs may not attend, bool [2, 2, 5, 7], worked out from the request alone."""
    blocked = np.zeros((2, 2, 5, 7), bool)
    if "causal" in fields:
        blocked |= np.arange(7) > np.arange(5)[:, None] + 2
    if "valid_lens" in fields:
        blocked |= np.arange(7) >= np.array(fields["valid_lens"])[:, None, None, None]
    if "attend_mask" in fields:
        blocked |= np.array(fields["attend_mask"]) == 0
    if "bias" in fields:
        blocked |= np.arange(7) == 1
    return blocked


@pytest.mark.parametrize("mask", MASKS)
def test_every_kind_shows_the_numbers_of_attend(http, layers, mask):
    """Cross-attention, the second item: weights, their mean, deviation and cosines; NaN in fully masked rows."""
    body = {**CROSS, **MASKS[mask]}
    weights = np.array(http.post("/attend", json={**body, "outputs": ["attention_weights"]}).json()["attention_weights"])[1]
    blocked = blocked_in(MASKS[mask])[1]
    expected = {
        "heads": np.where(blocked, np.nan, weights),
        "head": np.where(blocked, np.nan, weights)[:1],
        "mean": np.where(blocked.all(0), np.nan, weights.mean(0))[None],
        "std": np.where(blocked.all(0), np.nan, weights.std(0))[None],
        "similarity": np.array([[cosine(one, other) for other in weights] for one in weights])[None],
    }
    for kind, values in expected.items():
        panels = shown(picture(http, {"kind": kind, "format": "html", "item": 1}, **body))
        np.testing.assert_allclose([panel["values"] for panel in panels], values, rtol=0, atol=2e-6)
        if kind != "similarity":
            assert panels[0]["rows"]["words"] == [*"fghij"]
            assert panels[0]["columns"]["words"] == [*"1234567"]
            assert panels[0]["empty"] == np.flatnonzero(np.isnan(values[0]).all(1)).tolist()


def test_the_kind_similarity_shows_the_metric(http):
    """With sinks, whose rows have unequal sums; with padding, and with omitted words, which do not count as queries."""
    http.put("/layers/sunk", json={"spec": {"d_model": 6, "num_heads": 3, "sinks": True, "gain": 3.0}})
    rng = np.random.default_rng(11)
    query, words = rng.standard_normal((2, 7, 6)).round(3), [*"abcdefg"]
    fields = {"layer": "sunk", "query": query.tolist(), "tokens": {"query": words, "omit": ["c"]}, "valid_lens": [7, 5]}
    weights = np.array(http.post("/attend", json={**fields, "outputs": ["attention_weights"]}).json()["attention_weights"])[1]
    assert np.ptp(weights.sum(-1)[:, :5]) > 0.1
    rows = [0, 1, 3, 4]

    [panel] = shown(picture(http, {"kind": "similarity", "format": "html", "item": 1, "heads": [2, 0]}, **fields))
    metric = http.post("/attend/analysis", json={**fields, "metrics": ["cosine_similarity"]}).json()["metrics"]["cosine_similarity"][1]

    expected = np.array([[cosine(one[rows], other[rows]) for other in weights] for one in weights])
    assert expected.min() < 0.9
    np.testing.assert_allclose(metric, expected, atol=1e-6)
    np.testing.assert_allclose(panel["values"], expected[[2, 0]][:, [2, 0]], atol=1e-6)
    http.delete("/layers/sunk")


def test_the_kind_concatenation_shows_head_outputs_and_output(http, layers):
    body = {**CROSS, "head_scale": [1, 0.5]}
    reply = http.post("/attend", json={**body, "outputs": ["concatenated", "output"]}).json()

    panels = shown(picture(http, {"kind": "concatenation", "format": "html"}, **body))

    assert [panel["title"] for panel in panels] == ["heads' outputs, side by side", "after the output projection"]
    assert panels[0]["columns"]["groups"] == ["0", "1"]
    for panel, name in zip(panels, ("concatenated", "output"), strict=True):
        np.testing.assert_allclose(panel["values"], reply[name][0], rtol=0, atol=2e-6)


def test_selected_heads_have_the_order_of_the_request(http, layers):
    both, turned = (shown(picture(http, {"format": "html", "heads": heads})) for heads in (None, [1, 0]))

    assert [panel["title"] for panel in turned] == ["head 1", "head 0"]
    np.testing.assert_array_equal(turned[0]["values"], both[1]["values"])


def test_fully_masked_rows_are_hatched_and_labelled(http, layers):
    _, texts = parsed(picture(http, {"format": "svg"}, attend_mask=[[0] * 5 if i == 2 else [1, 1, 1, 1, 0] for i in range(5)]))
    assert texts["legend"] == ["may not attend", "no key to attend to"]
    root, texts = parsed(picture(http, {"format": "svg"}, causal=True))
    assert texts["legend"] == ["may not attend"]
    grey = [colour for colour in cells(root)[0] if colour == "#d9dce0"]
    assert len(grey) == 10

    answer = http.post("/attend/figure", json={**BODY, "valid_lens": 0, "fully_masked": "error"})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == "/fully_masked"


def test_outputs_select_and_reply_do_not_change_the_picture(http, layers):
    more = {"outputs": ["attention_weights"], "select": {"heads": [0]}, "reply": {"form": "base64"}}

    assert picture(http, {"format": "svg"}, **more).content == picture(http, {"format": "svg"}).content


def test_a_safetensors_body_gives_the_same_picture(http, layers):
    query = np.array(QUERY, np.float32)
    fields = {"layer": "same", "tokens": BODY["tokens"], "figure": {"format": "svg"}}
    body = save({"query": query}, {"request": json.dumps(fields)})

    answer = http.post("/attend/figure", content=body, headers={"Content-Type": "application/vnd.safetensors"})

    assert answer.content == picture(http, {"format": "svg"}, query=query.tolist()).content


@pytest.mark.slow
def test_a_long_sequence_is_pooled_and_labelled_so(start):
    """2 x 5003 x 5003 weights would be 200 MB; the server's peak memory stays far below."""
    server = start("--d-model", "4", "--num-heads", "2")
    query = np.random.RandomState(1).standard_normal((5003, 4)).astype(np.float32)
    peak = lambda: int(Path(f"/proc/{server.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0])  # noqa: E731  # kB
    with httpx.Client(base_url=server.url, timeout=300) as client:
        body = {"query": [[1, 2, 3, 4]], "figure": {"format": "png"}}
        client.post("/attend/figure", json=body).raise_for_status()
        before = peak()
        fields = {"causal": True, "figure": {"format": "svg", "pool": "max", "width": 600}}
        content = save({"query": query}, {"request": json.dumps(fields)})
        answer = client.post("/attend/figure", content=content, headers={"Content-Type": "application/vnd.safetensors"})

    assert answer.status_code == 200, answer.text
    assert peak() - before < 100_000
    root, texts = parsed(answer)
    assert any("5003 queries x 5003 keys; each cell is the maximum over the pairs that may attend" in note for note in texts["note"])
    assert len(root.findall(f".//{SVG}image")) == 2  # one for each head


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"query": [[]]}, 422),
        ({"query": {"shape": [0, 4], "datatype": "FP32", "data": []}}, 422),
        ({"query": [[1, 2]]}, 422),
        ({"layer": "no"}, 404),
    ],
)
def test_values_that_cannot_be_drawn_are_refused(http, layers, fields, status):
    answer = http.post("/attend/figure", json={**BODY, "tokens": None, **fields})

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_png_beyond_the_pixel_limit_is_refused(http, layers):
    answer = http.post("/attend/figure", json={**BODY, "figure": {"format": "png", "width": 4096, "dpi": 384}})

    assert answer.status_code == 413
    assert answer.json()["errors"][0]["at"] == "/figure/dpi"


def test_more_heads_than_the_limit_are_refused(http, layers):
    http.put("/layers/many", json={"spec": {"d_model": 257, "num_heads": 257}})
    body = {"layer": "many", "query": [[0.5] * 257] * 3}
    answers = {kind: http.post("/attend/figure", json={**body, "figure": {"kind": kind, "format": "svg"}}) for kind in ("heads", "mean")}
    http.delete("/layers/many")

    assert answers["heads"].status_code == 413
    assert answers["heads"].json()["errors"] == [{"at": "/figure/heads", "expected": "at most 256 heads in one picture", "got": "257"}]
    assert answers["mean"].status_code == 200


def test_a_passed_deadline_is_504(http, layers):
    answer = http.post("/attend/figure", json={**BODY, "figure": {"format": "png"}}, headers={"X-Request-Timeout": "0.0001"})

    assert answer.status_code == 504


@pytest.mark.parametrize(("file_format", "coding"), [("png", None), ("svg", "gzip"), ("html", "gzip")])
def test_svg_and_html_are_compressed_if_accepted(http, layers, file_format, coding):
    body = {**BODY, "figure": {"format": file_format}}
    answer = http.post("/attend/figure", json=body, headers={"Accept-Encoding": "gzip"})

    assert answer.headers.get("content-encoding") == coding
    assert answer.content == picture(http, {"format": file_format}).content


def test_concurrent_pictures_equal_those_drawn_alone(http, layers, server):
    """/attend is answered meanwhile."""
    forms = product(("light", "dark"), ("png", "svg", "html"))
    figures = [
        {"kind": kind, "format": file_format, "theme": theme}
        for kind, (theme, file_format) in zip(("heads", "mean", "concatenation", "concatenation", "heads", "mean"), forms, strict=True)
    ]
    alone = [picture(http, figure).content for figure in figures]
    expected = http.post("/attend", json=BODY).content

    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(12) as pool:
        drawn = [pool.submit(picture, client, figure) for figure in figures]
        replies = [pool.submit(client.post, "/attend", json=BODY) for _ in range(40)]

    assert [future.result().content for future in drawn] == alone
    assert {future.result().content for future in replies} == {expected}
    assert len(set(alone)) == len(figures)
