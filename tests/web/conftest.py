"""Layers that the tests over HTTP call, and a valid request whose reply is computed here."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from support.raw_http import connect
from support.server import Server, fork_server

IDENTITY = {f"{name}.weight": np.eye(4).tolist() for name in ("query", "key", "value", "output")}
LAYERS: dict[str, dict[str, Any]] = {
    "tiny": {"spec": {"d_model": 4, "num_heads": 2, "seed": 3}},
    "cross": {"spec": {"d_model": 4, "num_heads": 2, "key_dim": 3, "value_dim": 5, "seed": 4}},
    "half": {"spec": {"d_model": 4, "num_heads": 2, "seed": 5, "dtype": "float16"}},
    "thin": {"spec": {"d_model": 2, "num_heads": 2, "seed": 6}},
    "same": {"spec": {"d_model": 4, "num_heads": 2, "bias": False}, "weights": IDENTITY},
    "exact": {"spec": {"d_model": 4, "num_heads": 2, "bias": False, "dtype": "float64"}, "weights": IDENTITY},
}


@pytest.fixture(scope="session")
def layers(http: httpx.Client) -> Iterator[dict[str, dict[str, Any]]]:
    """Name -> reply of PUT. They are removed afterwards."""
    made = {}
    for name, document in LAYERS.items():
        answer = http.put(f"/layers/{name}", json=document)
        assert answer.is_success, answer.text
        made[name] = answer.json()
    yield made
    for name in LAYERS:
        assert http.delete(f"/layers/{name}").status_code == 204


@pytest.fixture(scope="session")
def assert_still_answers(http: httpx.Client, layers: dict[str, Any]) -> Callable[[], None]:
    """Asserts that the server answers a valid request correctly. Weights are the identity: the reply is computed here."""
    query = np.array([[0.5, -1.0, 2.0, 0.25], [1.5, 0.0, -0.5, 1.0], [-1.0, 0.75, 1.25, -2.0]])
    heads = query.reshape(3, 2, 2).transpose(1, 0, 2)
    exponentials = np.exp(heads @ heads.transpose(0, 2, 1) / np.sqrt(2))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    output = (weights @ heads).transpose(1, 0, 2).reshape(3, 4)
    body = {"layer": "same", "query": query.tolist()}

    def check() -> None:
        answer = http.post("/attend", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["layer"] == {"name": "same", "fingerprint": layers["same"]["fingerprint"]}
        np.testing.assert_allclose(answer.json()["attention_weights"], weights, rtol=0, atol=1e-6)
        np.testing.assert_allclose(answer.json()["output"], output, rtol=0, atol=1e-6)

    return check


@pytest.fixture(scope="session")
def short_timeout_server() -> Iterator[Server]:
    """A server with a client timeout of half a second. At the end it exits at once, although a connection is idle."""
    server = fork_server("--client-timeout", "0.5")
    yield server
    with connect(server) as idle:
        idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert server.stop() == 0
