"""Each limit of a call: a request just beyond it is refused with the setting, one just within it is answered; the plan predicts both."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from attend.settings import BadSettings, Settings, read_settings
from attend.wire.json import strict
from support.app import answers

QUERY = {"query": [[[0.5] * 64] * 8] * 3}  # 3 items, 8 queries, 8 heads
LIMITS = {  # setting -> a limit that is too low for the query, and the place of the refusal
    "max_batch_items": (2, "/query"),
    "max_pairs": (500, ""),
    "max_scores": (1000, ""),
    "max_operations": (500_000, ""),
    "max_reply_bytes": (20_000, ""),
}
BINARY = {"content-type": "application/vnd.safetensors"}


@pytest.mark.parametrize("setting", LIMITS)
def test_a_call_beyond_a_limit_is_413_and_one_at_the_limit_is_answered(setting: str) -> None:
    """413 names limit, value and setting; the plan has the same refusal."""
    low, at = LIMITS[setting]
    bodies = [{"url": path, "json": QUERY} for path in ("/attend/plan", "/attend")]
    (refused,) = answers(Settings(**{setting: low}, access_log=False), bodies[0])
    needed = next(int(problem["got"]) for problem in refused.json()["refusals"] if setting in problem["expected"])
    assert needed > low

    plan, answer = answers(Settings(**{setting: needed}, access_log=False), *bodies)
    assert (answer.status_code, plan.json()["admitted"], plan.json()["refusals"]) == (200, True, [])

    plan, answer = answers(Settings(**{setting: needed - 1}, access_log=False), *bodies)
    assert answer.status_code == 413
    assert plan.json()["admitted"] is False
    (problem,) = answer.json()["errors"]
    assert problem in plan.json()["refusals"]
    assert problem["at"] == at
    assert setting in problem["expected"] and str(needed - 1) in problem["expected"]
    assert int(problem["got"]) == needed


@pytest.mark.parametrize(("count", "status"), [(16, 422), (17, 413)])
def test_the_number_of_tensors_is_limited(count: int, status: int) -> None:
    """In safetensors, and members of a JSON object. At the limit they are refused only for their unknown names."""
    tensors = {f"tensor{i}": np.zeros(1, np.float32) for i in range(count)}
    binary = {"url": "/attend", "content": save(tensors), "headers": BINARY}
    text = {"url": "/attend", "json": dict.fromkeys(tensors, 1)}
    for answer in answers(Settings(max_tensors=16, access_log=False), binary, text):
        assert answer.status_code == status
        assert ("max_tensors" in answer.text) == (status == 413)


@pytest.mark.parametrize(("count", "status"), [(62, 422), (63, 413)])
def test_the_members_of_all_objects_are_limited(count: int, status: int) -> None:
    """Of a body of JSON, in all: a refusal of each by its name would take long to write. The two others are those around the list."""
    request = {"url": "/attend", "json": {"tokens": {"query": [{"unknown": 1}] * count}}}
    (answer,) = answers(Settings(max_tensors=16, access_log=False), request)
    assert answer.status_code == status
    assert ("at most 64 members of objects in one body (4 x max_tensors)" in answer.text) == (status == 413)


def test_the_index_lists_every_limit(http: httpx.Client) -> None:
    limits = http.get("/").json()["limits"]
    assert set(limits) == {name for name in Settings.model_fields if name.startswith("max_")} | {"session_memory"}


@pytest.mark.parametrize(
    ("field", "value", "expected"), [("outputs", [], "a list of at least 1"), ("layer", "../etc", "a text matching ^[A-Za-z0-9]")]
)
def test_refusals_do_not_contain_pydantics_messages(http: httpx.Client, field: str, value: Any, expected: str) -> None:
    answer = http.post("/attend", json={**QUERY, field: value})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["expected"].startswith(expected)
    assert "should" not in answer.text


def test_rounding_gives_zero_without_a_sign(http: httpx.Client) -> None:
    """-0.4 to no decimals is 0."""
    text = http.post("/attend", json={"query": [[-0.01] * 64], "reply": {"decimals": 0}}).text
    assert "-0.0" not in text


@pytest.mark.parametrize("name", ["tokens", "select", "reply", "window", "dropout"])
def test_the_size_of_json_text_in_a_parameter_is_limited(name: str) -> None:
    """In bytes, before it is parsed."""
    tensor = {"name": "query", "shape": [1, 1, 64], "datatype": "FP32", "data": [1] * 64}
    texts = [f'{{"query":[{" " * size}]}}' for size in ((1 << 20) - 12, (1 << 20) - 11, 1 << 22)]
    requests: list[Any] = [{"url": "/v2/models/default/infer", "json": {"inputs": [tensor], "parameters": {name: text}}} for text in texts]
    within, beyond, far = answers(Settings(access_log=False), *requests)
    assert within.status_code == 400  # for what the text says, and not for its length
    assert "bytes" not in within.text
    assert (beyond.status_code, far.status_code) == (413, 413)
    assert f"expected JSON text of at most {1 << 20} bytes, got {(1 << 20) + 1}, at /parameters/{name}" in beyond.text
    assert f"expected at most {1 << 22} bytes outside of base64 and lists of numbers" in far.text


@pytest.mark.parametrize(("count", "status"), [((1 << 17) - 2, 422), ((1 << 17) - 1, 413)])
def test_the_number_of_values_outside_of_tensors_is_limited(count: int, status: int) -> None:
    """In JSON and in the metadata entry of safetensors. At the limit they are refused as too many tokens."""
    words = {"query": [""] * count}
    metadata = {"request": json.dumps({"tokens": words})}
    found = answers(
        Settings(access_log=False),
        {"url": "/attend", "json": {"query": [[0.5] * 64], "tokens": words}},
        {"url": "/attend", "content": save({"query": np.zeros((1, 64), np.float32)}, metadata), "headers": BINARY},
    )
    for answer in found:
        assert answer.status_code == status, answer.text[:300]
        assert ("at most 131072 values outside of tensors in one body" in answer.text) == (status == 413)


def _in_header(header: Any) -> bytes:
    """A safetensors body without tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


