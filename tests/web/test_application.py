"""What all requests pass: the table of endpoints and the middleware."""

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton

from attend.serving.codec_pool import CodecPool
from attend.serving.memory import default_limit
from attend.serving.service import ServiceOptions
from attend.serving.sessions.registry import SessionRegistry
from attend.serving.sessions.session import Session
from attend.settings import Settings
from attend.web.app import create_app, service_options
from attend.web.requests import HttpRequest
from support.app import answers, serve_here
from support.waiting import until

ROOT = Path(__file__).parent.parent.parent


def test_a_small_request_makes_fewer_than_105_python_calls() -> None:
    """In functions of this project, once it is warm. `benchmarks/calls.py --functions` lists them."""
    result = subprocess.run([sys.executable, "benchmarks/calls.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    calls, _ = result.stdout.splitlines()[-1].split()
    assert 50 < int(calls) < 105, result.stdout


def test_a_record_is_freed_with_its_request(start_here: Callable[..., str]) -> None:
    """A cycle would keep it, and the body that it leads to, until a garbage collection; an error that is kept, for ever."""
    body = {"query": [[0.5] * 64] * 3}
    statuses = {
        ("POST", "/attend"): 200,
        ("POST", "/attend/plan"): 200,
        ("POST", "/attend/analysis"): 200,
        ("POST", "/v2/models/default/infer"): 400,
        ("POST", "/nowhere"): 404,
        ("PUT", "/layers/new"): 409,
        ("DELETE", "/layers/default"): 409,
        ("POST", "/v2/repository/models/default/unload"): 409,
        ("GET", "/v2/models/default/stats"): 409,
        ("GET", "/layers/nope"): 404,
        ("GET", "/sessions/nope"): 404,
    }
    with httpx.Client(base_url=start_here(workers=2), timeout=60, headers={"connection": "close"}) as client:
        client.post("/attend", json=body)
        gc.collect()
        gc.disable()
        try:
            replies = {(method, path): client.request(method, path, json=body) for method, path in statuses}
            assert {request: reply.status_code for request, reply in replies.items()} == statuses
            until(lambda: not any(isinstance(each, HttpRequest) for each in gc.get_objects()), "all records are freed")
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PROPFIND", "/attend", 405),
        ("PROPFIND", "/v2/models/default/infer/", 405),
        ("PROPFIND", "/no/such/page", 501),
        ("PROPFIND", "/v2/no/such/page", 501),
        ("TRACE", "/no/such/page", 404),
        ("DELETE", "/page/page.js", 405),
        ("GET", "/page/none.js", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/%2e%2e%2fapp.py", 404),
        ("GET", "/layers/default/", 404),
        ("GET", "/v2/models/default/", 200),
        ("GET", "/v2/models/default/versions/1/", 200),
        ("GET", "/v2/models/default/versions/2/ready", 404),
        ("GET", "/v2/models/stats/ready", 404),
    ],
)
def test_the_path_decides_between_404_and_405(http: httpx.Client, method: str, path: str, status: int) -> None:
    """And a method that HTTP does not define is 501 where nothing is served."""
    reply = http.request(method, path)
    assert reply.status_code == status, reply.text
    assert ("allow" in reply.headers) == (status == 405)
    assert ("error" in reply.json()) == (path.startswith("/v2") and status >= 400)


def test_head_is_answered_as_get_without_a_body(http: httpx.Client) -> None:
    """With the same headers, for functions and for files."""
    for path in ("/layers", "/v2/models/default/config/", "/page/page.js", "/docs"):
        get, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content)) and head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("path", ["/layers", "/sessions", "/v2/models/stats"])
def test_a_list_has_a_deadline(http: httpx.Client, path: str) -> None:
    assert http.get(path, headers={"X-Request-Timeout": "1e-9"}).status_code == 504
    assert http.get(path).status_code == 200


