"""Traces and metrics of gRPC calls, by OTLP."""

import os
from collections.abc import Callable

import grpc
from support.grpc_calls import address_of, entry, request
from support.otlp import Receiver
from support.server import Server
from tritonclient.grpc import service_pb2_grpc

MODEL_INFER = "inference.GRPCInferenceService/ModelInfer"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def traced_calls(server: Server) -> dict[str, tuple[str, str]]:
    """The caller's span of two gRPC calls, a good one and one for a layer that is not there -> the code and `traceresponse` that came."""
    called = {}
    with grpc.insecure_channel(address_of(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for span, layer in (("c7ad6b7169203332", "default"), ("d7ad6b7169203333", "none")):
            asked = request(layer, entry("query", [1, 1, 64], fp32_contents=[0.5] * 64))
            metadata = (("traceparent", f"00-{TRACE}-{span}-01"), ("x-request-id", span))
            call = stub.ModelInfer.future(asked, metadata=metadata)
            code = call.code().name
            called[span] = code, str(dict(call.trailing_metadata())["traceresponse"])
    return called


def test_a_calls_span_continues_the_callers_trace(start: Callable[..., Server], receiver: Receiver) -> None:
    """The reply names it, phases are its children, and nothing is lost when the server stops."""
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
