"""Bounds on the cost of waiting calls, in all and for each caller; and estimates of how long they take, from given measurements."""

import pytest

from service.serving.cost import Cost
from service.serving.load import DEFAULT_RATE, Flow, Occupancy, Throughput, size_class


def cost(operations: int = 0, memory: int = 0) -> Cost:
    return Cost({}, operations, 0, memory, 0)


def filled(occupancy: Occupancy, flow: Flow, one: Cost) -> int:
    """How many such calls of the flow find room."""
    for count in range(1000):
        if occupancy.refusal(flow, one) is not None:
            return count
        occupancy.add(flow, one)
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("one", [cost(operations=1), cost(memory=1)], ids=["work", "memory"])
def test_one_caller_can_use_half_of_the_queue(one: Cost) -> None:
    """The next can use half of the rest. Internal calls are bounded only by the total."""
    occupancy = Occupancy(120, 120)
    assert filled(occupancy, Flow("a", 4), one) == 60
    assert filled(occupancy, Flow("b", 4), one) == 30
    assert filled(occupancy, Flow("a", 0), one) == 15
    assert filled(occupancy, Flow("", 0), one) == 15
    assert occupancy.refusal(Flow("c", 4), one) is not None
    setting = "max_queue_operations" if one.operations else "max_queue_bytes"
    in_all, shared = occupancy.refusal(Flow("c", 4), one), Occupancy(120, 120)
    assert in_all and in_all.expected.startswith("a queue of at most 120 ") and setting in in_all.expected
    filled(shared, Flow("a", 4), one)
    share = shared.refusal(Flow("a", 4), one)
    assert share and share.expected.startswith("waiting calls of one caller") and setting in share.expected
    assert (in_all.got, share.got) == ("1 in addition to 120", "61, with 60 free")


def test_the_first_call_of_a_caller_may_be_larger_than_its_share() -> None:
    """Otherwise a call of more than half of the queue could never enter."""
    occupancy = Occupancy(100, 100)
    occupancy.add(Flow("a", 4), cost(operations=5))
    assert occupancy.refusal(Flow("b", 4), cost(operations=95)) is None
    assert occupancy.refusal(Flow("b", 4), cost(operations=96)) is not None


def test_an_empty_queue_accepts_any_call() -> None:
    assert Occupancy(1, 1).refusal(Flow("a", 4), cost(10**15, 10**15)) is None


def test_a_removed_call_frees_its_cost() -> None:
    occupancy = Occupancy(10, 10)
    for _ in range(3):
        assert filled(occupancy, Flow("a", 1), cost(1, 1)) == 5
        for _ in range(5):
            occupancy.remove(Flow("a", 1), cost(1, 1))
    assert not occupancy.flows
    assert (occupancy.total.calls, occupancy.total.operations, occupancy.total.memory_bytes) == (0, 0, 0)


def test_size_classes_differ_by_a_factor_of_sixteen() -> None:
    """The bound of a class belongs to it."""
    assert [size_class(n) for n in (0, 1 << 24, (1 << 24) + 1, 1 << 28, 1 << 32, (1 << 32) + 1, 1 << 36, 1 << 50)] == [
        0,
        0,
        1,
        1,
        2,
        3,
        3,
        4,
    ]


def test_estimates_use_measurements_of_the_same_size_class() -> None:
    """Small calls run at a tenth of the speed and do not change the estimates of large ones."""
    throughput = Throughput()
    throughput.observe(4, 10**11, 1.0)
    for _ in range(100):
        throughput.observe(1, 10**8, 0.01)
    assert throughput.seconds(4, 10**12) == pytest.approx(10.0)
    assert throughput.seconds(1, 10**9) == pytest.approx(0.1)


def test_an_unmeasured_size_class_uses_the_nearest_measured_one() -> None:
    """Without any measurement, a slow default."""
    throughput = Throughput()
    assert throughput.seconds(3, 10**9) == 10**9 / DEFAULT_RATE
    throughput.calibrate(10**8, 0.01)
    assert throughput.seconds(4, 10**11) == pytest.approx(10.0)
    throughput.observe(3, 10**10, 0.1)
    assert throughput.seconds(4, 10**11) == pytest.approx(1.0)
    assert throughput.seconds(1, 10**9) == pytest.approx(0.1)


def test_the_estimate_follows_changes_of_speed() -> None:
    """When the device becomes twice as slow, so does the estimate after some calls; one slow call changes it only in part."""
    throughput = Throughput()
    throughput.observe(2, 10**9, 0.01)
    throughput.observe(2, 10**9, 0.02)
    assert 0.01 < throughput.seconds(2, 10**9) < 0.015
    for _ in range(30):
        throughput.observe(2, 10**9, 0.02)
    assert throughput.seconds(2, 10**9) == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("operations", "seconds"), [(0, 1.0), (1000, 0.0005)])
def test_calls_without_operations_or_shorter_than_a_millisecond_are_ignored(operations: int, seconds: float) -> None:
    throughput = Throughput()
    throughput.observe(0, operations, seconds)
    assert throughput.seconds(0, 10**9) == 10**9 / DEFAULT_RATE
