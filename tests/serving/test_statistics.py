"""Statistics of the calls to layers, in one process and summed over processes that share a folder."""

import multiprocessing
from pathlib import Path

import pytest

from attend.serving.statistics import FAILED, MAX_BATCH_SIZES, OTHER_SIZES, LayerStatistics, answered
from support.layer_statistics import PHASES, count, count_and_leave, outcome, started


def series(statistics: LayerStatistics) -> dict[tuple[str, str], float]:
    return {(sample.name, sample.labels["layer"]): sample.value for family in statistics.collect() for sample in family.samples}


def test_calls_are_counted_by_batch_size() -> None:
    statistics = started()
    count(statistics)

    found = statistics.all()["a"]

    whole = answered(found)
    assert (whole.calls, whole.items, whole.operations, whole.last, whole.executions) == (3, 9, 30, 1500, 2)
    assert (whole.total, whole.decode, whole.compute) == (5_625_000_000, 750_000_000, 3_000_000_000)
    assert (found[FAILED].calls, found[FAILED].total) == (1, 2_000_000_000)
    batches = {size: (row.items, row.calls, row.executions, row.execution) for size, row in found.items() if size != FAILED}
    assert batches == {3: (3, 1, 1, 1_000_000_000), 8: (6, 2, 1, 1_000_000_000)}
    statistics.remove_layer("a")
    assert set(statistics.all()) == {"b"}


def test_many_batch_sizes_are_all_counted_in_bounded_memory() -> None:
    statistics = started()
    for size in range(1, 3 * MAX_BATCH_SIZES):
        statistics.count_answered("a", PHASES, size, 1, outcome(size))
    statistics.count_failed("a", 1.0)

    found = statistics.all()["a"]

    whole = answered(found)
    assert (whole.calls, whole.executions, found[FAILED].calls) == (3 * MAX_BATCH_SIZES - 1, 3 * MAX_BATCH_SIZES - 1, 1)
    assert list(found) == [OTHER_SIZES, FAILED, *range(1, MAX_BATCH_SIZES + 1)]


def test_processes_that_share_a_folder_report_sums_that_outlive_them(tmp_path: Path) -> None:
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
def test_removed_layers_leave_no_series_and_no_file(shared: bool, tmp_path: Path) -> None:
    """Even if a call ends after its layer was removed."""
    statistics = started(tmp_path if shared else None)
    statistics.count_answered("a", PHASES, 1, 10, outcome(1))
    for turn in range(50):
        layer = f"layer.{turn}"
        statistics.add_layer(layer)
        statistics.count_answered(layer, PHASES, 1, 10, outcome(1))
        statistics.remove_layer(layer)
        statistics.count_answered(layer, PHASES, 1, 10, outcome(1))
        statistics.count_failed(layer, 1.0)

    assert series(statistics) == {("attend_layer_calls_total", "a"): 1, ("attend_layer_operations_total", "a"): 10}
    assert list(statistics.all()) == ["a"]
    assert len(list(tmp_path.iterdir())) == shared


def test_counts_of_an_ended_process_remain_until_the_layer_is_removed(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=count_and_leave, args=(tmp_path,))
    process.start()
    process.join()
    statistics = started(tmp_path)

    assert answered(statistics.all()["a"]).calls == 3
    statistics.remove_layer("a")
    assert set(statistics.all()) == {"b"}
