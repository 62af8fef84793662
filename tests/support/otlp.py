"""A collector of traces and metrics, by OTLP over HTTP, in the process of the tests."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(ThreadingHTTPServer):
    """A collector that records every export."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self.resources: list[dict[str, str]] = []
        endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}  # exporter


class Posted(BaseHTTPRequestHandler):
    """One export, in protobuf."""

    server: Receiver

    def do_POST(self) -> None:  # the library's name
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append({pair.key: pair.value.string_value for pair in group.resource.attributes})
                self.server.spans += [span for scope in group.scope_spans for span in scope.spans]
        else:
            for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.server.metrics += [metric for scope in group.scope_metrics for metric in scope.metrics]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...
