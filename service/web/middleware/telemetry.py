"""Traces and metrics by OpenTelemetry's protocol, for those who ask for them (`--telemetry`, extra `otel`).

Where they go, under which name and how many of them is said in the OTEL_… variables of its specification. The span of a request, or of a
gRPC call, continues the caller's trace (W3C `traceparent`), the reply says which span it was, and the phases are its children. Names,
attributes and buckets are those of OpenTelemetry's semantic conventions for HTTP and RPC servers: only what is this server's fault is an
error there; the reason of any other refusal is in `attend.reason`. Nothing here runs otherwise.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from service import __version__
from service.serving.metrics import SECONDS, Phases
from service.serving.service import Service
from service.web.middleware.access import OTHER, endpoint
from service.web.record import Record

PHASES = ("decode", "queue", "compute", "encode")
CONTEXT = (b"traceparent", b"tracestate")
DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)  # seconds; the conventions' bucket boundaries
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))  # others are _OTHER


def open_telemetry(service: Service) -> "Telemetry":
    """The exporters, running. Raises ModuleNotFoundError without the extra `otel`."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "attend"}
    resource = Resource.create({**name, "service.version": __version__})
    traces = TracerProvider(resource=resource)
    traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    metrics = MeterProvider(resource=resource, metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())])
    return Telemetry(service, traces, metrics)


@dataclass(frozen=True, slots=True)
class Opened:
    """A span that is open, and since when, in nanoseconds since 1970."""

    span: Any
    began: int

    @property
    def in_words(self) -> str:
        """In W3C's form."""
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@dataclass(frozen=True, slots=True)
class Told:
    """How a request or a call ended. `failed` says that the fault was this server's."""

    request_id: str
    reason: str
    failed: bool
    phases: Phases | None
    about: Mapping[str, Any]


class Telemetry:
    """What is told of every request and of every gRPC call, as spans and histograms."""

    def __init__(self, service: Service, traces: Any, metrics: Any) -> None:
        from opentelemetry.metrics import Observation
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._providers = (traces, metrics)
        self._tracer, meter = traces.get_tracer("attend", __version__), metrics.get_meter("attend", __version__)
        self._propagator, self._server, self._within = TraceContextTextMapPropagator(), SpanKind.SERVER, set_span_in_context
        self._failed = Status(StatusCode.ERROR)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Any:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._requests = histogram("http.server.request.duration", "From the first byte to the last.", DURATIONS)
        self._calls = histogram("rpc.server.call.duration", "Of gRPC calls, from the first byte to the last.", DURATIONS)
        self._phases = histogram("attend.phase.duration", "Time a request spends in a phase.", SECONDS)
        gauges = {"attend.queue.calls": lambda: service.scheduler.load[0], "attend.layers": lambda: len(service.registry)}
        for name, value in gauges.items():
            meter.create_observable_gauge(name, [lambda _, value=value: [Observation(value())]])

    def begin(self, scope: Scope, path: str) -> None:
        """Opens a request's span, below the caller's if the caller has one."""
        came = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in CONTEXT}
        method, route = _method(scope).replace("_OTHER", "HTTP"), endpoint(path)
        scope["attend.span"] = self._open(method if route == OTHER else f"{method} {route}", came)

    def reply_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The span of this request, in W3C's form: for the caller's log, and for whoever traces the reply."""
        text = scope["attend.span"].in_words.encode()
        return [(b"traceparent", text), (b"traceresponse", text)]

    def end(self, scope: Scope, path: str, record: Record, seconds: float) -> None:
        """Closes the span of a request."""
        method, route, failed = _method(scope), endpoint(path), record.status >= 500
        labels: dict[str, Any] = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        if route != OTHER:
            labels["http.route"] = route
        if record.status:  # none was sent to a caller who had gone
            labels["http.response.status_code"] = record.status
        if failed:
            labels["error.type"] = record.reason or str(record.status)
        self._requests.record(seconds, labels)
        about: dict[str, Any] = {"url.path": scope["path"]}
        if scope.get("query_string"):
            about["url.query"] = scope["query_string"].decode("latin-1")
        if method != scope["method"]:
            about["http.request.method_original"] = scope["method"]
        told = Told(record.request_id, record.reason, failed, record.phases, record.about)
        self._close(scope["attend.span"], {**labels, **about}, told, seconds)

    def begin_call(self, method: str, metadata: Mapping[str, str]) -> "Opened":
        """Opens the span of a gRPC call; the same for its `end_call`. The method's name is the whole one."""
        return self._open(method, metadata)

    def end_call(self, opened: "Opened", method: str, code: str, told: "Told", seconds: float) -> None:
        labels = {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": code}
        if told.failed:
            labels["error.type"] = told.reason or code
        self._calls.record(seconds, labels)
        self._close(opened, labels, told, seconds)

    def _open(self, name: str, came: Mapping[str, str]) -> "Opened":
        now = time.time_ns()
        return Opened(self._tracer.start_span(name, self._propagator.extract(came), self._server, start_time=now), now)

    def _close(self, opened: "Opened", labels: Mapping[str, Any], told: "Told", seconds: float) -> None:
        """The span's children are the phases, which end where it ends."""
        span, now = opened.span, opened.began + int(seconds * 1e9)
        span.set_attributes({**labels, "attend.request_id": told.request_id})
        span.set_attributes({f"attend.{name}": value for name, value in told.about.items()})
        if told.reason:
            span.set_attribute("attend.reason", told.reason)
        if told.failed:
            span.set_status(self._failed)
        if told.phases is not None:
            took = [getattr(told.phases, name) for name in PHASES]
            at = now - int(sum(took) * 1e9)
            for name, phase in zip(PHASES, took, strict=True):
                child = self._tracer.start_span(name, self._within(span), start_time=at)
                at += int(phase * 1e9)
                child.end(at)
                self._phases.record(phase, {"phase": name})
        span.end(now)

    def close(self) -> None:
        """Sends what has not been sent."""
        for provider in self._providers:
            provider.shutdown()


def _method(scope: Scope) -> str:
    """The method, if it is one of HTTP's own: what callers invent must not become labels."""
    method: str = scope["method"]
    return method if method in METHODS else "_OTHER"
