"""What has been counted of the calls to one layer, from one process's start on: whoever asked, and in whatever form.

Metrics tell an operator about the process; this tells a caller about a layer. Pure counting, on the event loop, in nanoseconds.
"""

import time
from collections.abc import Callable
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
    success: Tally = field(default_factory=Tally)
    fail: Tally = field(default_factory=Tally)
    phases: dict[str, Tally] = field(default_factory=lambda: _tallies())
    batches: dict[int, dict[str, Tally]] = field(default_factory=dict)

    @property
    def executions(self) -> int:
        """Batches computed. A caller who left in the meantime is missing among the calls, but not his batch."""
        return sum(-(-phases["compute"].count // calls) for calls, phases in self.batches.items())

    def answered(self, phases: Phases, items: int, calls: int) -> None:
        """One call with `items` on its batch axis, computed among `calls`."""
        self.last = self.wall()
        self.items += items
        batch = self.batches.setdefault(calls, _tallies())
        for name in PHASES:
            seconds = getattr(phases, name)
            self.phases[name].add(seconds)
            batch[name].add(seconds)
        self.success.add(phases.decode + phases.queue + phases.compute + phases.encode)

    def failed(self, seconds: float) -> None:
        self.fail.add(seconds)


def _tallies() -> dict[str, Tally]:
    return {name: Tally() for name in PHASES}
