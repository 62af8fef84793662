"""Estimates of how long calls take, from measurements that are numbers."""

import pytest

from service.serving.throughput import RATE, Throughput, size_class


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
    assert throughput.seconds(3, 10**9) == 10**9 / RATE
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
    assert throughput.seconds(0, 10**9) == 10**9 / RATE
