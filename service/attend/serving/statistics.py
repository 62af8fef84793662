"""Counts the calls to each layer since the server started, over all protocols, for V2's statistics and /metrics.

A process has one table per layer: a row per batch size, a column per field of `Totals`. With several processes, a table is a
memory-mapped file, and any process can read the sum over all files of a layer. A file is kept when its process dies, so that counts
survive, and is removed with its layer. (prometheus_client's own files would keep the labels of removed layers for ever.)
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class LayerTotals:
    """Calls to one layer. `rows` maps a batch size (items computed together) to the totals of its calls."""

    rows: Mapping[int, Totals] = field(default_factory=dict)

    @property
    def batches(self) -> dict[int, Totals]:
        """Totals by batch size, without failed calls and sizes without a row."""
        return {size: row for size, row in sorted(self.rows.items()) if size >= 0}

    @property
    def answered(self) -> Totals:
        """Totals over all batch sizes. A batch is counted even if some of its callers have disconnected."""
        return reduce(Totals.plus, (row for size, row in self.rows.items() if size != FAILED), Totals())

    @property
    def failed(self) -> Totals:
        return self.rows.get(FAILED, Totals())


class LayerStatistics(Collector):
    """Counts the calls to all loaded layers. With a `folder`, its numbers are sums over all processes that use the folder."""

    def __init__(self, folder: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self.folder, self.wall = folder, wall
        self._process = f"{os.getpid()}-{token_hex(4)}"  # process ids are reused
        self._tables: dict[str, _Table | None] = {}  # by loaded layer; None until its first call

    def add_layer(self, layer: str) -> None:
        """Start counting calls to a layer."""
        self._tables.setdefault(layer)

    def remove_layer(self, layer: str) -> None:
        """Delete the counts of a layer in this process and in those that have ended. Other processes delete their own."""
        self._tables.pop(layer, None)
        for path in self._files(layer):
            owner = path.stem.rpartition("@")[2]
            if owner == self._process or not _is_alive(int(owner.partition("-")[0])):
                path.unlink(missing_ok=True)

    def count_answered(self, layer: str, phases: Phases, items: int, operations: int, outcome: Outcome) -> None:
        """Count an answered call of `items` batch items and `operations`. Does nothing if the layer was removed meanwhile."""
        table = self._tables.get(layer)
        row = (table and table.rows.get(outcome.items)) or self._row(layer, outcome.items)
        if row is None:
            return
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
        """Count a call that failed after `seconds`."""
        if (row := self._row(layer, FAILED)) is not None:
            row[CALLS] += 1
            row[TOTAL] += round(seconds * 1e9)

    def all(self) -> dict[str, LayerTotals]:
        """Layer -> statistics over all processes, as a copy. Thread-safe."""
        tables: dict[str, list[Array]] = {}
        for layer, table in list(self._tables.items()):
            if table is not None and not are_shared(table.numbers):
                tables[layer] = [table.numbers]
        for path in self._files():
            tables.setdefault(path.stem.rpartition("@")[0], []).append(read_counts(path, SHAPE))
        return {layer: _sum(found) for layer, found in tables.items()}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Calls and operations of each layer that was called, for /metrics."""
        calls = CounterMetricFamily("attend_layer_calls", "Calls computed, by layer.", labels=["layer"])
        operations = CounterMetricFamily("attend_layer_operations", "Predicted operations computed, by layer.", labels=["layer"])
        for layer, statistics in self.all().items():
            if (answered := statistics.answered).calls:
                calls.add_metric([layer], answered.calls)
                operations.add_metric([layer], answered.operations)
        yield calls
        yield operations

    def close(self) -> None:
        """Stop counting. Files are kept for the other processes to read."""
        self._tables.clear()

    def _row(self, layer: str, size: int) -> memoryview | None:
        """The totals of a layer and batch size, as float64; None if the layer is not loaded."""
        if layer not in self._tables:
            return None
        if (table := self._tables[layer]) is None:
            table = self._tables[layer] = _Table(None if self.folder is None else self.folder / f"{layer}@{self._process}.calls")
        return table.row(size)

    def _files(self, layer: str = "*") -> Iterable[Path]:
        return () if self.folder is None else self.folder.glob(f"{layer}@*.calls")


class _Table:
    """One process's totals of one layer, in memory or, with a path, in a memory-mapped file."""

    def __init__(self, path: Path | None) -> None:
        self.numbers = new_counts(path, SHAPE)
        self.rows: dict[int, memoryview] = {}

    def row(self, size: int) -> memoryview:
        if (row := self.rows.get(size)) is None:
            if size >= 0 and len(self.rows) >= MAX_BATCH_SIZES:
                return self.row(OTHER_SIZES)
            row = self.rows[size] = memoryview(self.numbers[len(self.rows)])  # faster than numpy for single numbers
            row[SIZE] = size
        return row


def _sum(tables: Iterable[Array]) -> LayerTotals:
    rows: dict[int, Totals] = {}
    for table in tables:
        for numbers in table[table[:, CALLS] > 0]:
            row = Totals(*map(int, numbers))
            rows[row.size] = rows[row.size].plus(row) if row.size in rows else row
    return LayerTotals(rows)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
