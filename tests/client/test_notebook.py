"""The HTML of results in notebooks parses, escapes texts, loads nothing and is small, for every shape of weights."""

import io
import re
from base64 import b64decode
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from attend.client.notebook import COLOURS, MAX_CELLS, MAX_MAPS, MAX_ROWS, heat_maps

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((2, 5, 64)).astype(np.float32)
TOKENS = {"query": [["the", "<b>cat</b>", "sat", "&", "a very long token"], list("abcde")]}


class Elements(HTMLParser):
    """The elements of a text, each of which is closed; the texts; and the values of attributes that load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.texts, self.loads, self.values = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.found.append(tag)
        self.values |= attributes
        assert not any(name.startswith("on") for name, _ in attributes)
        self.loads += [value for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def shown(result):
    """The elements of a result's HTML, which is safe and loads nothing."""
    elements = Elements(result._repr_html_())
    assert not {"script", "style", "link", "iframe", "object"} & {*elements.found}
    assert all(load.startswith("data:image/png;base64,") for load in elements.loads)
    return elements


def test_each_head_has_a_heat_map(client):
    elements = shown(client.attend(QUERY, causal=True, tokens=TOKENS))
    captions = [text for text in elements.texts if text.startswith("head ")]
    assert [caption.partition(",")[0] for caption in captions] == [f"head {i}" for i in range(8)]
    assert captions[0].endswith("largest weight 1.00")
    for word in ("the", "<b>cat</b>", "sat", "&", "a very long…"):
        assert elements.texts.count(word) == 16
    assert "item 0 of 2" in elements.texts[-1] and "layer 'default'" in elements.texts[-1]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"select": {"heads": [5, 2]}}, ["head 5", "head 2"]),
        ({"select": {"average": True}}, ["mean over heads"]),
        ({"select": {"heads": [1], "queries": [3]}, "tokens": TOKENS}, ["head 1"]),
        ({"reply": {"datatype": "BF16"}}, [f"head {i}" for i in range(8)]),
        ({"reply": {"form": "nested"}}, [f"head {i}" for i in range(8)]),
        ({"block_keys": np.ones((2, 5))}, [f"head {i}" for i in range(8)]),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_the_maps_are_of_the_selected_heads(client, fields, names, batched):
    if not batched:
        fields = {**fields, **({"tokens": {"query": TOKENS["query"][0]}} if "tokens" in fields else {})}
        fields = {**fields, **({"block_keys": np.ones(5)} if "block_keys" in fields else {})}
    elements = shown(client.attend(QUERY if batched else QUERY[0], **fields))
    assert [text.partition(",")[0] for text in elements.texts if "largest" in text] == names
    if "tokens" in fields:
        assert elements.texts.count("&") == 2 and elements.texts.count("the") == 1  # query 3 alone, and every key


def test_omitted_tokens_are_left_out(client):
    tokens = {"query": ["[CLS]", "the", "cat", "sat", "[SEP]"], "omit": "special"}
    weights = client.attend(QUERY[0], tokens=tokens)
    elements = shown(weights)
    assert elements.texts.count("cat") == 16 and "[CLS]" not in elements.texts
    inner = weights.attention_weights[:, 1:4, 1:4].max((1, 2))
    assert [text.rpartition(" ")[2] for text in elements.texts if "largest" in text] == [f"{x:.2f}" for x in inner]
    rows = shown(client.attend(QUERY[0], tokens=tokens, select={"queries": [0, 2]}))
    assert rows.texts.count("cat") == 16 and rows.texts.count("sat") == 8


def test_a_result_without_weights_is_shown_as_text(client):
    assert client.attend(QUERY, outputs=["output"])._repr_html_() is None
    assert client.attend(QUERY, select={"top_k": 2})._repr_html_() is None
    assert client.attend(np.zeros((0, 3, 64)))._repr_html_() is None


def test_the_html_of_a_large_result_is_bounded(client):
    client.put_layer("wide", {"d_model": 64, "num_heads": 32})
    result = client.attend(RNG.standard_normal((700, 64)), layer="wide", tokens={"query": ["word"] * 700})
    client.delete_layer("wide")
    elements = shown(result)
    assert len(elements.loads) == MAX_MAPS and "16 more heads are not shown" in elements.texts[-1]
    assert len(result._repr_html_()) < 16 * 4 * MAX_CELLS**2 and "word" not in elements.texts


