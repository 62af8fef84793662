"""Counts the calls to each layer since the server started, over all protocols, for V2's statistics and /metrics.

A process has one table per layer: a row per batch size, a column per field of `Totals`. With several processes, a table is a
memory-mapped file, and any process can read the sum over all files of a layer. A file is kept when its process dies, so that counts
survive, and is removed with its layer. (prometheus_client's own files would keep the labels of removed layers for ever.)
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from attend.serving.executor import Outcome
from attend.serving.metrics import Phases
from attend.serving.shared_counts import are_shared, new_counts, read_counts
from attend.tensors import Array

MAX_BATCH_SIZES = 256  # most batch sizes with a row of their own: callers choose batch sizes, so a table must be bounded
FAILED, OTHER_SIZES = -1, -2  # used as batch sizes: failed calls, and calls of sizes without a row


class Totals(NamedTuple):
    """Sums over the calls of one batch size. Times are in nanoseconds; `last` is when the last call was answered, in ms since 1970.

    Every call of a batch adds the batch's time to `compute`; only one of them adds it to `execution`.
    """

    size: int = 0
    calls: int = 0
    items: int = 0  # of the batch axis
    operations: int = 0  # predicted
    last: int = 0
    total: int = 0
    queue: int = 0
    decode: int = 0
    compute: int = 0
    encode: int = 0
    executions: int = 0
    execution: int = 0

    def plus(self, other: "Totals") -> "Totals":
        """The sum of both; `last` is the later one."""
        added = Totals(*map(sum, zip(self, other, strict=True)))
        return added._replace(size=self.size, last=max(self.last, other.last))


FIELDS = len(Totals._fields)
SHAPE = MAX_BATCH_SIZES + 2, FIELDS  # of a table
SIZE, CALLS, ITEMS, OPERATIONS, LAST, TOTAL, QUEUE, DECODE, COMPUTE, ENCODE, EXECUTIONS, EXECUTION = range(FIELDS)


def answered(rows: Mapping[int, Totals]) -> Totals:
    """Totals over all batch sizes. A batch is counted even if some of its callers have disconnected."""
    return reduce(Totals.plus, (row for size, row in rows.items() if size != FAILED), Totals())


class LayerStatistics(Collector):
    """Counts the calls to all loaded layers. With a `folder`, its numbers are sums over all processes that use the folder."""

    def __init__(self, folder: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self.folder, self.wall = folder, wall
        self._process = f"{os.getpid()}-{token_hex(4)}"  # process ids are reused
        self._rows: dict[str, dict[int, memoryview]] = {}  # loaded layer -> batch size -> row of its table
        self._tables: dict[str, Array] = {}  # of the layers that were called

    def add_layer(self, layer: str) -> None:
        """Start counting calls to a layer."""
        self._rows.setdefault(layer, {})

    def remove_layer(self, layer: str) -> None:
        """Delete the counts of a layer in this process and in those that have ended. Other processes delete their own."""
        self._rows.pop(layer, None)
        self._tables.pop(layer, None)
        for path in self._files(layer):
            owner = path.stem.rpartition("@")[2]
            if owner == self._process or not _is_alive(int(owner.partition("-")[0])):
                path.unlink(missing_ok=True)

    def count_answered(self, layer: str, phases: Phases, items: int, operations: int, outcome: Outcome) -> None:
        """Count an answered call of `items` batch items and `operations`. Does nothing if the layer was removed meanwhile."""
        if (rows := self._rows.get(layer)) is None:
            return
        row = rows.get(outcome.items) or self._row(layer, outcome.items)
        queue, decode = round(phases.queue * 1e9), round(phases.decode * 1e9)
        compute, encode = round(phases.compute * 1e9), round(phases.encode * 1e9)
        row[CALLS] += 1
        row[ITEMS] += items
        row[OPERATIONS] += operations
        row[LAST] = round(self.wall() * 1e3)
        row[TOTAL] += queue + decode + compute + encode
        row[QUEUE] += queue
        row[DECODE] += decode
        row[COMPUTE] += compute
        row[ENCODE] += encode
        if outcome.is_counted:
            row[EXECUTIONS] += 1
            row[EXECUTION] += compute

    def count_failed(self, layer: str, seconds: float) -> None:
        """Count a call that failed after `seconds`. Does nothing if the layer was removed meanwhile."""
        if layer in self._rows:
            row = self._row(layer, FAILED)
            row[CALLS] += 1
            row[TOTAL] += round(seconds * 1e9)

    def all(self) -> dict[str, dict[int, Totals]]:
        """Layer -> batch size, in ascending order -> statistics over all processes, as a copy. Thread-safe."""
        tables: dict[str, list[Array]] = {}
        for layer, table in list(self._tables.items()):
            if not are_shared(table):
                tables[layer] = [table]
        for path in self._files():
            tables.setdefault(path.stem.rpartition("@")[0], []).append(read_counts(path, SHAPE))
        return {layer: _sum(found) for layer, found in tables.items()}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Calls and operations of each layer that was called, for /metrics."""
        calls = CounterMetricFamily("attend_layer_calls", "Calls computed, by layer.", labels=["layer"])
        operations = CounterMetricFamily("attend_layer_operations", "Predicted operations computed, by layer.", labels=["layer"])
        for layer, rows in self.all().items():
            if (whole := answered(rows)).calls:
                calls.add_metric([layer], whole.calls)
                operations.add_metric([layer], whole.operations)
        yield calls
        yield operations

    def close(self) -> None:
        """Stop counting. Files are kept for the other processes to read."""
        self._rows.clear()
        self._tables.clear()

    def _row(self, layer: str, size: int) -> memoryview:
        """The totals of a loaded layer and a batch size, as float64: for its first call, the next row of the table."""
        rows = self._rows[layer]
        if (row := rows.get(size)) is None:
            if size >= 0 and len(rows) >= MAX_BATCH_SIZES:
                return self._row(layer, OTHER_SIZES)
            if not rows:
                path = None if self.folder is None else self.folder / f"{layer}@{self._process}.calls"
                self._tables[layer] = new_counts(path, SHAPE)
            row = rows[size] = memoryview(self._tables[layer][len(rows)])  # faster than NumPy for single numbers
            row[SIZE] = size
        return row

    def _files(self, layer: str = "*") -> Iterable[Path]:
        return () if self.folder is None else self.folder.glob(f"{layer}@*.calls")


def _sum(tables: Iterable[Array]) -> dict[int, Totals]:
    """The totals by batch size, in ascending order."""
    rows: dict[int, Totals] = {}
    for table in tables:
        for numbers in table[table[:, CALLS] > 0]:
            row = Totals(*map(int, numbers))
            rows[row.size] = rows[row.size].plus(row) if row.size in rows else row
    return dict(sorted(rows.items()))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