V2_INPUT = {"name": "query", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}
CONFIG = '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "x": %s}'
PLACES_OF_JSON: dict[str, Callable[[str], dict[str, Any]]] = {  # where a request has JSON: the request with these lists there
    "body": lambda lists: {"url": "/attend", "content": f'{{"tokens": {{"query": {lists}}}}}'},
    "header": lambda lists: {"url": "/attend", "content": _in_header(f'{{"query": {lists}}}'.encode()), "headers": BINARY},
    "entry of metadata": lambda lists: {
        "url": "/attend",
        "content": _in_header({"__metadata__": {"request": f'{{"tokens": {{"query": {lists}}}}}'}}),
        "headers": BINARY,
    },
    "parameter": lambda lists: {"url": "/v2/models/default/infer", "json": {"inputs": [V2_INPUT], "parameters": {"select": lists}}},
    "tokenizer": lambda lists: {"url": "/words/tokens", "content": f'{{"text": "a", "tokenizer": {lists}}}'},
    "words": lambda lists: {"url": "/words", "content": f'{{"text": {lists}}}'},
    "layer": lambda lists: {"method": "PUT", "url": "/layers/new", "content": f'{{"spec": {{"bias": {lists}}}}}'},
    "checkpoint": lambda lists: {
        "method": "PUT",
        "url": "/layers/new",
        "content": _in_header({"__metadata__": {"spec": f'{{"bias": {lists}}}'}}),
        "headers": BINARY,
    },
    "config": lambda lists: {
        "method": "PUT",
        "url": "/layers/new",
        "content": _in_header({"__metadata__": {"config": CONFIG % lists, "layer": "0"}}),
        "headers": BINARY,
    },
}


