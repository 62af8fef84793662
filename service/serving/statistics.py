"""What has been counted of the calls to each layer since the server started: whoever asked, and in whatever form.

Metrics tell an operator about the process; this tells a caller about a layer. Pure counting, on the event loop, in nanoseconds. Where
several processes serve, each writes what it counts to a ledger that all can read (`ledger.py`), and whichever is asked tells of all.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from service.serving.ledger import Ledger
from service.serving.metrics import Phases

FAILED = 0  # in the place of how many calls were computed together, for calls that were not answered


@dataclass(slots=True)
class Tally:
    """How often something happened, and how long it took altogether."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class Row:
    """Calls of one kind. Times in nanoseconds, but `last`: when the last one was answered, in milliseconds since 1970."""

    count: int = 0
    items: int = 0  # of the batch axis
    last: int = 0
    whole: int = 0
    queue: int = 0
    decode: int = 0
    compute: int = 0
    encode: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in FIELDS)

    def add(self, values: Iterable[int]) -> None:
        """Counts more calls of this kind."""
        for name, value in zip(FIELDS, values, strict=True):
            setattr(self, name, max(self.last, value) if name == "last" else getattr(self, name) + value)

    def take(self, phases: Phases, items: int, last: int) -> None:
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

    def phase(self, name: str) -> Tally:
        return Tally(self.count, getattr(self, name))


FIELDS = tuple(part.name for part in fields(Row))


@dataclass(slots=True)
class Statistics:
    """Calls that reached a layer. `rows` maps how many were computed together to what is counted of those calls."""

    rows: dict[int, Row] = field(default_factory=dict)

    @property
    def batches(self) -> dict[int, Row]:
        return {calls: row for calls, row in sorted(self.rows.items()) if calls != FAILED}

    @property
    def answered(self) -> Row:
        """All that were."""
        together = Row()
        for row in self.batches.values():
            together.add(row.values)
        return together

    @property
    def failed(self) -> Row:
        return self.rows.get(FAILED, Row())

    @property
    def executions(self) -> int:
        """Batches computed. A caller who left in the meantime is missing among the calls, but not his batch."""
        return sum(-(-row.count // calls) for calls, row in self.batches.items())


class Counter:
    """Counts the calls to all layers; with a `folder`, together with the other processes that share it."""

    def __init__(self, folder: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self.wall = wall
        self.ledger = None if folder is None else Ledger(folder, len(FIELDS))
        self._layers: dict[str, Statistics] = {}

    def answered(self, layer: str, phases: Phases, items: int, calls: int) -> None:
        """One call with `items` on its batch axis, computed among `calls`."""
        row = self._row(layer, calls)
        row.take(phases, items, round(self.wall() * 1e3))
        self._write(layer, calls, row)

    def failed(self, layer: str, seconds: float) -> None:
        """One call that was not answered, after so long."""
        row = self._row(layer, FAILED)
        row.count += 1
        row.whole += round(seconds * 1e9)
        self._write(layer, FAILED, row)

    def all(self) -> Mapping[str, Statistics]:
        """Layer -> what has been counted of the calls to it, by all."""
        if self.ledger is None:
            return self._layers
        together: dict[str, Statistics] = {}
        for layer, calls, values in self.ledger.read():
            together.setdefault(layer, Statistics()).rows.setdefault(calls, Row()).add(values)
        return together

    def forget(self, layer: str) -> None:
        """A layer was removed; another of its name begins anew."""
        self._layers.pop(layer, None)
        if self.ledger is not None:
            self.ledger.forget(layer)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def _row(self, layer: str, calls: int) -> Row:
        if (statistics := self._layers.get(layer)) is None:
            statistics = self._layers[layer] = Statistics()
        if (row := statistics.rows.get(calls)) is None:
            row = statistics.rows[calls] = Row()
        return row

    def _write(self, layer: str, calls: int, row: Row) -> None:
        if self.ledger is not None:
            self.ledger.write(layer, calls, row.values)
