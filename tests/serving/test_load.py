"""How much may wait, in all and of each caller; and estimates of how long it takes, from measurements that are numbers."""

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
def test_one_caller_leaves_as_much_as_it_takes(one: Cost) -> None:
    """Half of the queue; the next gets half of what is left; the service's own calls are bounded by the whole alone."""
    occupancy = Occupancy(120, 120)
    assert filled(occupancy, Flow("a", 4), one) == 60
    assert filled(occupancy, Flow("b", 4), one) == 30
    assert filled(occupancy, Flow("a", 0), one) == 15
    assert filled(occupancy, Flow("", 0), one) == 15
    assert occupancy.refusal(Flow("c", 4), one) is not None
    setting = "max_queue_operations" if one.operations else "max_queue_bytes"
    in_all, shared = occupancy.refusal(Flow("c", 4), one), Occupancy(120, 120)
    assert in_all and in_all.expected.startswith("room in a queue of 120 ") and setting in in_all.expected
    filled(shared, Flow("a", 4), one)
    share = shared.refusal(Flow("a", 4), one)
    assert share and share.expected.startswith("one caller's waiting calls") and setting in share.expected
    assert (in_all.got, share.got) == ("1 beside 120 of waiting calls", "61 beside 60 free ones")


def test_the_first_call_of_a_caller_may_be_larger_than_its_share() -> None:
    """Otherwise a call between half and all of the queue would be refused for ever."""
    occupancy = Occupancy(100, 100)
    occupancy.add(Flow("a", 4), cost(operations=5))
    assert occupancy.refusal(Flow("b", 4), cost(operations=95)) is None
    assert occupancy.refusal(Flow("b", 4), cost(operations=96)) is not None


def test_an_empty_queue_takes_any_call() -> None:
    """What passed admission is served."""
    assert Occupancy(1, 1).refusal(Flow("a", 4), cost(10**15, 10**15)) is None


def test_what_leaves_makes_room() -> None:
    """All of it is forgotten, the caller too."""
    occupancy = Occupancy(10, 10)
    for _ in range(3):
        assert filled(occupancy, Flow("a", 1), cost(1, 1)) == 5
        for _ in range(5):
            occupancy.remove(Flow("a", 1), cost(1, 1))
    assert not occupancy.flows
    assert (occupancy.total.calls, occupancy.total.operations, occupancy.total.memory_bytes) == (0, 0, 0)


def test_each_class_costs_up_to_sixteen_times_the_one_before() -> None:
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


def test_large_calls_are_estimated_by_large_calls() -> None:
    """Small calls run at a tenth of the speed; however many come, what is said of large ones stays."""
    throughput = Throughput()
    throughput.observe(4, 10**11, 1.0)
    for _ in range(100):
        throughput.observe(1, 10**8, 0.01)
    assert throughput.seconds(4, 10**12) == pytest.approx(10.0)
    assert throughput.seconds(1, 10**9) == pytest.approx(0.1)


def test_a_class_that_was_never_measured_is_taken_for_its_nearest() -> None:
    """Of a device of which nothing is known, a slow guess."""
    throughput = Throughput()
    assert throughput.seconds(3, 10**9) == 10**9 / DEFAULT_RATE
    throughput.learn(10**8, 0.01)
    assert throughput.seconds(4, 10**11) == pytest.approx(10.0)
    throughput.observe(3, 10**10, 0.1)
    assert throughput.seconds(4, 10**11) == pytest.approx(1.0)
    assert throughput.seconds(1, 10**9) == pytest.approx(0.1)


def test_the_estimate_follows_the_device() -> None:
    """It becomes twice as slow, and after some calls so does the estimate; one slow call alone changes it by a part."""
    throughput = Throughput()
    throughput.observe(2, 10**9, 0.01)
    throughput.observe(2, 10**9, 0.02)
    assert 0.01 < throughput.seconds(2, 10**9) < 0.015
    for _ in range(30):
        throughput.observe(2, 10**9, 0.02)
    assert throughput.seconds(2, 10**9) == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("operations", "seconds"), [(0, 1.0), (1000, 0.0005)])
def test_calls_that_say_nothing_of_speed_are_left_out(operations: int, seconds: float) -> None:
    """No work, or no more than a moment."""
    throughput = Throughput()
    throughput.observe(0, operations, seconds)
    assert throughput.seconds(0, 10**9) == 10**9 / DEFAULT_RATE
