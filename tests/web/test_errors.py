"""Replies when memory runs out or an unexpected exception is raised."""

import asyncio
from typing import Any

import pytest

from attend.serving import layer_requests
from attend.serving.engine import Engine
from attend.serving.layers.registry import LayerRegistry
from attend.serving.requests import RawRequest
from attend.settings import Settings
from support.app import application

QUERY = {"query": [[0.5] * 4]}
V2 = {"inputs": [{"name": "query", "shape": [1, 1, 4], "datatype": "FP32", "data": [0.5] * 4}]}
LOAD = {"parameters": {"config": '{"d_model": 8, "num_heads": 2}'}}
TORCH = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
PLACES: list[tuple[str, str, Any, Any, str]] = [  # of each a request, and what fails on its way
    ("POST", "/attend", QUERY, Engine, "decode"),
    ("POST", "/attend/analysis", {**QUERY, "metrics": ["entropy"]}, Engine, "decode"),
    ("POST", "/attend/plan", QUERY, Engine, "decode"),
    ("POST", "/attend/figure", {**QUERY, "figure": {}}, Engine, "decode"),
    ("POST", "/words", {"text": "a cat"}, RawRequest, "take_body"),
    ("POST", "/words/tokens", {"tokenizer": "{}", "text": "a cat"}, RawRequest, "take_body"),
    ("PUT", "/layers/new", {"spec": {"d_model": 8, "num_heads": 2}}, LayerRegistry, "make"),
    ("GET", "/layers/default/weights", None, layer_requests, "write_layer_file"),
    ("POST", "/v2/models/default/infer", V2, Engine, "decode"),
    ("POST", "/v2/repository/models/new/load", LOAD, LayerRegistry, "make"),
]


@pytest.mark.parametrize(("error", "status"), [(MemoryError(), 507), (TORCH, 507), (RuntimeError("a secret"), 500)])
def test_unexpected_errors_are_500_and_out_of_memory_507_in_the_endpoints_format(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 500 does not reveal the exception."""

    def fail(*args: Any, **keywords: Any) -> Any:
        raise error

    async def test() -> None:
        async with application(Settings(d_model=4, num_heads=2, access_log=False)) as client:
            for method, path, body, room, name in PLACES:
                with monkeypatch.context() as patch:
                    patch.setattr(room, name, fail)
                    answer = await client.request(method, path, json=body)
                assert answer.status_code == status, path
                assert answer.headers["content-type"] == ("application/json" if "/v2" in path else "application/problem+json"), path
                message = answer.json()["error"] if "/v2" in path else answer.json()["detail"]
                assert ("memory" in message) == (status == 507), path
                assert "secret" not in answer.text, path
            assert "attend_held_body_bytes 0.0" in (await client.get("/metrics")).text
            assert (await client.post("/attend", json=QUERY)).status_code == 200

    asyncio.run(test())
