"""Traces and metrics by OpenTelemetry's protocol, for those who ask for them (`--telemetry`, extra `otel`).

Where they go, under which name and how many of them is said in the OTEL_… variables of its specification. A request's span continues the
caller's trace (W3C `traceparent`), the reply says which span it was, and the phases are its children. Nothing here runs otherwise.
"""

import os
import time
from typing import Any

from starlette.types import Scope

from service import __version__
from service.serving.engine import Engine
from service.web.access import Record, endpoint

PHASES = ("decode", "queue", "compute", "encode")
CONTEXT = (b"traceparent", b"tracestate")


def open_telemetry(engine: Engine) -> "Telemetry":
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
    return Telemetry(engine, traces, metrics)


class Telemetry:
    """What `Access` tells of every request, as spans and histograms."""

    def __init__(self, engine: Engine, traces: Any, metrics: Any) -> None:
        from opentelemetry.metrics import Observation
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._providers = (traces, metrics)
        self._tracer, meter = traces.get_tracer("attend", __version__), metrics.get_meter("attend", __version__)
        self._propagator, self._server, self._within = TraceContextTextMapPropagator(), SpanKind.SERVER, set_span_in_context
        self._failed = Status(StatusCode.ERROR)
        self._duration = meter.create_histogram("http.server.request.duration", "s", "From the first byte to the last.")
        self._phases = meter.create_histogram("attend.phase.duration", "s", "Time a request spends in a phase.")
        gauges = {"attend.queue.calls": lambda: len(engine.scheduler.waiting), "attend.layers": lambda: len(engine.catalogue)}
        for name, value in gauges.items():
            meter.create_observable_gauge(name, [lambda _, value=value: [Observation(value())]])

    def begin(self, scope: Scope, path: str) -> None:
        """Opens the request's span, below the caller's if the caller has one."""
        came = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in CONTEXT}
        name, now = f"{scope['method']} {endpoint(path)}", time.time_ns()
        span = self._tracer.start_span(name, self._propagator.extract(came), self._server, start_time=now)
        scope["attend.span"] = span, now

    def reply_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The span of this request, in W3C's form: for the caller's log, and for whoever traces the reply."""
        context = scope["attend.span"][0].get_span_context()
        text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()
        return [(b"traceparent", text), (b"traceresponse", text)]

    def end(self, scope: Scope, path: str, record: Record, seconds: float) -> None:
        """Closes the span; its children are the phases, which end where the request ends."""
        span, began = scope["attend.span"]
        now = began + int(seconds * 1e9)
        labels = {"http.request.method": scope["method"], "http.route": endpoint(path), "http.response.status_code": record.status}
        span.set_attributes({**labels, "attend.request_id": record.request_id})
        span.set_attributes({f"attend.{name}": value for name, value in record.about.items()})
        if record.reason:
            span.set_attribute("error.type", record.reason)
        if record.status >= 500:
            span.set_status(self._failed)
        self._duration.record(seconds, labels)
        if record.phases is not None:
            took = [getattr(record.phases, name) for name in PHASES]
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