@pytest.mark.parametrize("place", PLACES_OF_JSON)
def test_the_values_and_the_depth_of_json_are_limited_wherever_a_request_has_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python objects are made of them."""
    parse, parsed = json.loads, list[int]()

    def lists_in(document: Any) -> int:
        items = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
        return isinstance(document, list) + sum(map(lists_in, items))

    def counting(text: str, **options: Any) -> Any:
        document = parse(text, **options)
        parsed.append(lists_in(document))
        return document

    monkeypatch.setattr(strict.json, "loads", counting)
    within, many, deep, far = answers(
        Settings(access_log=False),
        *(PLACES_OF_JSON[place](lists) for lists in (f"[{'[],' * 9}[]]", f"[{'[],' * 131_072}[]]", "[" * 70 + "]" * 70, "[" * 5000)),
    )
    assert within.status_code in (400, 422)
    assert (many.status_code, deep.status_code, far.status_code) == (413, 413, 413)
    assert "131072 values outside of tensors" in many.text
    assert "deep" in deep.text and "deep" in far.text
    assert max(parsed) < 100


def test_a_long_string_in_a_list_is_refused() -> None:
    body = {"query": [[0.5] * 64], "tokens": {"query": ["a" * (5 << 20)]}}
    (answer,) = answers(Settings(access_log=False), {"url": "/attend", "json": body})
    assert answer.status_code == 413
    assert f"at most {4 << 20} bytes outside of base64 and lists of numbers" in answer.text


@pytest.mark.parametrize("field", ["d_model", "key_dim", "output_dim", "num_heads"])
def test_the_width_of_a_layer_is_limited(field: str) -> None:
    """Without projections a layer of any width has no parameters."""
    unprojected = {"d_model": 128, "num_heads": 128 if field == "num_heads" else 2, "projections": False}
    spec = unprojected if field in ("d_model", "num_heads") else {"d_model": 4, "num_heads": 2, field: 128}
    for limit, status in ((128, 201), (127, 413)):
        request: Any = {"url": "/layers/wide", "json": {"spec": spec}, "method": "PUT"}
        (answer,) = answers(Settings(max_layer_width=limit, access_log=False), request)
        assert answer.status_code == status, answer.text
        assert status == 201 or "widths of at most 127 (max_layer_width)" in answer.text


def test_the_width_of_a_configured_layer_is_limited() -> None:
    with pytest.raises(BadSettings, match="max_layer_width"):
        read_settings({"layers": {"wide": {"d_model": 1 << 17, "num_heads": 1, "projections": False}}})


@pytest.mark.parametrize("number", ["inf", "nan"])
def test_the_end_of_a_drain_is_a_finite_number(number: str) -> None:
    """Without an end, the process would wait for ever after SIGTERM."""
    with pytest.raises(BadSettings, match=r"drain-seconds.*finite"):
        read_settings({"drain_seconds": number})


def test_a_layer_that_no_call_could_use_is_refused() -> None:
    """Before it is warmed."""
    spec = {"d_model": 1 << 16, "num_heads": 1, "projections": False}
    (answer,) = answers(
        Settings(max_memory_bytes=1 << 20, access_log=False), {"url": "/layers/wide", "json": {"spec": spec}, "method": "PUT"}
    )
    assert answer.status_code == 413
    assert "max_memory_bytes" in answer.text


def test_the_size_of_word_vectors_is_limited() -> None:
    """Before they are drawn."""
    spec = {"d_model": 1 << 16, "num_heads": 1, "projections": False}
    put = {"url": "/layers/wide", "json": {"spec": spec}, "method": "PUT"}
    texts = [{"url": "/words", "json": {"layer": "wide", "text": "a " * count}} for count in (32, 33)]
    _, taken, refused = answers(Settings(access_log=False), put, *texts)
    assert taken.status_code == 200
    assert len(taken.json()["tokens"]) == 32
    assert refused.status_code == 422
    assert refused.json()["errors"] == [{"at": "/text", "expected": "at most 32 words for vectors of 65536 numbers", "got": "33"}]


@pytest.mark.parametrize(("path", "status"), [("/layers/x", 422), ("/no/such/page", 404), ("/v2/models/default/infer", 405)])
def test_the_number_of_query_parameters_is_limited(path: str, status: int) -> None:
    """Before the framework makes an object of each."""
    few, many = answers(
        Settings(access_log=False),
        {"url": path + "?" + "&".join(["a"] * 64), "method": "PUT", "json": {}},
        {"url": path + "?" + "&".join(["a"] * 65), "method": "PUT", "json": {}},
    )
    assert few.status_code == status
    assert many.status_code == 413 and "at most 64 query parameters" in many.text
