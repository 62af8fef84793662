"""Traces and metrics over OTLP (`--telemetry`, extra `otel`), configured by the OTEL_… variables of OpenTelemetry's specification.

The span of a request or gRPC call continues the caller's trace (W3C `traceparent`); the reply names the span; the phases are child spans.
Names, units, attributes and buckets follow OpenTelemetry's semantic conventions, those for HTTP and RPC servers included; what is this
server's own is in the namespace `attend`. Only a fault of this server is an error; `attend.reason` has the reason of any other refusal.

OpenTelemetry's own instrumentation of ASGI and gRPC lacks `traceresponse`, `http.route` in the histogram (requests do not pass a
framework's router) and the histogram of gRPC calls, so the spans are made here, from the request of each request.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from attend.serving.metrics import PHASE_BUCKETS, Phases
from attend.serving.requests import Request
from attend.serving.service import Service
from attend.version import __version__
from attend.web.http_parser import METHODS
from attend.web.requests import OTHER, HttpRequest

TRACE_HEADERS = (b"traceparent", b"tracestate")
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)  # seconds; the conventions' boundaries


def start_telemetry(service: Service) -> "Telemetry":
    """Starts the exporters. Raises ModuleNotFoundError without the extra `otel`."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "attend"}
    resource = Resource.create({**name, "service.version": __version__, "service.instance.id": str(uuid4())})  # of each worker
    traces = TracerProvider(resource=resource)
    traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    metrics = MeterProvider(resource=resource, metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())])
    return Telemetry(service, traces, metrics)


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended, and its start in nanoseconds since 1970."""

    span: Any
    start: int

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent` that names the span."""
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def reply_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of a reply that name the span to the caller."""
        text = self.traceparent.encode()
        return [(b"traceparent", text), (b"traceresponse", text)]


class Telemetry:
    """Records each request and each gRPC call as a span, and its duration and phases in histograms."""

    def __init__(self, service: Service, traces: Any, metrics: Any) -> None:
        from opentelemetry.metrics import Observation
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._providers = (traces, metrics)
        self._tracer, meter = traces.get_tracer("attend", __version__), metrics.get_meter("attend", __version__)
        self._propagator, self._server, self._in_context = TraceContextTextMapPropagator(), SpanKind.SERVER, set_span_in_context
        self._failed = Status(StatusCode.ERROR)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Any:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._requests = histogram("http.server.request.duration", "From the first byte to the last.", DURATION_BUCKETS)
        self._calls = histogram("rpc.server.call.duration", "Of gRPC calls, from the first byte to the last.", DURATION_BUCKETS)
        self._phases = histogram("attend.phase.duration", "Time a request spends in a phase.", PHASE_BUCKETS)
        counts = {"queue.call": lambda: service.scheduler.load[0], "layer": lambda: len(service.registry)}
        for name, value in counts.items():
            unit = f"{{{name.rpartition('.')[2]}}}"  # the conventions' unit of things that are counted: {call}
            meter.create_observable_up_down_counter(f"attend.{name}.count", [lambda _, value=value: [Observation(value())]], unit)

    def begin_request(self, request: HttpRequest) -> OpenSpan:
        """Starts the span of a request, as a child of the caller's span if there is one. The reply names it."""
        incoming = {name.decode(): value.decode("latin-1") for name, value in request.scope["headers"] if name in TRACE_HEADERS}
        method = _method(request).replace("_OTHER", "HTTP")
        span = self._open(method if request.label == OTHER else f"{method} {request.label}", incoming)
        request.reply_headers += span.reply_headers()
        return span

    def end_request(self, open_span: OpenSpan, request: HttpRequest, seconds: float) -> None:
        """Closes the span of a request."""
        scope, method, route, failed = request.scope, _method(request), request.label, request.status >= 500
        labels: dict[str, Any] = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        if route != OTHER:
            labels["http.route"] = route
        if request.status:  # 0: the client disconnected before the reply
            labels["http.response.status_code"] = request.status
        if failed:
            labels["error.type"] = request.reason or str(request.status)
        self._requests.record(seconds, labels)
        about: dict[str, Any] = {"url.path": scope["path"]}
        if scope.get("query_string"):
            about["url.query"] = scope["query_string"].decode("latin-1")
        if method != request.method:
            about["http.request.method_original"] = request.method
        self._close(open_span, {**labels, **about}, request, failed, seconds)

    def refusal(self, request_id: str, status: int, reason: str) -> None:
        """Records the span of a request that was refused before its method and path were known."""
        labels: dict[str, Any] = {"http.request.method": "_OTHER", "http.response.status_code": status}
        if failed := status >= 500:
            labels["error.type"] = reason
        self._close(self._open("HTTP", {}), labels, Request(id=request_id, reason=reason), failed, 0.0)

    def begin_call(self, method: str, metadata: Mapping[str, str]) -> OpenSpan:
        """Starts the span of a gRPC call, for `end_call`. `method` is the full name."""
        return self._open(method, metadata)

    def end_call(self, open_span: OpenSpan, method: str, code: str, request: Request, failed: bool, seconds: float) -> None:
        """Closes the span of a call. `failed`: through a fault of this server."""
        labels = {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": code}
        if failed:
            labels["error.type"] = request.reason or code
        self._calls.record(seconds, labels)
        self._close(open_span, labels, request, failed, seconds)

    def _open(self, name: str, incoming: Mapping[str, str]) -> OpenSpan:
        now = time.time_ns()
        return OpenSpan(self._tracer.start_span(name, self._propagator.extract(incoming), self._server, start_time=now), now)

    def _close(self, open_span: OpenSpan, labels: Mapping[str, Any], request: Request, failed: bool, seconds: float) -> None:
        """Ends the span. Its phases become consecutive child spans; the last one ends with the span."""
        span, now = open_span.span, open_span.start + int(seconds * 1e9)
        span.set_attributes({**labels, "attend.request_id": request.id})
        span.set_attributes({f"attend.{name}": value for name, value in request.log_fields.items()})
        if request.reason:
            span.set_attribute("attend.reason", request.reason)
        if failed:
            span.set_status(self._failed)
        if request.phases is not None:
            at = now - int(sum(request.phases) * 1e9)
            for name, phase in zip(Phases._fields, request.phases, strict=True):
                child = self._tracer.start_span(name, self._in_context(span), start_time=at)
                at += int(phase * 1e9)
                child.end(at)
                self._phases.record(phase, {"attend.phase": name})
        span.end(now)

    def close(self) -> None:
        """Exports the remaining spans and metrics, and stops."""
        for provider in self._providers:
            provider.shutdown()


def _method(request: HttpRequest) -> str:
    """The method, if HTTP defines it, else _OTHER: clients must not be able to create labels."""
    return request.method if request.method in METHODS else "_OTHER"
