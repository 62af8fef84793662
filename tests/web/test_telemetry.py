"""Traces and metrics over OTLP, from a real server over HTTP and gRPC to a collector in this process; and the Prometheus metrics."""

import os
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2_grpc

from support.grpc_calls import address_of, entry, request
from support.otlp import Receiver
from support.raw_http import connect
from support.server import Server

QUERY = {"query": [[0.25] * 64] * 3}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MODEL_INFER = "inference.GRPCInferenceService/ModelInfer"


def test_traces_and_metrics_reach_a_collector(start: Callable[..., Server], receiver: Receiver) -> None:
    """A span continues the caller's trace, the reply names it, the phases are its children, and the server exports everything before it
    stops."""
    server = start("--telemetry", env={**os.environ, **receiver.variables})
    with httpx.Client(base_url=server.url) as client:
        reply = client.post("/attend", json=QUERY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "traced"})
        alone = client.post("/attend", json={"query": []}, headers={"X-Request-Id": "alone"})
        nowhere = client.request("PROPFIND", "/no/such?page=1")
        late = client.post("/attend", json=QUERY, headers={"X-Request-Timeout": "1e-9"})
    assert (alone.status_code, nowhere.status_code, late.status_code) == (422, 501, 504)
    with connect(server) as connection:
        connection.sendall(b"ATTEND / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 501 ")
    assert server.stop() == 0
    refused = [{pair.key: pair.value.string_value for pair in span.attributes} for span in receiver.spans if span.name == "HTTP"]
    assert [attributes["attend.reason"] for attributes in refused if "url.path" not in attributes] == ["unsupported_message"]

    (span,) = [span for span in receiver.spans if span.trace_id.hex() == TRACE and span.parent_span_id.hex() == SPAN]
    assert reply.headers["traceparent"] == reply.headers["traceresponse"] == f"00-{TRACE}-{span.span_id.hex()}-01"
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
    timing = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    for child in phases:
        assert (child.end_time_unix_nano - child.start_time_unix_nano) / 1e6 == pytest.approx(float(timing[child.name]), abs=0.002)

    assert (attributes["url.scheme"].string_value, attributes["url.path"].string_value) == ("http", "/attend")
    assert attributes["http.route"].string_value == "/attend" and "error.type" not in attributes

    def span_of(reply: httpx.Response) -> tuple[Any, dict[str, str]]:
        (span,) = [span for span in receiver.spans if span.trace_id.hex() == reply.headers["traceparent"].split("-")[1] and span.kind == 2]
        return span, {pair.key: pair.value.string_value for pair in span.attributes}

    span, attributes = span_of(alone)  # a fault of the caller is not an error of the server's span
    assert span.status.code == 0 and "error.type" not in attributes and attributes["attend.reason"] == "InvalidRequest"
    span, attributes = span_of(nowhere)
    assert (span.name, attributes["http.request.method"]) == ("HTTP", "_OTHER") and attributes["http.request.method_original"] == "PROPFIND"
    assert "http.route" not in attributes and (span.status.code, attributes["error.type"]) == (2, "status_501")
    assert (attributes["url.path"], attributes["url.query"]) == ("/no/such", "page=1")
    span, attributes = span_of(late)
    assert (span.status.code, attributes["error.type"]) == (2, "DeadlinePassed")
    assert {resource["service.name"] for resource in receiver.resources} == {"attend"}
    points = {metric.name: metric for metric in receiver.metrics}
    units = {"http.server.request.duration": "s", "attend.phase.duration": "s"}
    units |= {"attend.queue.call.count": "{call}", "attend.layer.count": "{layer}"}
    assert {name: points[name].unit for name in units} == units
    assert not points["attend.layer.count"].sum.is_monotonic and points["attend.layer.count"].sum.data_points[0].as_int == 1
    assert {tuple(labels_of(point)) for point in points["attend.phase.duration"].histogram.data_points} == {("attend.phase",)}
    assert len({resource["service.instance.id"] for resource in receiver.resources}) == 1
    assert sum(point.count for point in points["attend.phase.duration"].histogram.data_points) == 4
    requests = points["http.server.request.duration"].histogram.data_points
    assert {tuple(point.explicit_bounds) for point in requests} == {
        (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    }
    assert max(points["attend.phase.duration"].histogram.data_points[0].explicit_bounds) == 30
    by_status = {labels["http.response.status_code"]: labels for labels in map(labels_of, requests)}
    assert {status: labels.get("http.route") for status, labels in by_status.items()} == {
        "200": "/attend",
        "422": "/attend",
        "501": None,
        "504": "/attend",
    }
    assert {status for status, labels in by_status.items() if "error.type" in labels} == {"501", "504"}
    assert {labels["url.scheme"] for labels in by_status.values()} == {"http"}


def labels_of(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value or str(pair.value.int_value) for pair in point.attributes}


def test_without_the_flag_opentelemetry_is_not_imported(http: httpx.Client) -> None:
    """Nor are there trace headers."""
    reply = http.post("/attend", json=QUERY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert "traceparent" not in reply.headers


def test_metrics_follow_prometheus_conventions(http: httpx.Client) -> None:
    """They parse; counters end in _total, times are in seconds and sizes in bytes; each metric has a help text."""
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
    """Bytes of bodies exactly; a layer's calls until it is removed."""
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


def test_a_log_line_has_id_layer_shapes_cost_phases_and_outcome(http: httpx.Client, server: Server) -> None:
    """Of an answered and of a refused call."""
    http.post("/attend", json=QUERY, headers={"X-Request-Id": "line-of-one"})
    line = server.access_line("line-of-one")
    assert (line["layer"], line["query"], line["keys"], line["status"], line["batch"]) == ("default", [3, 64], 3, 200, 1)
    assert line["operations"] == http.post("/attend/plan", json=QUERY).json()["operations"]
    phases = [float(str(line[f"{phase}_ms"])) for phase in ("decode", "queue", "compute", "encode")]
    assert 0 < sum(phases) <= float(str(line["ms"])) + 0.003  # all are rounded to a thousandth
    http.post("/attend", json={**QUERY, "layer": "none"}, headers={"X-Request-Id": "line-of-another"})
    line = server.access_line("line-of-another")
    assert (line["status"], line["reason"]) == (404, "LayerNotFound")


def traced_calls(server: Server) -> dict[str, tuple[str, str]]:
    """The caller's span of two gRPC calls, a good one and one for an unknown layer -> code and `traceresponse` of the reply."""
    called = {}
    with grpc.insecure_channel(address_of(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for span, layer in (("c7ad6b7169203332", "default"), ("d7ad6b7169203333", "none")):
            message = request(layer, entry("query", [1, 1, 64], fp32_contents=[0.5] * 64))
            metadata = (("traceparent", f"00-{TRACE}-{span}-01"), ("x-request-id", span))
            call = stub.ModelInfer.future(message, metadata=metadata)
            code = call.code().name
            called[span] = code, str(dict(call.trailing_metadata())["traceresponse"])
    return called


def test_a_grpc_span_continues_the_callers_trace(start: Callable[..., Server], receiver: Receiver) -> None:
    """The reply names it, and the phases are its children."""
    server = start("--telemetry", "--grpc-port", "0", env={**os.environ, **receiver.variables})
    called = traced_calls(server)
    assert server.stop() == 0
    for call, (code, words) in called.items():
        (span,) = [span for span in receiver.spans if span.parent_span_id.hex() == call]
        assert (span.trace_id.hex(), span.name) == (TRACE, MODEL_INFER)
        assert words == f"00-{TRACE}-{span.span_id.hex()}-01"
        told_of = {pair.key: pair.value for pair in span.attributes}
        assert told_of["rpc.response.status_code"].string_value == code
        assert told_of["rpc.method"].string_value == MODEL_INFER
        assert told_of["attend.request_id"].string_value == call
        children = [child.name for child in receiver.spans if child.parent_span_id == span.span_id]
        if code == "OK":
            assert sorted(children) == ["compute", "decode", "encode", "queue"]
            assert told_of["attend.layer"].string_value == "default"
        else:
            assert (children, told_of["attend.reason"].string_value) == ([], "LayerNotFound")
            assert "error.type" not in told_of and span.status.code == 0, "the fault is the caller's"

    points = {metric.name: metric for metric in receiver.metrics}
    assert sum(point.count for point in points["attend.phase.duration"].histogram.data_points) == 4
    assert points["rpc.server.call.duration"].histogram.data_points[0].explicit_bounds[0] == 0.005
    by_code = {
        pair.value.string_value: point.count
        for point in points["rpc.server.call.duration"].histogram.data_points
        for pair in point.attributes
        if pair.key == "rpc.response.status_code"
    }
    assert by_code == {"OK": 1, "NOT_FOUND": 1}
