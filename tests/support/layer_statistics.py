"""Calls that statistics count. A spawned process runs `count_and_leave`, and cannot import test modules."""

from pathlib import Path

from attend.attention.call import Result
from attend.serving.executor import Outcome
from attend.serving.metrics import Phases
from attend.serving.statistics import LayerStatistics

PHASES = Phases(decode=0.25, queue=0.5, compute=1.0, encode=0.125)


def started(folder: Path | None = None, now: float = 1.5) -> LayerStatistics:
    """Statistics of two layers, without calls."""
    statistics = LayerStatistics(folder, lambda: now)
    statistics.add_layer("a")
    statistics.add_layer("b")
    return statistics


def outcome(items: int, is_counted: bool = True) -> Outcome:
    """The outcome of a call in a batch of so many items."""
    return Outcome(Result(), 0.5, 1.0, 1, items, 10, is_counted)


def count(statistics: LayerStatistics) -> None:
    """A call by itself, two of a batch of three whose third caller left, one that failed, and one to another layer."""
    statistics.count_answered("a", PHASES, 3, 10, outcome(3))
    statistics.count_answered("a", PHASES, 5, 10, outcome(8))
    statistics.count_answered("a", PHASES, 1, 10, outcome(8, is_counted=False))
    statistics.count_failed("a", 2.0)
    statistics.count_answered("b", PHASES, 1, 7, outcome(1))


def count_and_leave(folder: Path) -> None:
    """Writes statistics into the folder and ends, so that other processes read them."""
    count(started(folder))