def test_the_lists_of_a_caller_wait_for_threads_as_its_requests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys, too, where the caller is the address: so that no caller delays the lists of others."""
    callers, run = [], CodecPool.run

    async def spied(pool: CodecPool, function: Callable[[], Any], size: int, caller: str) -> Any:
        callers.append(caller)
        return await run(pool, function, size, caller)

    monkeypatch.setattr(CodecPool, "run", spied)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve_here(Settings(access_log=False, session_memory=1 << 20, grpc_port=port)) as url:
        with httpx.Client(base_url=url) as client:
            for path in ("/", "/layers", "/sessions", "/v2/models/stats"):
                assert client.get(path).status_code == 200
            assert client.post("/v2/repository/index").status_code == 200
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as grpc_client:
            assert grpc_client.get_model_repository_index().models
            assert grpc_client.get_inference_statistics().model_stats
    assert len(callers) >= 6
    assert set(callers) == {"127.0.0.1"}


WITHOUT_LAYERS = {  # what answers before the layers are loaded
    *("GET /", "GET /page/{file}", "GET /metrics", "GET /health/live", "GET /openapi.json", "GET /docs", "GET /docs/{file}"),
    *("GET /layers", "GET /words", "GET /sessions", "GET /sessions/{id}", "DELETE /sessions/{id}", "PATCH /sessions/{id}"),
    *("POST /words/tokens", "POST /sessions/{id}/fork", "GET /sessions/{id}/cache"),
    *("GET /v2", "GET /v2/health/live", "GET /v2/models/stats", "POST /v2/repository/index"),
}


def test_default_settings_give_the_defaults_of_the_service() -> None:
    assert service_options(Settings()) == ServiceOptions()


def test_a_call_may_need_at_most_half_of_the_memory_at_which_the_process_ends() -> None:
    """Only with a gRPC port does it end by itself."""
    low, high = 64 << 20, 1 << 40
    assert service_options(Settings(max_resident_bytes=low)).limits.max_memory_bytes == Settings().max_memory_bytes
    assert service_options(Settings(max_resident_bytes=low, grpc_port=1)).limits.max_memory_bytes == low // 2
    assert service_options(Settings(max_resident_bytes=high, grpc_port=1)).limits.max_memory_bytes == Settings().max_memory_bytes
    app = create_app(Settings(grpc_port=1, access_log=False))
    assert app.state.service.limits.max_memory_bytes <= default_limit(1) // 2
    app.state.service.close()


def test_sessions_are_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which changes them; a list of many is written in a thread."""
    describe = SessionRegistry.info_of

    def described(sessions: SessionRegistry, session: Session) -> Any:
        asyncio.get_running_loop()
        return describe(sessions, session)

    monkeypatch.setattr(SessionRegistry, "info_of", described)
    *made, listed = answers(
        Settings(access_log=False, session_memory=1 << 24),
        *[{"method": "POST", "url": "/sessions"}] * 3,
        {"url": "/sessions", "method": "GET"},
    )
    assert [session["id"] for session in listed.json()["sessions"]] == [answer.json()["id"] for answer in made]


def test_what_needs_a_layer_is_refused_before_the_layers_are_loaded() -> None:
    """With 503: a layer that is not there yet would be taken for a missing one. /health/ready says that the server is not ready."""
    endpoints = [f"{endpoint.method} {endpoint.path}" for endpoint in create_app(Settings()).table]

    replies = answers_before_start(Settings(session_memory=1 << 20), *endpoints)

    refused = {endpoint for endpoint, reply in zip(endpoints, replies, strict=True) if reply.status_code == 503}
    assert set(endpoints) - refused == WITHOUT_LAYERS


async def _before_start(settings: Settings, endpoints: tuple[str, ...]) -> list[httpx.Response]:
    transport = httpx.ASGITransport(create_app(settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return [await client.request(*endpoint.split()) for endpoint in endpoints]


def answers_before_start(settings: Settings, *endpoints: str) -> list[httpx.Response]:
    """The replies of an application that has not been started."""
    return asyncio.run(_before_start(settings, endpoints))
