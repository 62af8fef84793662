"""Requests from web pages of other sites: allowed hosts and origins, and CORS."""

import re
from pathlib import Path

import httpx
import pytest

from attend.settings import Settings
from attend.web.guard import hostname
from attend.web.keys import make_key, write_keys
from support.app import answers

QUERY = {"query": [[0.25] * 64] * 3}
PAGE = "http://evil.example"
FOREIGN: list[tuple[str, dict[str, str], int]] = [
    ("POST", {"Host": "evil.example"}, 403),
    ("GET", {"Host": "evil.example:8000"}, 403),
    ("POST", {"Host": "localhost.evil.example"}, 403),
    ("POST", {"Host": "127.0.0.1.evil.example"}, 403),
    ("POST", {"Origin": PAGE}, 403),
    ("PUT", {"Origin": PAGE}, 403),
    ("POST", {"Origin": "null"}, 403),
    ("GET", {"Origin": PAGE}, 200),  # it cannot read the answer
    ("POST", {"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
    ("POST", {"Host": "[::1]:80"}, 200),
    ("POST", {"Host": "LOCALHOST"}, 200),
    ("POST", {"Host": "127.0.0.1:8000"}, 200),
]


@pytest.mark.parametrize(("method", "headers", "status"), FOREIGN, ids=[f"{m} {h}" for m, h, _ in FOREIGN])
def test_requests_from_pages_of_other_sites_are_refused(http: httpx.Client, method: str, headers: dict[str, str], status: int) -> None:
    """On loopback without keys: by a name that resolves to this server, and by posting across origins."""
    path = {"POST": "/attend", "GET": "/layers", "PUT": "/layers/stolen"}[method]
    answer = http.request(method, path, headers=headers, json=None if method == "GET" else QUERY)
    assert answer.status_code == status
    if status == 403:
        assert re.search(r"--(allowed-hosts|cors-origins)", answer.json()["detail"])


def test_hosts_and_origins_can_be_allowed() -> None:
    """A proxy's name in Host; a page of another origin, which gets CORS headers, also for its preflight."""
    settings = Settings(allowed_hosts="attend.example, b.example", cors_origins=f"{PAGE}, http://b.example", access_log=False)
    post = {"method": "POST", "url": "/attend", "json": QUERY}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    plain, allowed, other, before, host = answers(
        settings,
        post,
        {**post, "headers": {"Origin": PAGE}},
        {**post, "headers": {"Origin": "http://third.example"}},
        {"method": "OPTIONS", "url": "/attend", "headers": {"Origin": PAGE, **preflight}},
        {**post, "headers": {"Host": "third.example"}},
    )
    assert [a.status_code for a in (plain, allowed, other, before, host)] == [200, 200, 403, 200, 403]
    assert allowed.headers["access-control-allow-origin"] == before.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in other.headers
    assert "x-request-id" in allowed.headers["access-control-expose-headers"].lower()


def test_a_preflight_request_is_counted_and_has_the_headers_of_every_reply() -> None:
    """It needs no key; one from another origin is refused."""
    preflight = {"method": "OPTIONS", "url": "/attend", "headers": {"Origin": PAGE, "Access-Control-Request-Method": "POST"}}
    refused = {**preflight, "headers": {**preflight["headers"], "Origin": "http://third.example"}}
    answer, other, metrics = answers(
        Settings(cors_origins=PAGE, access_log=False), preflight, refused, {"method": "GET", "url": "/metrics"}
    )
    assert (answer.status_code, other.status_code) == (200, 400)
    for each in (answer, other):
        assert each.headers["x-request-id"] and each.headers["x-content-type-options"] == "nosniff"
    for status in (200, 400):
        assert f'attend_requests_total{{endpoint="/attend",status="{status}"}} 1.0' in metrics.text


def test_a_star_allows_all_hosts_and_origins(tmp_path: Path) -> None:
    """With keys any host is allowed, since pages have no key."""
    post = {"method": "POST", "url": "/attend", "json": QUERY, "headers": {"Origin": PAGE, "Host": "any.example"}}
    (answer,) = answers(Settings(allowed_hosts="*", access_log=False), post)
    assert answer.status_code == 200
    (answer,) = answers(Settings(allowed_hosts="any.example", cors_origins="*", access_log=False), post)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    secret, key = make_key("one", ["infer"])
    write_keys(tmp_path / "keys", [key])
    post["headers"]["X-API-Key"] = secret
    (answer,) = answers(Settings(keys_file=tmp_path / "keys", access_log=False), post)
    assert answer.status_code == 200


def test_without_cors_origins_there_are_no_cors_headers(http: httpx.Client) -> None:
    """Preflight requests are not answered either."""
    assert not [name for name in http.get("/layers", headers={"Origin": PAGE}).headers if name.startswith("access-control")]
    assert http.options("/attend", headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/layers", "/health/live", "/docs", "/metrics", "/no/such/page"])
def test_every_reply_forbids_content_sniffing_and_the_docs_framing(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    if path == "/docs":
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("header", "name"),
    [("a.example", "a.example"), ("A.Example:80", "a.example"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("127.0.0.1:1", "127.0.0.1")],
)
def test_hostname_removes_the_port(header: str, name: str) -> None:
    assert hostname(header) == name
