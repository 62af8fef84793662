"""The server that the conformance suite tests: the one at `--url`, or else this project's. The suite uses HTTP and JSON alone.

    pytest tests/conformance --url http://localhost:8000 --model resnet

A model's inputs are made from its metadata, with 2 for every length that varies; `--inputs` gives them for servers whose metadata has none.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conformance.subject import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--url", help="of the server; the project's own if not given")
    group.addoption("--model", help="name of a model that it serves; `default` if not given")
    group.addoption("--inputs", help='JSON, where its metadata names none: [{"name": "x", "datatype": "FP32", "shape": [1, 3]}]')


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The server, its model, and its metadata."""
    option = request.config.getoption
    model = option("--model", None) or "default"
    own = None if option("--url", None) else request.getfixturevalue("server").url
    with httpx.Client(base_url=own or option("--url"), timeout=60) as http:
        if own:  # three inputs of three widths: one that took another's place would not fit
            model, spec = "conformance", {"d_model": 6, "num_heads": 2, "key_dim": 5, "value_dim": 7}
            http.put(f"/layers/{model}", json={"spec": spec}).raise_for_status()
        extensions = http.get("/v2").json()["extensions"]
        metadata = http.get(f"/v2/models/{model}").json()
        given = option("--inputs", None)
        inputs = json.loads(given) if given else _required(http, model, metadata, extensions)
        yield Subject(http, model, extensions, metadata, [_filled(one) for one in inputs])
        if own:
            http.delete(f"/layers/{model}").raise_for_status()


def _required(http: httpx.Client, model: str, metadata: dict[str, Any], extensions: list[str]) -> list[dict[str, Any]]:
    """The inputs that the configuration does not call optional."""
    config = http.get(f"/v2/models/{model}/config").json() if "model_configuration" in extensions else {}
    optional = {tensor["name"] for tensor in config.get("input", []) if tensor.get("optional")}
    return [tensor for tensor in metadata.get("inputs", []) if tensor["name"] not in optional]


def _filled(tensor: dict[str, Any]) -> dict[str, Any]:
    shape = [2 if length == -1 else length for length in tensor["shape"]]
    data = [(7 * i % 11) / 8 for i in range(math.prod(shape))]
    return {"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"], "data": data}
