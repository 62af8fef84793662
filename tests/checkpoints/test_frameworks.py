"""Layers that frameworks saved and ran: a server reads their checkpoints by name, and its outputs agree with those of the frameworks.

Cases are in tests/golden/frameworks, each file written by the generator that it names; `tests/golden/casefile.py` says what is in them.
The real MiniLM is compared layer by layer with transformers as it runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save

from attend.checkpoints import detect, layers_in
from attend.client import Client
from attend.errors import pointer
from support import framework_cases
from support.framework_cases import CASES, FILES, LAYERS, SOURCES, array

FUSED = {"query_key_value.weight": np.ones((45, 15), np.float32), "dense.weight": np.ones((15, 15), np.float32)}
TORCH = {"in_proj_weight": np.ones((45, 15), np.float32), "out_proj.weight": np.ones((15, 15), np.float32)}


def load(path, index):
    document = json.loads(path.read_text())
    weights = {name: array(tensor) for name, tensor in document["weights"].items()}
    return weights, document["cases"][index]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_layout_is_detected_by_names_where_none_is_given(path):
    """`detect` and `layers_in` agree with how the file's layers are loaded."""
    weights, case = load(path, 0)
    layout = case["load"]["layout"]
    listed = layers_in(weights)
    assert listed
    if layout is None:
        assert detect(weights) in {name for name, _ in listed}
    else:
        assert layout in {name for name, _ in listed}


@pytest.fixture
def layers(http: httpx.Client) -> Iterator[httpx.Client]:
    """The shared server, left with the layers that it had."""
    yield http
    http.delete("/layers/original")


@pytest.mark.parametrize(("path", "index"), CASES, ids=[f"{path.stem}-{index}" for path, index in CASES])
def test_a_loaded_layer_agrees_with_the_framework_that_saved_it(layers: httpx.Client, path: Path, index: int) -> None:
    """Output, and attention weights where the framework shows them."""
    differences, tolerance = framework_cases.replay(layers, path, index)

    assert differences and max(differences.values()) <= tolerance, differences


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_number_that_is_not_finite_is_refused_at_its_place_among_the_tensors_sent(layers: httpx.Client, path: Path) -> None:
    """By the name and the axes of the tensor in the body, whatever was made of it. A tensor that is not refused is no part of the layer."""
    weights, case = load(path, 0)
    fingerprint = put_layer(layers, weights, case["load"], in_json=False).json()["fingerprint"]
    refused: list[str] = []
    for name, tensor in weights.items():
        if tensor.dtype.kind == "f" and name.replace("/", ".").startswith(case["load"]["prefix"].replace("/", ".")):
            in_json, place = bool(len(refused) % 2), tuple(length - 1 for length in tensor.shape)
            spoiled = tensor.astype(np.float64) if in_json else tensor.copy()
            spoiled[place] = 1e39 if in_json else np.nan
            answer = put_layer(layers, {**weights, name: spoiled}, case["load"], in_json)
            if answer.is_success:
                assert answer.json()["fingerprint"] == fingerprint
            else:
                assert answer.status_code == 422
                assert answer.json()["errors"][0]["at"] == pointer(["weights"] * in_json + [name, *place]), answer.text
                refused.append(name)

    assert len(refused) >= 2  # one matrix for queries, keys and values, and that of the output


def put_layer(http: httpx.Client, weights: Any, how: Any, in_json: bool) -> httpx.Response:
    query = {name: how[name] for name in ("layout", "prefix") if how[name]}
    if in_json:
        lists = {name: tensor.tolist() for name, tensor in weights.items()}
        return http.put("/layers/original", params=query, json={"spec": how["spec"], "weights": lists})
    query["spec"] = json.dumps(how["spec"])
    return http.put("/layers/original", params=query, content=save(weights), headers=framework_cases.SAFETENSORS)


