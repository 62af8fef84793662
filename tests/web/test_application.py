"""What all requests pass: the table of endpoints and the middleware."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from attend.web.records import HttpRecord
from support.waiting import until

ROOT = Path(__file__).parent.parent.parent


def test_a_small_request_makes_fewer_than_105_python_calls() -> None:
    """In functions of this project, once it is warm. `benchmarks/calls.py --functions` lists them."""
    result = subprocess.run([sys.executable, "benchmarks/calls.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    calls, _ = result.stdout.splitlines()[-1].split()
    assert 50 < int(calls) < 105, result.stdout


def test_a_record_is_freed_with_its_request(start_here: Callable[..., str]) -> None:
    """A cycle would keep it, and the body that it leads to, until a garbage collection."""
    body = {"query": [[0.5] * 64] * 3}
    with httpx.Client(base_url=start_here(), timeout=60, headers={"connection": "close"}) as client:
        client.post("/attend", json=body)
        gc.collect()
        gc.disable()
        try:
            for path, sent in (("/attend", body), ("/attend", {"query": []}), ("/attend/plan", body), ("/nowhere", {})):
                client.post(path, json=sent)
            until(lambda: not any(isinstance(each, HttpRecord) for each in gc.get_objects()), "all records are freed")
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
