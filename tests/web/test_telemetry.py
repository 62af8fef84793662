"""Traces and metrics by OTLP, from a real server to a receiver in this process; and what Prometheus reads."""

import os
from collections.abc import Callable

import httpx
import pytest
from live import Server
from otlp import Receiver
from prometheus_client.parser import text_string_to_metric_families

QUERY = {"query": [[0.25] * 64] * 3}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_traces_and_metrics_reach_a_collector(start: Callable[..., Server], receiver: Receiver) -> None:
    """A span continues the caller's trace, the reply names it, phases are its children, and nothing is lost when the server stops."""
    server = start("--telemetry", env={**os.environ, **receiver.variables})
    with httpx.Client(base_url=server.url) as client:
        told = client.post("/attend", json=QUERY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "traced"})
        alone = client.post("/attend", json={"query": []}, headers={"X-Request-Id": "alone"})
    assert server.stop() == 0

    (span,) = [span for span in receiver.spans if span.trace_id.hex() == TRACE and span.parent_span_id.hex() == SPAN]
    assert told.headers["traceparent"] == told.headers["traceresponse"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert span.name == "POST /attend"
    attributes = {pair.key: pair.value for pair in span.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["attend.request_id"].string_value == "traced"
    assert attributes["attend.layer"].string_value == "default"
    assert [value.int_value for value in attributes["attend.query"].array_value.values] == [3, 64]

    phases = sorted(
        (child for child in receiver.spans if child.parent_span_id == span.span_id), key=lambda child: child.start_time_unix_nano
    )
    assert [child.name for child in phases] == ["decode", "queue", "compute", "encode"]
    assert span.start_time_unix_nano <= phases[0].start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= span.end_time_unix_nano
    timing = dict(part.split(";dur=") for part in told.headers["server-timing"].split(", "))
    for child in phases:
        assert (child.end_time_unix_nano - child.start_time_unix_nano) / 1e6 == pytest.approx(float(timing[child.name]), abs=0.002)

    (refused,) = [span for span in receiver.spans if span.trace_id.hex() == alone.headers["traceparent"].split("-")[1]]
    assert {pair.key: pair.value.string_value for pair in refused.attributes}["error.type"] == "InvalidRequest"
    assert {resource["service.name"] for resource in receiver.resources} == {"attend"}
    points = {metric.name: metric for metric in receiver.metrics}
    assert {"http.server.request.duration", "attend.phase.duration", "attend.queue.calls", "attend.layers"} <= set(points)
    assert sum(point.count for point in points["attend.phase.duration"].histogram.data_points) == 4


def test_without_the_flag_nothing_is_sent_or_said(http: httpx.Client) -> None:
    """No header, no module."""
    reply = http.post("/attend", json=QUERY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert "traceparent" not in reply.headers


def test_metrics_follow_prometheus(http: httpx.Client) -> None:
    """They parse; counters end in _total, times are in seconds and sizes in bytes; each has a help text; what an operator asks is there."""
    http.post("/attend", json=QUERY)
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    names = {family.name for family in families}
    assert all(family.documentation for family in families)
    assert all(name.startswith("attend_") and name == name.lower() for name in names)
    for wanted in (
        "requests",
        "failures",
        "phase_seconds",
        "batch_calls",
        "received_bytes",
        "sent_bytes",
        "layer_calls",
        "layer_operations",
    ):
        assert f"attend_{wanted}" in names
    for wanted in (
        "queue_calls",
        "queue_operations",
        "queue_bytes",
        "held_body_bytes",
        "device_memory_bytes",
        "out_of_memory_splits",
        "ready",
    ):
        assert f"attend_{wanted}" in names


def sample(http: httpx.Client, name: str, **labels: str) -> float | None:
    """A sample's value, None where there is none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found[0] if found else None


def test_bytes_and_layers_are_counted(http: httpx.Client) -> None:
    """Of bodies in and out exactly; of a layer for as long as it is held."""
    spec = {"spec": {"d_model": 4, "num_heads": 2}}
    http.put("/layers/counted", json=spec)
    received, sent = sample(http, "attend_received_bytes_total"), sample(http, "attend_sent_bytes_total")
    body = b'{"layer": "counted", "query": [[1, 2, 3, 4]]}'
    reply = http.post("/attend", content=body)
    document = http.get("/metrics").content  # as long as the one before it, give or take the digits of its numbers
    assert (sample(http, "attend_received_bytes_total") or 0) - (received or 0) == len(body)
    assert (sample(http, "attend_sent_bytes_total") or 0) - (sent or 0) > len(reply.content) + len(document)
    assert sample(http, "attend_layer_calls_total", layer="counted") == 1
    operations = http.post("/attend/plan", content=body).json()["operations"]
    assert sample(http, "attend_layer_operations_total", layer="counted") == operations
    http.delete("/layers/counted")
    assert sample(http, "attend_layer_calls_total", layer="counted") is None
    assert sample(http, "attend_ready") == 1
    assert (sample(http, "attend_device_memory_bytes") or 0) > 50e6


def test_an_access_line_tells_what_was_asked(http: httpx.Client, server: Server) -> None:
    """Id, layer, shapes, cost, phases and outcome, of a call that was answered and of one that was refused."""
    http.post("/attend", json=QUERY, headers={"X-Request-Id": "line-of-one"})
    line = server.told("line-of-one")
    assert (line["layer"], line["query"], line["keys"], line["status"], line["batch"]) == ("default", [3, 64], 3, 200, 1)
    assert line["operations"] == http.post("/attend/plan", json=QUERY).json()["operations"]
    assert all(float(str(line[f"{phase}_ms"])) >= 0 for phase in ("decode", "queue", "compute", "encode"))
    http.post("/attend", json={**QUERY, "layer": "none"}, headers={"X-Request-Id": "line-of-another"})
    line = server.told("line-of-another")
    assert (line["status"], line["reason"]) == (404, "LayerNotFound")
