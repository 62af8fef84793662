"""Counters and histograms, and the one place that names them. The phases are the numbers that `Server-Timing` shows."""

import os
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # where the library lets workers share; read when it is imported

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(slots=True)
class Phases:
    """Seconds that a request spent in each phase."""

    decode: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    encode: float = 0.0

    def server_timing(self) -> str:
        """The value of the header: milliseconds, in the order of the path."""
        return (
            f"decode;dur={self.decode * 1e3:.3f}, queue;dur={self.queue * 1e3:.3f}, "
            f"compute;dur={self.compute * 1e3:.3f}, encode;dur={self.encode * 1e3:.3f}"
        )


class Metrics:
    """One process's metrics, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("attend_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry)
        self._failures = Counter("attend_failures", "Requests refused or failed, by reason.", ["reason"], registry=self.registry)
        phases = Histogram("attend_phase_seconds", "Time a request spends in a phase.", ["phase"], buckets=SECONDS, registry=self.registry)
        self._phases = [phases.labels(name) for name in ("decode", "queue", "compute", "encode")]
        self._abandoned = Counter("attend_abandoned_calls", "Calls dropped before computing: the caller had gone.", registry=self.registry)
        self._batch = Histogram("attend_batch_calls", "Calls computed together.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self.registry)
        self.layers = Gauge("attend_layers", "Layers held.", registry=self.registry, multiprocess_mode="max")

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def failed(self, reason: str) -> None:
        self._failures.labels(reason).inc()

    def computed(self, phases: Phases) -> None:
        for histogram, seconds in zip(self._phases, (phases.decode, phases.queue, phases.compute, phases.encode), strict=True):
            histogram.observe(seconds)

    def abandoned(self, count: int) -> None:
        """Calls that were dropped because their callers had gone."""
        self._abandoned.inc(count)

    def batched(self, calls: int) -> None:
        """A batch went to the device."""
        self._batch.observe(calls)

    def text(self) -> bytes:
        """The Prometheus exposition format. With several workers it is the sum over all of them, whichever is asked."""
        if MULTIPROCESS not in os.environ:
            return generate_latest(self.registry)
        everyone = CollectorRegistry()
        MultiProcessCollector(everyone)  # type: ignore[no-untyped-call]  # the library has no annotations
        return generate_latest(everyone)
