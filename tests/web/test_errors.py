"""Replies when memory runs out, an unexpected exception is raised, or a parameter has a wrong value or is unknown."""

import asyncio
import re
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Query
from starlette.responses import JSONResponse, Response

from attend.serving import layer_requests
from attend.serving.layers.registry import LayerRegistry
from attend.serving.requests import Request
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.endpoints import PUBLIC
from attend.web.requests import HttpRequest
from support.app import application

QUERY = {"query": [[0.5] * 4]}
V2 = {"inputs": [{"name": "query", "shape": [1, 1, 4], "datatype": "FP32", "data": [0.5] * 4}]}
LOAD = {"parameters": {"config": '{"d_model": 8, "num_heads": 2}'}}
TORCH = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
PLACES: list[tuple[str, str, Any, Any, str]] = [  # of each a request, and what fails on its way
    ("POST", "/attend", QUERY, Request, "take_body"),
    ("POST", "/attend/analysis", {**QUERY, "metrics": ["entropy"]}, Request, "take_body"),
    ("POST", "/attend/plan", QUERY, Request, "take_body"),
    ("POST", "/attend/figure", {**QUERY, "figure": {}}, Request, "take_body"),
    ("POST", "/words", {"text": "a cat"}, Request, "take_body"),
    ("POST", "/words/tokens", {"tokenizer": "{}", "text": "a cat"}, Request, "take_body"),
    ("PUT", "/layers/new", {"spec": {"d_model": 8, "num_heads": 2}}, LayerRegistry, "make"),
    ("GET", "/layers/default/weights", None, layer_requests, "write_layer_file"),
    ("POST", "/v2/models/default/infer", V2, Request, "take_body"),
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


def test_an_unknown_query_parameter_is_refused_by_every_endpoint_but_probes_and_pages(http: httpx.Client) -> None:
    """Load balancers add parameters to probes, and browsers and caches to pages. The body has none, so there is no pointer. The OpenAPI
    document has the status of the refusal."""
    app = create_app(Settings(access_log=False))
    paths = app.openapi()["paths"]
    for endpoint in app.table:
        path = re.sub(r"\{\w+\}", "none", endpoint.path)
        reply = http.request(endpoint.method, path, params={"a": "1"}, json={} if endpoint.body else None)
        if re.match(r"/$|/health/|/metrics$|/page/|/docs|/openapi.json$|/v2/health/|.*/ready$", endpoint.path):
            assert reply.status_code in (200, 404), path  # 404: nothing has the name `none`
        else:
            assert reply.status_code == (400 if path.startswith("/v2") else 422), path
            assert "a query parameter" in reply.text or "no query parameters" in reply.text, path
            assert str(reply.status_code) in paths[endpoint.path][endpoint.method.lower()]["responses"], path


def test_a_parameter_with_a_wrong_value_is_422_and_named() -> None:
    """Parameters of the path and the query of any endpoint. They have no pointer, since they are not in the body."""
    app = create_app(Settings(access_log=False))

    @app.table.add("GET", "/rows/{row}", PUBLIC)
    async def get_row(
        request: HttpRequest, row: int, head: int, causal: bool, count: Annotated[int, Query(ge=2)], scale: float = 0.5
    ) -> Response:
        return JSONResponse([row, head, causal, count, scale])

    async def ask(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get(path)

    assert asyncio.run(ask("/rows/7?head=3&causal=true&count=2")).json() == [7, 3, True, 2, 0.5]
    reply = asyncio.run(ask("/rows/first?causal=maybe&count=1&scale=wide"))
    assert reply.status_code == 422 and reply.headers["content-type"] == "application/problem+json"
    problems = reply.json()["errors"]
    assert {problem["at"] for problem in problems} == {""}
    assert {problem["expected"]: problem["got"] for problem in problems} == {
        "an integer as the path parameter row": '"first"',
        "the query parameter head": "nothing",
        "a number as the query parameter scale": '"wide"',
        "true or false as the query parameter causal": '"maybe"',
        "at least 2 as the query parameter count": '"1"',
    }
    reply = asyncio.run(ask("/rows/7?head=3&head=3&causal=true&count=2&haed=3"))
    assert reply.status_code == 422
    assert {problem["expected"]: problem["got"] for problem in reply.json()["errors"]} == {
        "a query parameter among head, causal, count, scale": '"haed" (did you mean head?)',
        "the query parameter head once": "it twice",
    }
