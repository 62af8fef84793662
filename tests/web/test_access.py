"""The headers of every reply: request id and Server-Timing."""

import re
from typing import Any

import httpx
import numpy as np

QUERY = np.random.default_rng(11).standard_normal((2, 3, 4)).round(3).tolist()


def test_a_valid_request_id_is_returned_and_otherwise_one_is_generated(http: httpx.Client, layers: dict[str, Any]) -> None:
    """In refusals too."""
    body = {"layer": "tiny", "query": QUERY}
    given = http.post("/attend", json=body, headers={"X-Request-Id": "trace-1.a/b"})
    refused = http.post("/attend", json={}, headers={"X-Request-Id": "trace-2"})
    made = [http.post("/attend", json=body).headers["x-request-id"] for _ in range(3)]
    odd = [http.get("/health/live", headers={"X-Request-Id": value}).headers["x-request-id"] for value in ("a b", "", "x" * 129)]

    assert given.headers["x-request-id"] == "trace-1.a/b"
    assert refused.headers["x-request-id"] == refused.json()["request_id"] == "trace-2"
    assert len({*made, *odd}) == 6
    assert all(re.fullmatch(r"[0-9a-f]{16,}", value) for value in (*made, *odd))


def test_server_timing_has_the_four_phases(http: httpx.Client, layers: dict[str, Any]) -> None:
    """In milliseconds, in the order of the path."""
    reply = http.post("/attend", json={"layer": "tiny", "query": QUERY})
    assert reply.is_success, reply.text
    header = reply.headers["server-timing"]

    number = r"(\d+\.\d+)"
    match = re.fullmatch(rf"decode;dur={number}, queue;dur={number}, compute;dur={number}, encode;dur={number}", header)
    assert match
    assert all(0 <= float(ms) < 10_000 for ms in match.groups())
    assert float(match[3]) > 0
