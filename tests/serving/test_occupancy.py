"""How much may wait, in all and of each caller."""

import pytest

from service.serving.cost import Cost
from service.serving.occupancy import Flow, Occupancy


def cost(operations: int = 0, memory: int = 0) -> Cost:
    return Cost({}, operations, 0, memory, 0)


def filled(occupancy: Occupancy, flow: Flow, one: Cost) -> int:
    """How many such calls of the flow find room."""
    for count in range(1000):
        if not occupancy.has_room(flow, one):
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
    assert not occupancy.has_room(Flow("c", 4), one)
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
    assert occupancy.has_room(Flow("b", 4), cost(operations=95))
    assert not occupancy.has_room(Flow("b", 4), cost(operations=96))


def test_an_empty_queue_takes_any_call() -> None:
    """What passed admission is served."""
    assert Occupancy(1, 1).has_room(Flow("a", 4), cost(10**15, 10**15))


def test_what_leaves_makes_room() -> None:
    """All of it is forgotten, the caller too."""
    occupancy = Occupancy(10, 10)
    for _ in range(3):
        assert filled(occupancy, Flow("a", 1), cost(1, 1)) == 5
        for _ in range(5):
            occupancy.remove(Flow("a", 1), cost(1, 1))
    assert not occupancy.flows
    assert (occupancy.total.calls, occupancy.total.operations, occupancy.total.memory_bytes) == (0, 0, 0)
