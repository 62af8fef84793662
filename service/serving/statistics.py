"""What has been counted of the calls to one layer, from one process's start on: whoever asked, and in whatever form.

Metrics tell an operator about the process; this tells a caller about a layer. Pure counting, on the event loop, in nanoseconds.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from service.serving.metrics import Phases

PHASES = ("queue", "decode", "compute", "encode")


@dataclass(slots=True)
class Tally:
    """How often something happened, and how long it took altogether."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class Statistics:
    """Calls that reached a layer. `batches` maps how many were computed together to the phases of those calls."""

    wall: Callable[[], float] = time.time
    last: float = 0.0  # when the last one was answered, in seconds since 1970
    items: int = 0  # of the batch axis, in calls that were answered
    fail: Tally = field(default_factory=Tally)
    batches: dict[int, dict[str, Tally]] = field(default_factory=dict)

    @property
    def executions(self) -> int:
        """Batches computed. A caller who left in the meantime is missing among the calls, but not his batch."""
        return sum(-(-phases["compute"].count // calls) for calls, phases in self.batches.items())

    @property
    def phases(self) -> dict[str, Tally]:
        """The phases of all calls that were answered."""
        return {name: _sum(batch[name] for batch in self.batches.values()) for name in PHASES}

    @property
    def success(self) -> Tally:
        """The calls that were answered, from decoding to encoding."""
        phases = self.phases.values()
        return Tally(max(phase.count for phase in phases), sum(phase.ns for phase in phases))

    def answered(self, phases: Phases, items: int, calls: int) -> None:
        """One call with `items` on its batch axis, computed among `calls`."""
        self.last = self.wall()
        self.items += items
        if (batch := self.batches.get(calls)) is None:
            batch = self.batches[calls] = {name: Tally() for name in PHASES}
        for name, tally in batch.items():
            tally.add(getattr(phases, name))

    def failed(self, seconds: float) -> None:
        self.fail.add(seconds)


def _sum(tallies: Iterable[Tally]) -> Tally:
    counted = list(tallies)
    return Tally(sum(tally.count for tally in counted), sum(tally.ns for tally in counted))
