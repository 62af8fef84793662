"""Health, metrics, and HEAD for every GET."""

from typing import Any

import httpx
import numpy as np
import pytest

QUERY = np.random.default_rng(11).standard_normal((2, 3, 4)).round(3).tolist()


@pytest.mark.parametrize(
    "path", ["/", "/health/live", "/health/ready", "/health/startup", "/metrics", "/layers", "/layers/tiny", "/docs", "/openapi.json"]
)
def test_head_is_get_without_its_body(http: httpx.Client, server: Any, layers: dict[str, Any], path: str) -> None:
    """Same status and type, no body, and the connection can be reused."""
    with httpx.Client(base_url=server.url) as client:
        got = client.get(path)
        for _ in range(2):
            head = client.head(path)
            assert (head.status_code, head.headers["content-type"], head.content) == (200, got.headers["content-type"], b"")
        assert client.get("/health/live").json() == {"live": True}


def test_health_endpoints(http: httpx.Client, layers: dict[str, Any]) -> None:
    assert http.get("/health/live").json() == {"live": True}
    assert http.get("/health/ready").json() == {"ready": True}
    assert http.get("/health/startup").json() == {"started": True}


def metric(text: str, name: str, **labels: str) -> float:
    """The value of a sample in the Prometheus text; 0 if there is none yet."""
    for line in text.splitlines():
        if line.startswith(name + ("{" if labels else " ")) and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return 0.0


def test_metrics_count_requests_failures_phases_and_layers(http: httpx.Client, layers: dict[str, Any]) -> None:
    before = http.get("/metrics").text

    http.post("/attend", json={"layer": "tiny", "query": QUERY})
    http.post("/attend", content=b"{")
    http.get("/layers/tiny")
    http.get("/no/such/page")
    answer = http.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")

    def grown(name: str, **labels: str) -> float:
        return metric(answer.text, name, **labels) - metric(before, name, **labels)

    assert grown("attend_requests_total", endpoint="/attend", status="200") == 1
    assert grown("attend_requests_total", endpoint="/attend", status="400") == 1
    assert grown("attend_requests_total", endpoint="/layers/{name}", status="200") == 1
    assert grown("attend_failures_total", reason="MalformedBody") == 1
    for phase in ("decode", "queue", "compute", "encode"):
        assert grown("attend_phase_seconds_count", phase=phase) == 1
        assert phase == "queue" or grown("attend_phase_seconds_sum", phase=phase) > 0  # the queue is empty
    assert metric(answer.text, "attend_layers") == len(http.get("/layers").json()["layers"])
    assert "/no/such" not in answer.text