def test_a_picture_has_the_colours_of_its_weights():
    quarters = np.array([[0, 1, 2, 3], [4, 3, 0, 1], [2, 2, 4, 0]])  # of the largest weight
    [picture] = Elements(heat_maps(quarters[None] / 4, {}, {}, "")).loads
    np.testing.assert_array_equal((imread(io.BytesIO(b64decode(picture.partition(",")[2]))) * 255).round(), COLOURS[quarters])


def test_metrics_of_heads_are_a_table(client):
    metrics = ["entropy", "confidence", "cosine_similarity", "induction_score"]
    result = client.analysis(QUERY, metrics=metrics, tokens={"query": [list("abcde")] * 2})
    elements = shown(result)
    cells = [text for text in elements.texts if re.fullmatch(r"\d\.\d{3}", text)]
    assert cells == [f"{x:.3f}" for pair in zip(result["entropy"][0], result["confidence"][0], strict=True) for x in pair]
    assert elements.texts[:4] == ["head", "entropy", "confidence", "induction score"]  # undefined here: no token is repeated
    assert elements.texts[-1] == "layer 'default'" and len(elements.loads) == 1
    assert client.analysis(QUERY, metrics=["entropy_per_query"])._repr_html_() is None
    client.put_layer("many", {"d_model": 64, "num_heads": 64})
    client.put_layer("more", {"d_model": 65, "num_heads": 65})
    assert shown(client.analysis(QUERY, layer="many")).found.count("tr") == MAX_ROWS + 1
    more = shown(client.analysis(RNG.standard_normal((3, 65)), layer="more"))
    assert more.found.count("tr") == MAX_ROWS + 1 and "1 more heads are not shown" in more.texts[-1]
    for name in ("many", "more"):
        client.delete_layer(name)


@pytest.mark.parametrize("batched", [True, False])
def test_strongest_links_are_words_and_similarities_are_a_heat_map(client, batched):
    metrics = ["strongest_links", "zero_ablation", "jensen_shannon", "value_norms", "pruning_order"]
    query, tokens = (QUERY, TOKENS["query"]) if batched else (QUERY[0], TOKENS["query"][0])
    result = client.analysis(query, metrics=metrics, tokens={"query": tokens})
    elements = shown(result)
    assert elements.texts[:4] == ["head", "zero ablation relative change", "zero ablation cosine", "strongest links"]
    links = {name: part[0] if batched else part for name, part in result["strongest_links"].items()}
    for head in range(8):
        row = zip(links["query_words"][head], links["key_words"][head], links["weights"][head], strict=True)
        assert ", ".join([f"{q}→{k} {x:.2f}" for q, k, x in row][:3]) in elements.texts
    assert len(elements.loads) == 1 and any(text.startswith("jensen shannon, largest 0.") for text in elements.texts)
    assert elements.texts[-1] == "layer 'default'; also value_norms, pruning_order"
    numbers = shown(client.analysis(query, metrics=["strongest_links"]))
    assert any(re.match(r"\d→\d \d\.\d\d, ", text) for text in numbers.texts)


def test_words_are_a_table_of_tokens_and_vectors(client):
    words = client.words("The <b> cat & dog")
    elements = shown(words)
    assert elements.texts[:3] == ["token", "vector", "norm"]
    for token, vector in zip(words.tokens, words.vectors, strict=True):
        assert token in elements.texts and f"{np.linalg.norm(vector):.3f}" in elements.texts
        assert ", ".join(f"{x:.3f}" for x in vector[:4]) + " …" in elements.texts
    assert elements.texts[-1] == f"layer 'default'; {words.note}"
    long = shown(client.words("word " * 100))
    assert long.found.count("tr") == MAX_ROWS + 1 and long.texts[-1].startswith("36 more tokens are not shown; ")


@pytest.mark.parametrize("file_format", ["png", "svg", "html"])
def test_a_figure_is_shown_by_its_format(client, file_format):
    drawn = client.figure(QUERY, format=file_format, figure={"title": 'a "title" & more'})
    shows = {name: getattr(drawn, f"_repr_{name}_")() for name in ("png", "svg", "html")}
    assert [name for name, text in shows.items() if text is not None] == [file_format]
    if file_format == "html":
        frame = Elements(shows["html"])
        assert frame.found == ["iframe"] and not frame.loads and "<script" not in shows["html"]
        assert frame.values["sandbox"] == "allow-scripts" and frame.values["srcdoc"] == drawn.decode()
    else:
        assert shows[file_format] == (bytes(drawn) if file_format == "png" else drawn.decode())
    assert isinstance(drawn, bytes)
