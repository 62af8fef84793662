"""Counters and histograms, and the one place that names them. The phases are the numbers that `Server-Timing` shows."""

from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self.layers = Gauge("attend_layers", "Layers held.", registry=self.registry)

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def failed(self, reason: str) -> None:
        self._failures.labels(reason).inc()

    def computed(self, phases: Phases) -> None:
        for histogram, seconds in zip(self._phases, (phases.decode, phases.queue, phases.compute, phases.encode), strict=True):
            histogram.observe(seconds)

    def text(self) -> bytes:
        """The Prometheus exposition format."""
        return generate_latest(self.registry)
