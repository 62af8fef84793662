"""Statistics of the calls to layers, in one process and summed over processes that share a folder."""

import multiprocessing
from pathlib import Path

import pytest

from service.serving.executor import Execution
from service.serving.metrics import Phases
from service.serving.statistics import SIZES, LayerStatistics

PHASES = Phases(decode=0.25, queue=0.5, compute=1.0, encode=0.125)


def started(folder: Path | None = None, now: float = 1.5) -> LayerStatistics:
    """Statistics of two layers, without calls."""
    statistics = LayerStatistics(folder, lambda: now)
    statistics.hold("a")
    statistics.hold("b")
    return statistics


def count(statistics: LayerStatistics) -> None:
    """A call by itself, two of a batch of three whose third caller left, one that failed, and one to another layer."""
    statistics.answered("a", PHASES, 3, Execution(3), 10)
    batch = Execution(8)
    statistics.answered("a", PHASES, 5, batch, 10)
    statistics.answered("a", PHASES, 1, batch, 10)
    statistics.failed("a", 2.0)
    statistics.answered("b", PHASES, 1, Execution(1), 7)


def series(statistics: LayerStatistics) -> dict[tuple[str, str], float]:
    return {(sample.name, sample.labels["layer"]): sample.value for family in statistics.collect() for sample in family.samples}


def test_calls_are_counted_by_batch_size() -> None:
    statistics = started()
    count(statistics)

    found = statistics.all()["a"]

    answered = found.answered
    assert (answered.calls, answered.items, answered.operations, answered.last, answered.executions) == (3, 9, 30, 1500, 2)
    assert (answered.total, answered.decode, answered.compute) == (5_625_000_000, 750_000_000, 3_000_000_000)
    assert (found.failed.calls, found.failed.total) == (1, 2_000_000_000)
    batches = {size: (row.items, row.calls, row.executions, row.execution) for size, row in found.batches.items()}
    assert batches == {3: (3, 1, 1, 1_000_000_000), 8: (6, 2, 1, 1_000_000_000)}
    statistics.forget("a")
    assert set(statistics.all()) == {"b"}


def test_many_batch_sizes_are_all_counted_in_bounded_memory() -> None:
    statistics = started()
    for size in range(1, 3 * SIZES):
        statistics.answered("a", PHASES, size, Execution(size), 1)
    statistics.failed("a", 1.0)

    found = statistics.all()["a"]

    assert (found.answered.calls, found.answered.executions, found.failed.calls) == (3 * SIZES - 1, 3 * SIZES - 1, 1)
    assert list(found.batches) == list(range(1, SIZES + 1)) and len(found.rows) == SIZES + 2


def test_processes_of_one_folder_report_the_sum_which_outlives_them(tmp_path: Path) -> None:
    one, other = started(tmp_path, 1.0), started(tmp_path, 2.0)
    alone = started(None, 2.0)
    for statistics in (one, other, alone, alone):
        count(statistics)

    assert one.all() == other.all() == alone.all()
    assert series(one) == series(other) == series(alone)
    one.close()
    count(one)  # a call that ends too late
    assert other.all() == alone.all()


@pytest.mark.parametrize("shared", [False, True])
def test_layers_that_come_and_go_leave_nothing(shared: bool, tmp_path: Path) -> None:
    """Neither a series nor a file, even where a call outlives its layer."""
    statistics = started(tmp_path if shared else None)
    statistics.answered("a", PHASES, 1, Execution(1), 10)
    for turn in range(50):
        layer = f"layer.{turn}"
        statistics.hold(layer)
        statistics.answered(layer, PHASES, 1, Execution(1), 10)
        statistics.forget(layer)
        statistics.answered(layer, PHASES, 1, Execution(1), 10)
        statistics.failed(layer, 1.0)

    assert series(statistics) == {("attend_layer_calls_total", "a"): 1, ("attend_layer_operations_total", "a"): 10}
    assert list(statistics.all()) == ["a"]
    assert len(list(tmp_path.iterdir())) == shared


def _count_and_leave(folder: Path) -> None:
    count(started(folder))


def test_counts_of_an_ended_process_stay_until_the_layer_is_removed(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_count_and_leave, args=(tmp_path,))
    process.start()
    process.join()
    statistics = started(tmp_path)

    assert statistics.all()["a"].answered.calls == 3
    statistics.forget("a")
    assert set(statistics.all()) == {"b"}
