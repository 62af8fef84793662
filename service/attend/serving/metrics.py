"""The Prometheus metrics of one process, and the phases of a request, which `Server-Timing` also shows."""

import os
import struct
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from attend.serving.shared_counts import are_shared, new_counts, read_counts

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's folder for several processes; read when it is imported

FILE_BYTES = {"counter": 1 << 17, "gauge_livesum": 1 << 14, "gauge_livemax": 1 << 14, "gauge_livemin": 1 << 14}  # of the library's files

PHASE_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Phases(NamedTuple):
    """Seconds that a request spent in each phase."""

    decode: float = 0.0  # and prepare
    queue: float = 0.0  # waiting for earlier calls of its session, and for the device
    compute: float = 0.0
    encode: float = 0.0

    def milliseconds(self) -> dict[str, float]:
        """The phases as fields of a log line: decode_ms, …"""
        return {
            "decode_ms": round(self.decode * 1e6) / 1e3,
            "queue_ms": round(self.queue * 1e6) / 1e3,
            "compute_ms": round(self.compute * 1e6) / 1e3,
            "encode_ms": round(self.encode * 1e6) / 1e3,
        }

    def server_timing(self) -> str:
        """The value of the header Server-Timing, in milliseconds."""
        return (
            f"decode;dur={self.decode * 1e3:.3f}, queue;dur={self.queue * 1e3:.3f}, "
            f"compute;dur={self.compute * 1e3:.3f}, encode;dur={self.encode * 1e3:.3f}"
        )


class PlainHistogram(Collector):
    """A histogram for each of `names`, the values of `label`. With a folder, it has the sums over all processes that use the folder.

    To observe a value is to add to two numbers: a third of the time of prometheus_client's, which takes two locks (docs/design.md).
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], folder: Path | None, label: str = "", names: Sequence[str] = ("",)):
        self.name, self.text, self.bounds, self.folder, self.label, self.names = name, text, bounds, folder, label, names
        self._shape = len(names), len(bounds) + 2  # calls in each bucket, and the sum of their values
        path = None if folder is None else folder / f"{name}@{os.getpid()}-{token_hex(4)}.histogram"
        self._numbers = new_counts(path, self._shape)
        self._rows: list[Any] = [memoryview(row) for row in self._numbers]  # faster than NumPy for single numbers
        self._created = time.time()

    def observe(self, *values: float) -> None:
        """Count one value for each name."""
        for row, value in zip(self._rows, values, strict=True):
            row[bisect_left(self.bounds, value)] += 1
            row[-1] += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        numbers = self._numbers
        if self.folder is not None:
            shared = [read_counts(path, self._shape) for path in self.folder.glob(f"{self.name}@*.histogram")]
            numbers = np.sum(shared if are_shared(numbers) else [numbers, *shared], axis=0)
        labels = [self.label] if self.label else []
        family = HistogramMetricFamily(self.name, self.text, labels=labels)
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for name, (*counts, total) in zip(self.names, numbers.tolist(), strict=True):
            values = [name] if self.label else []
            family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
            if self.folder is None:
                family.add_sample(f"{self.name}_created", dict(zip(labels, values, strict=True)), self._created)
        yield family


class WholeFilesCollector(MultiProcessCollector):
    """The library's sums over the files of all processes, without files that are not whole: its own stops at the first of them."""

    def collect(self) -> Any:
        files = [str(path) for path in Path(self._path).glob("*.db") if _is_whole(path)]
        return self.merge(files, accumulate=True)  # type: ignore[no-untyped-call]  # the library has no annotations


def _is_whole(path: Path) -> bool:
    """Whether the library can read its file to the end."""
    try:
        for _ in MmapedDict.read_all_values_from_file(path):  # type: ignore[no-untyped-call]  # the library has no annotations
            pass
    except (OSError, ValueError, RuntimeError, struct.error):
        return False
    return True


def _reserve_files(folder: Path) -> None:
    """Make the library's files of this process with all their bytes, as `shared_counts` does: it would make sparse ones. Raises OSError."""
    for prefix, size in FILE_BYTES.items():
        path = folder / f"{prefix}_{os.getpid()}.db"
        if not path.exists():  # else of a process that had this id: its counts are kept
            path.write_bytes(bytes(size))


