"""Statistics of the calls to each layer since the server started, over every protocol: for V2's statistics and for /metrics.

A process adds its calls to a table per layer: a row per batch size, a column per field of `Totals`. Where several processes serve, a table
is a file that its process maps into memory, and any process reads the sum over all files of a layer. A file outlives its process, so that
counts survive a worker that dies, and goes with its layer. (prometheus_client's own files keep the labels of removed layers for ever.)
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from service.serving.executor import Execution
from service.serving.metrics import Phases
from service.tensors import Array

SIZES = 256  # rows of a table, at most, for batch sizes, which callers choose
FAILED, OTHERS = -1, -2  # in place of a batch size: calls that failed, and those of sizes that have no row


class Totals(NamedTuple):
    """Sums over the calls of one batch size. Times are in nanoseconds; `last` is when the last call was answered, in ms since 1970.

    Calls of one batch are computed at once: each of them adds the time to `compute`, and only one adds it to `execution`.
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
        """The totals of both."""
        added = Totals(*map(sum, zip(self, other, strict=True)))
        return added._replace(size=self.size, last=max(self.last, other.last))


FIELDS = len(Totals._fields)
SIZE, CALLS, ITEMS, OPERATIONS, LAST, TOTAL, QUEUE, DECODE, COMPUTE, ENCODE, EXECUTIONS, EXECUTION = range(FIELDS)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Calls to one layer. `rows` maps the number of batch items that were computed together to the totals of those calls."""

    rows: Mapping[int, Totals] = field(default_factory=dict)

    @property
    def batches(self) -> dict[int, Totals]:
        """By batch size, without those that failed or have no row of their own."""
        return {size: row for size, row in sorted(self.rows.items()) if size >= 0}

    @property
    def answered(self) -> Totals:
        """Of all batch sizes. A batch counts as executed even if some of its callers have gone."""
        return reduce(Totals.plus, (row for size, row in self.rows.items() if size != FAILED), Totals())

    @property
    def failed(self) -> Totals:
        return self.rows.get(FAILED, Totals())


class LayerStatistics(Collector):
    """Counts the calls to all layers that are held; with a `folder`, together with the other processes that use it."""

    def __init__(self, folder: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self.folder, self.wall = folder, wall
        self._process = f"{os.getpid()}-{token_hex(4)}"  # process ids are reused
        self._tables: dict[str, _Table | None] = {}  # of the layers that are held; None until the first call

    def hold(self, layer: str) -> None:
        """Counts the calls to that layer from now on."""
        self._tables.setdefault(layer)

    def forget(self, layer: str) -> None:
        """Drops what was counted of a removed layer, by this process and by those that have ended. The others drop theirs themselves."""
        self._tables.pop(layer, None)
        for path in self._files(layer):
            owner = path.stem.rpartition("@")[2]
            if owner == self._process or not _is_alive(int(owner.partition("-")[0])):
                path.unlink(missing_ok=True)

    def answered(self, layer: str, phases: Phases, items: int, execution: Execution, operations: int) -> None:
        """Counts a call with `items` on its batch axis, computed in that execution; nothing where the layer has been removed since."""
        if (row := self._row(layer, execution.items)) is None:
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
        if not execution.counted:  # by another call of the batch
            execution.counted = True
            row[EXECUTIONS] += 1
            row[EXECUTION] += compute

    def failed(self, layer: str, seconds: float) -> None:
        """Counts a call that failed after that time."""
        if (row := self._row(layer, FAILED)) is not None:
            row[CALLS] += 1
            row[TOTAL] += round(seconds * 1e9)

    def all(self) -> dict[str, Statistics]:
        """Layer -> statistics, over all processes. A copy, which any thread may take."""
        tables: dict[str, list[Array]] = {}
        if self.folder is None:
            tables = {layer: [table.numbers] for layer, table in list(self._tables.items()) if table is not None}
        for path in self._files():
            with suppress(FileNotFoundError):  # forgotten since
                tables.setdefault(path.stem.rpartition("@")[0], []).append(np.fromfile(path).reshape(-1, FIELDS))
        return {layer: _sum(found) for layer, found in tables.items()}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Two metrics of /metrics, for the layers that were called."""
        calls = CounterMetricFamily("attend_layer_calls", "Calls computed, by layer.", labels=["layer"])
        operations = CounterMetricFamily("attend_layer_operations", "Predicted operations computed, by layer.", labels=["layer"])
        for layer, statistics in self.all().items():
            if (answered := statistics.answered).calls:
                calls.add_metric([layer], answered.calls)
                operations.add_metric([layer], answered.operations)
        yield calls
        yield operations

    def close(self) -> None:
        """Counts no more. Files stay, for the other processes to read."""
        self._tables.clear()

    def _row(self, layer: str, size: int) -> memoryview | None:
        """The totals of that layer and batch size, as float64; None where the layer is not held."""
        if layer not in self._tables:
            return None
        if (table := self._tables[layer]) is None:
            table = self._tables[layer] = _Table(None if self.folder is None else self.folder / f"{layer}@{self._process}.calls")
        return table.row(size)

    def _files(self, layer: str = "*") -> Iterable[Path]:
        return () if self.folder is None else self.folder.glob(f"{layer}@*.calls")


class _Table:
    """One process's totals of one layer; at that path, if there is one."""

    def __init__(self, path: Path | None) -> None:
        shape = SIZES + 2, FIELDS
        self.numbers: Array = np.zeros(shape) if path is None else np.memmap(path, np.float64, "w+", shape=shape)
        self._rows: dict[int, memoryview] = {}

    def row(self, size: int) -> memoryview:
        if (row := self._rows.get(size)) is None:
            if size >= 0 and len(self._rows) >= SIZES:
                return self.row(OTHERS)
            row = self._rows[size] = memoryview(self.numbers[len(self._rows)])  # faster than numpy for single numbers
            row[SIZE] = size
        return row


def _sum(tables: Iterable[Array]) -> Statistics:
    rows: dict[int, Totals] = {}
    for table in tables:
        for numbers in table[table[:, CALLS] > 0]:
            row = Totals(*map(int, numbers))
            rows[row.size] = rows[row.size].plus(row) if row.size in rows else row
    return Statistics(rows)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