def test_every_framework_has_cases_and_a_row_in_the_documentation() -> None:
    """The folder is not empty."""
    page = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()

    assert {path.stem.partition("_")[0] for path in FILES} == set(SOURCES)
    for key, source in SOURCES.items():
        assert f"| {source} |" in page, key
    assert f"| {framework_cases.MINILM} |" in page
    assert sum(path.stat().st_size for path in FILES) < 1_500_000


@pytest.mark.parametrize(
    ("weights", "spec", "at", "expected"),
    [
        (FUSED, {"num_heads": 3}, "", "as the query parameter layout"),  # BLOOM's rows, NeoX's or [q; k; v]: never guessed
        (
            TORCH | {"bias_k": np.ones((1, 1, 15), np.float32), "bias_v": np.ones((1, 1, 15), np.float32)},
            {"num_heads": 3},
            "/bias_k",
            "",
        ),
        (TORCH, {"num_heads": 3, "add_zero_attn": True}, "", "at /add_zero_attn of the spec"),
    ],
    ids=["fused", "add_bias_kv", "add_zero_attn"],
)
def test_layers_that_cannot_be_represented_are_refused(layers: httpx.Client, weights: Any, spec: Any, at: str, expected: str) -> None:
    query = {"spec": json.dumps(spec)}
    refused = layers.put("/layers/original", params=query, content=save(weights), headers=framework_cases.SAFETENSORS)

    assert refused.status_code == 422, refused.text
    problem, *_ = refused.json()["errors"]
    assert problem["at"] == at and expected in problem["expected"]


@pytest.mark.parametrize("widths", [{}, {"kdim": 11, "vdim": 13}], ids=["one matrix", "three matrices"])
def test_add_zero_attn_of_torch_is_sinks_of_zeros(layers: httpx.Client, widths: dict[str, int]) -> None:
    """The state dict does not show it, so the reply says that there are no sinks unless the caller says that there are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = torch.nn.MultiheadAttention(15, 3, batch_first=True, add_zero_attn=True, **widths).double()
        query, key, value = torch.randn(2, 5, 15).double(), *(torch.randn(2, 7, widths.get(name, 15)).double() for name in ("kdim", "vdim"))
    with torch.no_grad():
        output, weights = module(query, key, value, average_attn_weights=False)
    body = {"layer": "original", "query": query.tolist(), "key": key.tolist(), "value": value.tolist()}
    state = save({name: tensor.numpy() for name, tensor in module.state_dict().items()})
    replies = {}
    for spec in ({"num_heads": 3}, {"num_heads": 3, "sinks": True}):
        made = layers.put("/layers/original", params={"spec": json.dumps(spec)}, content=state, headers=framework_cases.SAFETENSORS)
        assert made.json()["assumed"].get("sinks") is (None if "sinks" in spec else False)
        assert made.json()["spec"]["sinks"] is ("sinks" in spec)
        replies["sinks" in spec] = layers.post("/attend", json=body).json()

    assert np.abs(np.array(replies[False]["output"]) - output.numpy()).max() > 1e-3
    assert np.abs(np.array(replies[True]["output"]) - output.numpy()).max() < 1e-12
    assert np.abs(np.array(replies[True]["attention_weights"]) - weights[..., :-1].numpy()).max() < 1e-12


@pytest.mark.checkpoint
def test_every_layer_of_a_real_model_agrees_with_transformers(start: Any) -> None:
    """Sentences of unequal length in one batch, so that most of them are padded."""
    server = start()
    mask, seen = framework_cases.run_transformers()
    assert 0 < mask.mean() < 0.8
    assert all(not layer.attention_weights.transpose(0, 3, 1, 2)[mask == 0].any() for layer in seen)  # transformers does mask

    with httpx.Client(base_url=server.url, timeout=60) as http, Client(server.url) as client:
        compared = list(framework_cases.compare_minilm(http, client, mask, seen))

    assert len(compared) == len(LAYERS)
    for number, differences in enumerate(compared):
        assert set(differences) == {"output", "attention_weights"}
        assert max(differences.values()) <= 1e-5, f"layer {number}: {differences}"