class Metrics:
    """The metrics of one process. Counts of requests are plain numbers, which are added to the library's counters when they are read."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.folder = Path(os.environ[MULTIPROCESS]) if MULTIPROCESS in os.environ else None
        self.shared = self.folder is not None  # any worker reports the sums over all workers
        if self.folder is not None:
            _reserve_files(self.folder)
        self._requests = Counter("attend_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry)
        self._failures = Counter("attend_failures", "Requests refused or failed, by reason.", ["reason"], registry=self.registry)
        self._received = Counter("attend_received_bytes", "Bytes of request bodies, as received.", registry=self.registry)
        self._sent = Counter("attend_sent_bytes", "Bytes of reply bodies, as sent.", registry=self.registry)
        self.count_abandoned = Counter(
            "attend_abandoned_calls", "Calls dropped because the client disconnected.", registry=self.registry
        ).inc
        self.count_split = Counter("attend_out_of_memory_splits", "Batches split in halves for lack of memory.", registry=self.registry).inc
        self.layers = self._gauge("attend_layers", "Layers in memory.", "livemax")
        names = {"calls": "Waiting calls.", "operations": "Their predicted operations.", "bytes": "Their predicted memory."}
        self._queue = [self._gauge(f"attend_queue_{name}", text) for name, text in names.items()]
        self._held = self._gauge("attend_held_body_bytes", "Bytes of requests and replies, until a reply is sent.")
        self._memory = self._gauge("attend_device_memory_bytes", "Memory in use on the device; on a CPU, by the process.")
        self._sessions = self._gauge("attend_sessions", "Sessions.")
        self._pages = self._gauge("attend_session_bytes", "Bytes of the pages of sessions.")
        self._shared_pages = self._gauge("attend_session_shared_bytes", "Bytes of the pages that several sessions share.")
        self._ended = Counter("attend_sessions_ended", "Sessions that ended, by reason.", ["reason"], registry=self.registry)
        self.count_step = Counter("attend_session_steps", "Calls to sessions that were computed.", registry=self.registry).inc
        self._ready = self._gauge("attend_ready", "1 if the server is ready, else 0.", "livemin")
        self._counted_requests: Counts[tuple[str, int]] = Counts()
        self._bytes = [0, 0]  # received, sent
        self._collectors: list[Collector] = []
        self._phases = PlainHistogram(
            "attend_phase_seconds", "Time a request spends in a phase.", PHASE_BUCKETS, self.folder, "phase", Phases._fields
        )
        batches = PlainHistogram("attend_batch_calls", "Calls in a batch.", (1, 2, 4, 8, 16, 32, 64), self.folder)
        self.count_call, self.count_batch = self._phases.observe, batches.observe
        for histogram in (self._phases, batches):
            self.add(histogram)

    def add(self, collector: Collector) -> None:
        """Include the metrics of a collector that sums over all workers itself."""
        self.registry.register(collector)
        self._collectors.append(collector)

    def _gauge(self, name: str, text: str, over_workers: Any = "livesum") -> Gauge:
        return Gauge(name, text, registry=self.registry, multiprocess_mode=over_workers)

    def count_request(self, endpoint: str, status: int, received: int = 0, sent: int = 0) -> None:
        """Count a finished request; status 0 means that no reply was sent."""
        self._counted_requests[endpoint, status] += 1
        self._bytes[0] += received
        self._bytes[1] += sent
        if self.shared:  # a process may be killed, and its counts must survive
            self.record()

    def count_failure(self, reason: str) -> None:
        """Count a request that was refused or failed."""
        self._failures.labels(reason).inc()

    def count_ended_session(self, reason: str) -> None:
        self._ended.labels(reason).inc()

    def sample_sessions(self, count: int, used: int, shared: int) -> None:
        """Set the gauges of sessions: their number, the bytes of their pages, and of those that are shared."""
        self._sessions.set(count)
        self._pages.set(used)
        self._shared_pages.set(shared)

    def record(self) -> None:
        """Add what was counted since the last time to the metrics."""
        counted, self._counted_requests = self._counted_requests, Counts()
        for (endpoint, status), count in counted.items():
            self._requests.labels(endpoint, str(status)).inc(count)
        (received, sent), self._bytes = self._bytes, [0, 0]
        self._received.inc(received)
        self._sent.inc(sent)

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
        WholeFilesCollector(registry)  # type: ignore[no-untyped-call]  # the library has no annotations
        for collector in self._collectors:
            registry.register(collector)
        return generate_latest(registry)
