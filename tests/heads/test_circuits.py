"""GET /layers/{name}/circuits against the matrices themselves, formed in float64."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from attend import Client
from attend.errors import CallerGone
from attend.heads.circuits import CircuitsOperation
from attend.limits import ServingLimits
from attend.serving import layer_requests
from attend.serving.cost import predict_circuits
from attend.serving.layer_requests import layer_circuits
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.spec import LayerSpec

SPECS: dict[str, dict[str, Any]] = {
    "plain": {"d_model": 21, "num_heads": 3, "seed": 1},
    "grouped": {"d_model": 17, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "value_head_dim": 3, "dtype": "float64", "seed": 2},
    "wide heads": {"d_model": 5, "num_heads": 2, "head_dim": 11, "dtype": "float64", "seed": 3},
    "cross": {"d_model": 13, "num_heads": 2, "head_dim": 4, "key_dim": 7, "value_dim": 11, "output_dim": 13, "dtype": "float64"},
    "half": {"d_model": 20, "num_heads": 2, "dtype": "bfloat16", "rope": {}, "seed": 4},
}


def ratio(matrix: Any) -> float:
    if matrix.shape[0] != matrix.shape[1]:
        return float("nan")
    eigenvalues = np.linalg.eigvals(matrix)
    return float(eigenvalues.sum().real / np.abs(eigenvalues).sum())


@pytest.mark.parametrize("name", SPECS)
def test_circuits_are_those_of_the_whole_matrices(client: Client, name: str) -> None:
    layer = client.put_layer(f"circuits-{name.replace(' ', '-')}", SPECS[name])
    weights = {key: x.astype(np.float64) for key, x in client.layer_weights(layer.name).items()}
    found, spec = client.circuits(layer.name), layer.spec
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        rows, kv_rows = (slice(i * spec.head_dim, (i + 1) * spec.head_dim) for i in (head, kv))
        value_rows, columns = (slice(i * spec.value_head_dim, (i + 1) * spec.value_head_dim) for i in (kv, head))
        qk = spec.scale * weights["query.weight"][rows].T @ weights["key.weight"][kv_rows]
        ov = weights["output.weight"][:, columns] @ weights["value.weight"][value_rows]
        for prefix, score, matrix, rank in (
            ("qk", "matching_score", qk, spec.head_dim),
            ("ov", "copying_score", ov, spec.value_head_dim),
        ):
            expected = np.linalg.svd(matrix, compute_uv=False)[: min(rank, *matrix.shape)]
            np.testing.assert_allclose(found[f"{prefix}_singular_values"][head], expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found[score][head], ratio(matrix), rtol=1e-7, atol=1e-9)
    client.delete_layer(layer.name)


def test_a_head_that_copies_and_one_that_negates(client: Client) -> None:
    """The identity, cut into heads, has 1; its negative -1; of a head of zeros the scores are undefined."""
    one = np.eye(9)
    signed = one.copy()
    signed[:, 3:6] *= -1
    signed[:, 6:] = 0
    spec = {"d_model": 9, "num_heads": 3, "bias": False, "dtype": "float64"}
    client.put_layer("copies", spec, {f"{name}.weight": one for name in ("query", "key", "value")} | {"output.weight": signed * 1e300})
    found = client.circuits("copies")
    np.testing.assert_array_equal(found["copying_score"], [1, -1, np.nan])
    np.testing.assert_array_equal(found["matching_score"], [1, 1, 1])
    np.testing.assert_allclose(found["ov_singular_values"], 1e300 * np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0]]), rtol=1e-12)
    client.delete_layer("copies")


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"projections": False}, "a layer without projections"),
        ({"latent": {"key_value_rank": 3, "rope_key_dim": 2}, "rope": {"dims": 2}}, "a layer with latent"),
        ({"differential": {"lambda_init": 0.8}}, "a layer with differential"),
    ],
)
def test_layers_without_these_matrices_are_refused(http: httpx.Client, fields: dict[str, Any], got: str) -> None:
    assert http.put("/layers/circuitless", json={"spec": {"d_model": 8, "num_heads": 2, **fields}}).status_code == 201
    answer = http.get("/layers/circuitless/circuits")
    http.delete("/layers/circuitless")
    assert (answer.status_code, answer.json()["errors"][0]["got"]) == (422, got)
    assert http.get("/layers/circuitless/circuits").status_code == 404


def test_circuits_are_admitted_and_wait_like_calls(start_here: Any) -> None:
    """A head of 4096 numbers takes minutes; a layer of 40 heads of 64 takes less than a call of 64 rows to a layer of that size."""
    wide, usual = LayerSpec(d_model=4096, num_heads=1), LayerSpec(d_model=2560, num_heads=40)
    assert predict_circuits(wide, 1).operations > ServingLimits().max_operations > 100 * predict_circuits(usual, 40).operations
    url = start_here(max_operations=10**6, layers={"wide": {"d_model": 32, "num_heads": 1}, "small": {"d_model": 32, "num_heads": 8}})
    with httpx.Client(base_url=url) as http:
        refused = http.get("/layers/wide/circuits")
        assert (refused.status_code, refused.json()["errors"][0]["expected"]) == (
            413,
            "at most 1000000 predicted operations (max_operations)",
        )
        before = batches(http)
        assert http.get("/layers/small/circuits").status_code == 200
        assert batches(http) == before + 1  # of the device, not of the threads that decode bodies
        late = http.get("/layers/small/circuits", headers={"X-Request-Timeout": "1e-9"})
        assert late.status_code == 504


@pytest.mark.parametrize("at_once", [1, 4], ids=["a head at a time", "four, and two"])
def test_circuits_are_computed_a_few_heads_at_a_time_until_the_caller_leaves(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Calls of others are computed in between; the numbers are those of all heads together."""
    computed: list[range] = []
    run = CircuitsOperation.run

    def counted(operation: CircuitsOperation, *arguments: Any) -> Any:
        computed.append(operation.heads)
        return run(operation, *arguments)

    async def read() -> None:
        service, spec = open_service("cpu"), LayerSpec(**SPECS["grouped"])
        await service.start({"grouped": spec})
        whole = await layer_circuits(service, "grouped", Request(b""))
        monkeypatch.setattr(layer_requests, "CIRCUITS_OPERATIONS", at_once * predict_circuits(spec, 1).operations)
        monkeypatch.setattr(CircuitsOperation, "run", counted)
        for name, numbers in json.loads(await layer_circuits(service, "grouped", Request(b""))).items():
            if name != "layer":
                np.testing.assert_allclose(numbers, json.loads(whole)[name], rtol=1e-12)
        assert computed == [range(first, min(first + at_once, 6)) for first in range(0, 6, at_once)]
        computed.clear()
        with pytest.raises(CallerGone):
            await layer_circuits(service, "grouped", Request(b"", gone=lambda: bool(computed)))
        assert len(computed) == 1
        service.close()

    asyncio.run(read())


def test_a_head_too_wide_for_its_circuits_is_refused(http: httpx.Client) -> None:
    """Nothing stops the computation of a matrix's eigenvalues, so the width of a head is bounded."""
    http.put("/layers/widest", json={"spec": {"d_model": 2, "num_heads": 1, "head_dim": 513}})
    refused = http.get("/layers/widest/circuits")
    http.delete("/layers/widest")
    assert (refused.status_code, refused.json()["errors"][0]["got"]) == (413, "513")


def batches(http: httpx.Client) -> float:
    (line,) = (line for line in http.get("/metrics").text.splitlines() if line.startswith("attend_batch_calls_count"))
    return float(line.split()[1])
