"""Statistics of the calls to each layer since the server started, over every protocol.

Times are added up per layer and batch size. Where several processes serve, each writes its numbers to shared counters,
and any of them can read the sum.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from service.serving.executor import Execution
from service.serving.metrics import Phases
from service.serving.shared_counters import SharedCounters

FAILED, OTHERS = -1, -2  # in the place of a batch size: calls that were not answered, and those of sizes that have no row of their own
SIZES = 256  # of one layer that have one; callers choose them


@dataclass(slots=True)
class Tally:
    """How often something happened, and how long it took altogether."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class Row:
    """Calls of one kind. Times in nanoseconds, but `last`: when the last one was answered, in milliseconds since 1970.

    Calls that were stacked are computed at once: `executions` counts that once for all of them, as `executing` does the time it took.
    """

    count: int = 0
    items: int = 0  # of the batch axis
    last: int = 0
    whole: int = 0
    queue: int = 0
    decode: int = 0
    compute: int = 0
    encode: int = 0
    executions: int = 0
    executing: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in FIELDS)

    def add(self, values: Iterable[int]) -> None:
        """Counts more calls of this kind."""
        for name, value in zip(FIELDS, values, strict=True):
            setattr(self, name, max(self.last, value) if name == "last" else getattr(self, name) + value)

    def take(self, phases: Phases, items: int, last: int, execution: Execution) -> None:
        """Counts one call more. Spelt out, since it stands on every request's way."""
        queue, decode = round(phases.queue * 1e9), round(phases.decode * 1e9)
        compute, encode = round(phases.compute * 1e9), round(phases.encode * 1e9)
        self.count += 1
        self.items += items
        self.last = last
        self.queue += queue
        self.decode += decode
        self.compute += compute
        self.encode += encode
        self.whole += queue + decode + compute + encode
        if not execution.counted:  # by another call
            execution.counted = True
            self.executions += 1
            self.executing += compute

    def phase(self, name: str) -> Tally:
        return Tally(self.count, getattr(self, name))


FIELDS = tuple(part.name for part in fields(Row))


@dataclass(slots=True)
class Statistics:
    """Calls that reached a layer. `rows` maps how many batch items were computed together, of all calls that were stacked, to what is
    counted of those calls."""

    rows: dict[int, Row] = field(default_factory=dict)

    @property
    def batches(self) -> dict[int, Row]:
        """By their size."""
        return {size: row for size, row in sorted(self.rows.items()) if size >= 0}

    @property
    def answered(self) -> Row:
        """All that were."""
        together = Row()
        for size, row in self.rows.items():
            if size != FAILED:
                together.add(row.values)
        return together

    @property
    def failed(self) -> Row:
        return self.rows.get(FAILED, Row())

    @property
    def executions(self) -> int:
        """Batches computed. A caller who left in the meantime is missing among the calls, but not his batch."""
        return self.answered.executions


class Counter:
    """Counts the calls to all layers; with a `folder`, together with the other processes that share it."""

    def __init__(
        self, folder: Path | None = None, wall: Callable[[], float] = time.time, holds: Callable[[str], bool] = lambda layer: True
    ) -> None:
        """`holds` says of a layer's name whether it is still held: calls that outlive their layer are not counted."""
        self.wall, self.holds = wall, holds
        self.shared = None if folder is None else SharedCounters(folder, len(FIELDS))
        self._layers: dict[str, Statistics] = {}

    def answered(self, layer: str, phases: Phases, items: int, execution: Execution) -> None:
        """One call with `items` on its batch axis, computed in that execution."""
        if not self.holds(layer):
            return
        size, row = self._row(layer, execution.items)
        row.take(phases, items, round(self.wall() * 1e3), execution)
        self._write(layer, size, row)

    def failed(self, layer: str, seconds: float) -> None:
        """One call that was not answered, after so long."""
        if not self.holds(layer):
            return
        _, row = self._row(layer, FAILED)
        row.count += 1
        row.whole += round(seconds * 1e9)
        self._write(layer, FAILED, row)

    def all(self) -> Mapping[str, Statistics]:
        """Layer -> what has been counted of the calls to it, by all. A copy, which may be taken and read on any thread."""
        if self.shared is None:
            return {layer: Statistics(dict(statistics.rows)) for layer, statistics in list(self._layers.items())}
        together: dict[str, Statistics] = {}
        for layer, size, values in self.shared.read():
            together.setdefault(layer, Statistics()).rows.setdefault(size, Row()).add(values)
        return together

    def forget(self, layer: str) -> None:
        """A layer was removed; another of its name begins anew."""
        self._layers.pop(layer, None)
        if self.shared is not None:
            self.shared.forget(layer)

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()

    def _row(self, layer: str, size: int) -> tuple[int, Row]:
        """The row of batches of that size, and what it goes by."""
        if (statistics := self._layers.get(layer)) is None:
            statistics = self._layers[layer] = Statistics()
        if (row := statistics.rows.get(size)) is None:
            if size != FAILED and len(statistics.rows) >= SIZES:
                size = OTHERS
            row = statistics.rows.setdefault(size, Row())
        return size, row

    def _write(self, layer: str, size: int, row: Row) -> None:
        if self.shared is not None:
            self.shared.write(layer, size, row.values)
