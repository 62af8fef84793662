"""Counting the calls to layers, alone and among processes that share a folder."""

import multiprocessing
from pathlib import Path

from service.serving.executor import Execution
from service.serving.metrics import Phases
from service.serving.shared_counters import SharedCounters
from service.serving.statistics import SIZES, Counter

PHASES = Phases(decode=0.25, queue=0.5, compute=1.0, encode=0.125)


def count(counter: Counter) -> None:
    """A call by itself, two that were stacked with a third whose caller left, and one that failed."""
    counter.answered("a", PHASES, 3, Execution(3))
    stacked = Execution(8)
    counter.answered("a", PHASES, 5, stacked)
    counter.answered("a", PHASES, 1, stacked)
    counter.failed("a", 2.0)
    counter.answered("b", PHASES, 1, Execution(1))


def test_a_counter_counts() -> None:
    counter = Counter(wall=lambda: 1.5)
    count(counter)

    found = counter.all()["a"]

    assert (found.answered.count, found.answered.items, found.answered.last, found.executions) == (3, 9, 1500, 2)
    assert (found.answered.whole, found.answered.decode, found.answered.compute) == (5_625_000_000, 750_000_000, 3_000_000_000)
    assert (found.failed.count, found.failed.whole) == (1, 2_000_000_000)
    batches = {size: (row.items, row.count, row.executions, row.executing) for size, row in found.batches.items()}
    assert batches == {3: (3, 1, 1, 1_000_000_000), 8: (6, 2, 1, 1_000_000_000)}
    counter.forget("a")
    assert set(counter.all()) == {"b"}


def test_callers_who_choose_many_sizes_are_all_counted_but_do_not_fill_the_memory() -> None:
    counter = Counter()
    for size in range(1, 3 * SIZES):
        counter.answered("a", PHASES, size, Execution(size))
    counter.failed("a", 1.0)

    found = counter.all()["a"]

    assert (found.answered.count, found.executions, found.failed.count) == (3 * SIZES - 1, 3 * SIZES - 1, 1)
    assert list(found.batches) == list(range(1, SIZES + 1)) and len(found.rows) == SIZES + 2


def test_counters_of_one_folder_tell_the_sum_and_outlive_their_closing(tmp_path: Path) -> None:
    one, other = Counter(tmp_path, lambda: 1.0), Counter(tmp_path, lambda: 2.0)
    alone = Counter(wall=lambda: 2.0)
    for counter in (one, other, alone, alone):
        count(counter)

    assert one.all() == other.all() == alone.all()
    one.close()
    count(one)  # a call that comes to its end too late
    one.forget("b")
    assert other.all() == alone.all()


def test_places_of_forgotten_layers_are_taken_again(tmp_path: Path) -> None:
    """Whoever makes and removes layers does not fill the folder."""
    counters = SharedCounters(tmp_path, 1)
    (file,) = tmp_path.iterdir()
    for turn in range(50):
        for key in range(4):
            counters.write(f"layer-{turn}", key, (turn,))
        if turn:
            counters.forget(f"layer-{turn - 1}")
        assert list(counters.read()) and file.stat().st_size <= 8 * 80

    assert sorted(counters.read()) == [("layer-49", key, (49,)) for key in range(4)]


def _count_and_leave(folder: Path) -> None:
    count(Counter(folder))


def test_what_a_process_counted_stays_when_it_ends_until_the_layer_goes(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_count_and_leave, args=(tmp_path,))
    process.start()
    process.join()
    counter = Counter(tmp_path)

    assert counter.all()["a"].answered.count == 3
    counter.forget("a")
    assert set(counter.all()) == {"b"}
