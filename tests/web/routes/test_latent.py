"""The outputs `latent` and `rope_key` of layers with latent attention, over HTTP: the part of each key that a cache has to store."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from attend.attention.reference.forward import attend
from attend.client import Client
from attend.spec import LayerSpec
from attend.tensors import Array
from support.server import Server
from support.v2 import in_bytes, in_json, read

RNG = np.random.default_rng(29)
RANK, SHARED, HEADS, KEPT, WIDTH = (
    7,
    4,
    3,
    5,
    2,
)  # numbers of a latent vector; of a key that all heads share; heads; own numbers of a key, a value
SPEC = {
    "d_model": 11,
    "num_heads": HEADS,
    "head_dim": SHARED + KEPT,
    "value_head_dim": WIDTH,
    "key_dim": 13,
    "latent": {"query_rank": 5, "key_value_rank": RANK, "rope_key_dim": SHARED, "bias": True},
    "rope": {"dims": SHARED, "theta": 50.0},
    "dtype": "float64",
}
NAMES = ["latent", "rope_key"]
CALLS: dict[str, dict[str, Any]] = {
    "self": {"query": RNG.standard_normal((2, 3, 11)), "key": RNG.standard_normal((2, 5, 13)), "causal": True, "query_offset": "end"},
    "value": {name: RNG.standard_normal((2, n, d)) for name, n, d in (("query", 3, 11), ("key", 5, 13), ("value", 5, 13))}
    | {"query_offset": 2},
    "unbatched": {"query": RNG.standard_normal((3, 11)), "key": RNG.standard_normal((5, 13)), "query_offset": 0},
    "positions": {"query": RNG.standard_normal((2, 3, 11)), "key": RNG.standard_normal((2, 5, 13)), "query_offset": 0}
    | {"positions": np.array([[3.0, 1.0, 2.0]]), "key_positions": RNG.uniform(-5, 20, (2, 5))},
}


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    return {name: RNG.standard_normal(shape) / 3 for name, shape in LayerSpec.model_validate(SPEC).weight_shapes().items()}


@pytest.fixture
def client(server: Server, weights: dict[str, Array]) -> Iterator[Client]:
    with Client(server.url) as one:
        one.put_layer("latent", SPEC, weights)
        yield one
        one.delete_layer("latent")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("reply", [{}, {"reply": {"form": "nested"}}], ids=["safetensors", "json"])
def test_latent_outputs_are_those_of_the_reference(client: Client, weights: dict[str, Array], call: str, reply: dict[str, Any]) -> None:
    expected = attend(LayerSpec.model_validate(SPEC), weights, **CALLS[call])
    got = client.attend(**CALLS[call], **reply, layer="latent", outputs=NAMES)
    assert got.latent.shape[-2:] == (5, RANK) and got.rope_key.shape[-2:] == (5, SHARED)
    for name in NAMES:
        np.testing.assert_allclose(got[name], getattr(expected, name), rtol=0, atol=1e-12)


def test_keys_and_values_follow_from_the_latent_outputs(client: Client, weights: dict[str, Array]) -> None:
    """key = [rope_key; W latent + b], value = W latent + b: a server that keeps these two of each key needs nothing else of it."""
    names = [*NAMES, "key_projection", "value_projection"]
    got = client.attend(**CALLS["self"], layer="latent", outputs=names)
    own, value = (
        (got.latent @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).reshape(2, 5, HEADS, -1).swapaxes(1, 2)
        for name in ("key", "value")
    )
    shared = np.broadcast_to(got.rope_key[:, None], (2, HEADS, 5, SHARED))
    np.testing.assert_allclose(got.key_projection, np.concatenate([shared, own], axis=-1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.value_projection, value, rtol=0, atol=1e-12)


def test_several_sequences_in_one_query_have_the_rows_of_all(client: Client) -> None:
    query, key = RNG.standard_normal((5, 11)), RNG.standard_normal((8, 13))
    together = client.attend(query, key, layer="latent", query_lengths=[2, 3], key_lengths=[7, 1], query_offset=0, outputs=NAMES)
    first = client.attend(query[:2], key[:7], layer="latent", query_offset=0, outputs=NAMES)
    last = client.attend(query[2:], key[7:], layer="latent", query_offset=0, outputs=NAMES)
    for name in NAMES:
        np.testing.assert_allclose(together[name], np.concatenate([first[name], last[name]]), rtol=0, atol=1e-12)


def test_the_plan_and_v2_have_the_shapes_of_latent_outputs(client: Client, http: httpx.Client) -> None:
    call = {"query": CALLS["self"]["query"], "key": CALLS["self"]["key"]}
    body = {name: x.tolist() for name, x in call.items()} | {"layer": "latent", "query_offset": 0, "outputs": NAMES}
    plan = http.post("/attend/plan", json=body).json()
    assert plan["outputs"]["latent"] == {"shape": [2, 5, RANK], "datatype": "FP64", "bytes": 2 * 5 * RANK * 8}
    assert plan["outputs"]["rope_key"]["shape"] == [2, 5, SHARED]
    described = {tensor["name"]: tensor["shape"] for tensor in http.get("/v2/models/latent").json()["outputs"]}
    assert described["latent"] == [-1, -1, RANK] and described["rope_key"] == [-1, -1, SHARED]
    outputs = {"outputs": [{"name": name} for name in NAMES], "parameters": {"query_offset": 0}}
    content, headers = in_bytes(outputs, **call)
    expected = client.attend(**call, layer="latent", query_offset=0, outputs=NAMES)
    for answer in (
        http.post("/v2/models/latent/infer", json={**outputs, "inputs": in_json(**call)}),
        http.post("/v2/models/latent/infer", content=content, headers=headers),
    ):
        for name, array in read(answer).arrays.items():
            np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "got"),
    [("latent", '"latent"'), ("rope_key", '"rope_key"'), ("key_projektion", '"key_projektion" (did you mean key_projection?)')],
)
def test_layers_without_an_output_refuse_it_with_the_list_of_theirs(http: httpx.Client, name: str, got: str) -> None:
    assert http.put("/layers/other", json={"spec": SPEC | {"latent": None, "rope": None, "value_dim": 13}}).is_success
    body = {"layer": "other", "query": [[0.0] * 11], "key": [[1.0] * 13], "query_offset": 0, "outputs": ["output", name]}
    answers = [http.post(path, json=body) for path in ("/attend", "/attend/plan")]
    described = {tensor["name"] for tensor in http.get("/v2/models/other").json()["outputs"]}
    http.delete("/layers/other")
    for answer in answers:
        assert answer.status_code == 422, answer.text
        (error,) = answer.json()["errors"]
        assert (error["at"], error["got"]) == ("/outputs/1", got)
        listed = error["expected"].removeprefix("one of ").partition(", which")[0].split(", ")
        assert {*listed} == described | {"query_gradient", "key_gradient", "value_gradient"} and name not in described
