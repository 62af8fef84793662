"""The Prometheus metrics of one process, and the phases of a request, which `Server-Timing` also shows."""

import os
from collections import Counter as Counts
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's folder for several processes; read when it is imported

MAX_PENDING_CALLS = 64  # most calls that are counted later: recording them takes less than a millisecond
PHASE_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

PHASES = ("decode", "queue", "compute", "encode")


@dataclass(slots=True)
class Phases:
    """Seconds that a request spent in each phase."""

    decode: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    encode: float = 0.0

    def milliseconds(self) -> dict[str, float]:
        """The phases as fields of a log line: decode_ms, …"""
        return {f"{name}_ms": round(getattr(self, name) * 1e3, 3) for name in PHASES}

    def server_timing(self) -> str:
        """The value of the header Server-Timing, in milliseconds."""
        return (
            f"decode;dur={self.decode * 1e3:.3f}, queue;dur={self.queue * 1e3:.3f}, "
            f"compute;dur={self.compute * 1e3:.3f}, encode;dur={self.encode * 1e3:.3f}"
        )


class Metrics:
    """The metrics of one process.

    Counts of requests are kept as plain numbers, and added to the library's counters when they are read, or after MAX_PENDING_CALLS calls:
    each of its counters takes a lock, and they are a tenth of the time of a small request.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.folder = Path(os.environ[MULTIPROCESS]) if MULTIPROCESS in os.environ else None
        self.shared = self.folder is not None  # any worker reports the sums over all workers
        self._requests = Counter("attend_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry)
        self._failures = Counter("attend_failures", "Requests refused or failed, by reason.", ["reason"], registry=self.registry)
        phases = Histogram(
            "attend_phase_seconds", "Time a request spends in a phase.", ["phase"], buckets=PHASE_BUCKETS, registry=self.registry
        )
        self._phases = [phases.labels(name) for name in PHASES]
        self._received = Counter("attend_received_bytes", "Bytes of request bodies, as received.", registry=self.registry)
        self._sent = Counter("attend_sent_bytes", "Bytes of reply bodies, as sent.", registry=self.registry)
        self.abandoned = Counter("attend_abandoned_calls", "Calls dropped because the client disconnected.", registry=self.registry).inc
        self._batch_calls = Histogram("attend_batch_calls", "Calls in a batch.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self.registry)
        self.split = Counter("attend_out_of_memory_splits", "Batches split in halves for lack of memory.", registry=self.registry).inc
        self.layers = self._gauge("attend_layers", "Layers in memory.", "livemax")
        names = {"calls": "Waiting calls.", "operations": "Their predicted operations.", "bytes": "Their predicted memory."}
        self._queue = [self._gauge(f"attend_queue_{name}", text) for name, text in names.items()]
        self._held = self._gauge("attend_held_body_bytes", "Bytes of requests and replies, until a reply is sent.")
        self._memory = self._gauge("attend_device_memory_bytes", "Memory in use on the device; on a CPU, by the process.")
        self._ready = self._gauge("attend_ready", "1 if the server is ready, else 0.", "livemin")
        self._answered: Counts[tuple[str, int]] = Counts()
        self._bytes = [0, 0]  # received, sent
        self._batches: Counts[int] = Counts()
        self._computed: list[Phases] = []
        self._collectors: list[Collector] = []

    def add(self, collector: Collector) -> None:
        """Include the metrics of a collector that sums over all workers itself."""
        self.registry.register(collector)
        self._collectors.append(collector)

    def _gauge(self, name: str, text: str, over_workers: Any = "livesum") -> Gauge:
        return Gauge(name, text, registry=self.registry, multiprocess_mode=over_workers)

    def answered(self, endpoint: str, status: int, received: int = 0, sent: int = 0) -> None:
        """Count a finished request; status 0 means that no reply was sent."""
        self._answered[endpoint, status] += 1
        self._bytes[0] += received
        self._bytes[1] += sent
        if self.shared:  # a process may be killed, and its counts must survive
            self.record()

    def failed(self, reason: str) -> None:
        self._failures.labels(reason).inc()

    def batched(self, calls: int) -> None:
        """Count a batch of so many calls."""
        self._batches[calls] += 1

    def computed(self, phases: Phases) -> None:
        """Count an answered call."""
        self._computed.append(phases)
        if len(self._computed) >= MAX_PENDING_CALLS:
            self.record()

    def record(self) -> None:
        """Add what was counted since the last time to the metrics."""
        answered, self._answered = self._answered, Counts()
        for (endpoint, status), count in answered.items():
            self._requests.labels(endpoint, str(status)).inc(count)
        (received, sent), self._bytes = self._bytes, [0, 0]
        self._received.inc(received)
        self._sent.inc(sent)
        batches, self._batches = self._batches, Counts()
        for calls in batches.elements():
            self._batch_calls.observe(calls)
        computed, self._computed = self._computed, []
        for phases in computed:
            for name, histogram in zip(PHASES, self._phases, strict=True):
                histogram.observe(getattr(phases, name))

    def sample(self, queue: tuple[int, int, int], leased_bytes: int, memory: int, ready: bool) -> None:
        """Record what is pending, and set the gauges. `queue`: calls, operations and bytes waiting; `memory`: bytes."""
        self.record()
        for gauge, value in zip(self._queue, queue, strict=True):
            gauge.set(value)
        self._held.set(leased_bytes)
        self._memory.set(memory)
        self._ready.set(ready)

    def text(self) -> bytes:
        """The metrics in Prometheus's format; with several workers, summed over all of them."""
        if not self.shared:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the library has no annotations
        for collector in self._collectors:
            registry.register(collector)
        return generate_latest(registry)
