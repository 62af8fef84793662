"""Positions on several axes and relative positions in a grid, over HTTP: numbers as the reference has them, and refusals."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from attend.attention.reference.forward import attend
from attend.spec import LayerSpec
from attend.tensors import Array
from support.v2 import in_bytes, in_json, read

RNG = np.random.default_rng(83)
IMAGES = {"d_model": 21, "num_heads": 3, "head_dim": 10, "rope": {"axes": [0, 1, 1, 0, 1], "requires_positions": True}, "dtype": "float64"}
TEXT = {**IMAGES, "rope": {"axes": [0, 1, 2, 1, 0]}}
LINE = {**IMAGES, "rope": {}}
GRID = {"d_model": 21, "num_heads": 3, "head_dim": 5, "dtype": "float64", "grid_bias": {"height": 2, "width": 5, "kind": "decomposed"}}
SWIN = {**GRID, "grid_bias": {"height": 3, "width": 4, "class_token": True}}
LAYERS = {"images": IMAGES, "text": TEXT, "line": LINE, "grid": GRID, "swin": SWIN}
QUERY, KEY = RNG.standard_normal((2, 7, 21)), RNG.standard_normal((2, 5, 21))
MEDIA = {"Content-Type": "application/vnd.safetensors", "Accept": "application/vnd.safetensors"}


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, Array]]:
    return {
        name: {part: RNG.standard_normal(shape) / 3 for part, shape in LayerSpec.model_validate(spec).weight_shapes().items()}
        for name, spec in LAYERS.items()
    }


@pytest.fixture
def positions_client(http: httpx.Client, weights: dict[str, dict[str, Array]]) -> Iterator[httpx.Client]:
    """A client of the shared server, which has these layers during a test."""
    for name, spec in LAYERS.items():
        body = {"spec": spec, "weights": {part: array.tolist() for part, array in weights[name].items()}}
        answer = http.put(f"/layers/{name}", json=body)
        assert answer.is_success, answer.text
    yield http
    for name in LAYERS:
        http.delete(f"/layers/{name}")


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in fields.items()}


def coordinates(*shape: int) -> Array:
    return RNG.uniform(-5, 20, shape)


CALLS = {
    "images": ("images", {"query": QUERY, "positions": coordinates(2, 7, 2)}),
    "one for all items": ("images", {"query": QUERY, "positions": coordinates(1, 7, 2)}),
    "without a batch": ("images", {"query": QUERY[0], "positions": coordinates(7, 2)}),
    "cross": (
        "images",
        {"query": QUERY, "key": KEY, "positions": coordinates(2, 7, 2), "key_positions": coordinates(1, 5, 2), "query_offset": 0},
    ),
    "three axes": ("text", {"query": QUERY, "positions": coordinates(2, 7, 3), "causal": True}),
    "three axes of text": ("text", {"query": QUERY, "causal": True}),
    "one axis": ("line", {"query": QUERY, "positions": coordinates(2, 7), "causal": True, "window": {"left": 3, "right": None}}),
    "one axis without a batch": ("line", {"query": QUERY[0], "positions": coordinates(7)}),
    "grid": ("grid", {"query": QUERY}),
    "part of a grid": ("grid", {"query": QUERY[:, :3], "key": KEY, "query_offset": 6, "softcap": 2.0}),
    "offsets": ("grid", {"query": QUERY, "key": KEY, "query_offset": np.array([0, 3])}),
    "table": ("swin", {"query": QUERY, "block_keys": RNG.integers(0, 2, (2, 7))}),
    "part of a table": ("swin", {"query": QUERY[:, :3], "key": KEY, "query_offset": 10}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_agree_with_the_reference(positions_client: httpx.Client, weights: dict[str, dict[str, Array]], name: str) -> None:
    layer, fields = CALLS[name]
    expected = attend(LayerSpec.model_validate(LAYERS[layer]), weights[layer], **fields)
    for outputs in (["output", "attention_weights"], ["output"]):
        answer = positions_client.post("/attend", json={"layer": layer, "outputs": outputs, **as_json(fields)})
        assert answer.status_code == 200, answer.text
        for output in outputs:
            np.testing.assert_allclose(answer.json()[output], getattr(expected, output), rtol=0, atol=1e-11)
    assert positions_client.post("/attend/plan", json={"layer": layer, **as_json(fields)}).json()["admitted"]


def test_positions_in_bytes_are_those_in_text(positions_client: httpx.Client) -> None:
    layer, fields = CALLS["cross"]
    tensors = {name: x for name, x in fields.items() if isinstance(x, np.ndarray)}
    members = {"layer": layer, "query_offset": 0, "reproducible": True}
    expected = positions_client.post("/attend", json={**as_json(fields), **members}).json()["output"]
    body = save(tensors, {"request": json.dumps(members)})
    np.testing.assert_array_equal(load(positions_client.post("/attend", content=body, headers=MEDIA).content)["output"], expected)
    announced = {tensor["name"]: tensor for tensor in positions_client.get(f"/v2/models/{layer}").json()["inputs"]}
    for name in ("positions", "key_positions"):
        assert announced[name] == {"name": name, "datatype": "FP64", "shape": [-1, -1, 2]}
    parameters = {"parameters": {"query_offset": 0}}
    answers = [positions_client.post(f"/v2/models/{layer}/infer", json={"inputs": in_json(**tensors), **parameters})]
    content, headers = in_bytes(parameters, **tensors)
    answers.append(positions_client.post(f"/v2/models/{layer}/infer", content=content, headers=headers))
    for answer in answers:
        np.testing.assert_allclose(read(answer).arrays["output"], expected, rtol=0, atol=1e-12)


def test_sequences_in_one_query_have_their_own_positions_and_grids(positions_client: httpx.Client) -> None:
    """Four and three rows: as calls of their own."""
    rows, key, lengths = QUERY[0], RNG.standard_normal((5, 21)), {"query_lengths": [4, 3], "key_lengths": [2, 3]}
    where, of_keys = coordinates(7, 2), coordinates(5, 2)
    images = {"query": rows, "key": key, "positions": where, "key_positions": of_keys, "query_offset": 0}
    grids = {"query": rows, "key": key, "query_offset": 5}
    for layer, fields in (("images", images), ("grid", grids)):
        answer = positions_client.post("/attend", json={"layer": layer, "outputs": ["output"], **as_json(fields), **lengths})
        assert answer.status_code == 200, answer.text
        for q, k in ((slice(0, 4), slice(0, 2)), (slice(4, 7), slice(2, 5))):
            own = {name: (x[k if name.startswith("key") else q] if isinstance(x, np.ndarray) else x) for name, x in fields.items()}
            expected = positions_client.post("/attend", json={"layer": layer, "outputs": ["output"], **as_json(own)}).json()["output"]
            np.testing.assert_allclose(answer.json()["output"][q], expected, rtol=0, atol=1e-12)


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "missing": ("images", {"query": QUERY}, "/positions", "the positions of the queries"),
    "of one axis": (
        "images",
        {"query": QUERY, "positions": coordinates(2, 7)},
        "/positions",
        "shape [2, 7, 2], 2 coordinates for each row",
    ),
    "of three axes": ("images", {"query": QUERY, "positions": coordinates(2, 7, 3)}, "/positions", "shape [2, 7, 2], 2 coordinates"),
    "of an axis too many": (
        "line",
        {"query": QUERY, "positions": coordinates(2, 7, 1)},
        "/positions",
        "shape [2, 7], one number for each row",
    ),
    "of other rows": ("images", {"query": QUERY, "positions": coordinates(2, 6, 2)}, "/positions", "[2, 7]"),
    "of other items": ("images", {"query": QUERY, "positions": coordinates(3, 7, 2)}, "/positions", "[2, 7]"),
    "without rope": ("grid", {"query": QUERY, "positions": coordinates(2, 7)}, "/positions", "does not rotate by them"),
    "of keys alone": ("text", {"query": QUERY, "key_positions": coordinates(2, 7, 3)}, "/key_positions", "positions in addition"),
    "of queries alone": (
        "text",
        {"query": QUERY, "key": KEY, "positions": coordinates(2, 7, 3)},
        "/key_positions",
        "positions of the keys",
    ),
    "of keys that are queries": (
        "text",
        {"query": QUERY, "positions": coordinates(2, 7, 3), "key_positions": coordinates(2, 7, 3)},
        "/key_positions",
        "since the key is the query",
    ),
    "of too large a number": ("line", {"query": QUERY, "positions": np.full((2, 7), 1e300)}, "/positions/0/0", "to 2147483648"),
    "of text": ("images", {"query": QUERY, "positions": [[["a", 1]]]}, "/positions/0/0/0", "a number"),
    "too many tokens": ("grid", {"query": np.zeros((1, 11, 21))}, "/query", "10 tokens"),
    "too many keys": ("grid", {"query": QUERY, "key": np.zeros((2, 11, 21)), "query_offset": 0}, "/key", "10 tokens"),
    "beyond the grid": ("grid", {"query": QUERY, "query_offset": 4}, "/query_offset", "10 tokens"),
    "one beyond the grid": ("grid", {"query": QUERY, "query_offset": [0, 4]}, "/query_offset", "10 tokens"),
    "before the grid": ("grid", {"query": QUERY, "query_offset": -1}, "/query_offset", "10 tokens"),
    "at the end": ("grid", {"query": QUERY, "query_offset": "end"}, "/query_offset", "10 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_positions_are_refused_with_a_pointer(positions_client: httpx.Client, name: str) -> None:
    layer, fields, at, expected = REFUSED[name]
    answer = positions_client.post("/attend", json={"layer": layer, **as_json(fields)})
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["errors"]
    assert problem["at"] == at
    assert expected in problem["expected"]


def test_positions_beyond_the_models_maximum_are_refused(positions_client: httpx.Client) -> None:
    assert positions_client.put("/layers/line", json={"spec": {**LINE, "rope": {"max_length": 9}}}).is_success
    answer = positions_client.post("/attend", json={"layer": "line", **as_json({"query": QUERY[0], "positions": np.arange(3.0, 10)})})
    assert answer.json()["errors"] == [
        {
            "at": "/positions",
            "expected": 'positions below 9, beyond which this model rotates by other frequencies, for layer "line"',
            "got": "9.0",
        }
    ]


def test_sequences_in_one_query_are_aligned_one_by_one(positions_client: httpx.Client) -> None:
    """The totals of queries and keys are equal, those of a sequence are not. The maximum length applies to each sequence."""
    body = {"layer": "line", "query": QUERY[0, :5].tolist(), "key": KEY[0].tolist(), "query_lengths": [2, 3], "outputs": ["output"]}
    answer = positions_client.post("/attend", json={**body, "key_lengths": [3, 2]})
    assert answer.json()["errors"][0]["at"] == "/query_offset"
    assert positions_client.post("/attend", json={**body, "key_lengths": [3, 2], "query_offset": 0}).is_success
    assert positions_client.post("/attend", json={**body, "key_lengths": [2, 3]}).is_success
    assert positions_client.put("/layers/line", json={"spec": {**LINE, "rope": {"max_length": 3}}}).is_success
    assert positions_client.post("/attend", json={**body, "key_lengths": [2, 3]}).is_success
    assert positions_client.post("/attend", json={**body, "key_lengths": [1, 4], "query_offset": 0}).status_code == 422


def test_the_metric_single_head_is_refused_for_a_layer_with_a_grid_bias(positions_client: httpx.Client) -> None:
    answer = positions_client.post("/attend/analysis", json={"layer": "grid", "query": QUERY.tolist(), "metrics": ["single_head"]})
    assert "grid_bias" in answer.json()["errors"][0]["expected"]
