"""The fair queue for random items: no starvation, equal shares, order within a flow, determinism. Bounds on the cost of waiting calls, in
all and for each caller; and estimates of how long they take, from given measurements."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.serving.cost import Cost
from attend.serving.queueing import DEFAULT_RATE, MAX_IDLE_FLOWS, FairQueue, Flow, Occupancy, Throughput, size_class


@dataclass(frozen=True)
class Item:
    """An item of a flow; `number` counts from 0."""

    flow: str
    number: int
    cost: float


def queue_of(*items: Item) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(lambda item: item.flow, lambda item: item.cost)
    for item in items:
        queue.append(item)
    return queue


def items(flow: str, *costs: float) -> list[Item]:
    return [Item(flow, number, cost) for number, cost in enumerate(costs)]


def drained(queue: FairQueue[Item]) -> Iterator[Item]:
    """Every item, each served before the next is chosen."""
    while queue:
        first = queue.first()
        assert first is not None
        assert first is next(iter(queue))
        queue.serve([first])
        yield first


COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=8)
FLOWS = st.dictionaries(st.sampled_from("abcdef"), COSTS, min_size=1)
ARRIVALS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100)), min_size=1, max_size=40)


@given(FLOWS)
def test_every_item_is_served_once_and_each_flow_in_its_order(flows: dict[str, list[int]]) -> None:
    """Iterating gives the order in which items will be served."""
    queue = queue_of(*(item for flow, costs in flows.items() for item in items(flow, *costs)))
    foretold = list(queue)
    served = list(drained(queue))
    assert served == foretold
    assert len(queue) == 0
    for flow, costs in flows.items():
        assert [item for item in served if item.flow == flow] == items(flow, *costs)


class Counted:
    """An item that counts how often any such item is hashed, which finding, adding and removing one does."""

    hashed = 0

    def __init__(self, flow: int) -> None:
        self.flow = flow

    def __hash__(self) -> int:
        Counted.hashed += 1
        return id(self)


@pytest.mark.parametrize("flows", [1, 2003], ids=["one flow", "a flow for each item"])
def test_the_work_of_one_item_does_not_grow_with_the_number_of_items(flows: int) -> None:
    """Each item is looked at a few times while 2,003 of them are added, removed or served one by one, from either end."""
    queue: FairQueue[Counted] = FairQueue(lambda item: item.flow, lambda item: 1.0)
    waiting = [Counted(number % flows) for number in range(2003)]
    Counted.hashed = 0
    for item in waiting:
        queue.append(item)
    for item in reversed(waiting[1501:]):
        queue.remove([item])
    served = []
    while (first := queue.first()) is not None:
        served.append(first)
        queue.serve([first])
    assert served == waiting[:1501]
    assert Counted.hashed <= 5 * len(waiting)


def num_objects(queue: FairQueue[Item]) -> int:
    """The number of objects that a queue keeps in memory."""
    found: dict[int, object] = {id(queue): queue}
    added: list[object] = [queue]
    while added:
        referred = {id(thing): thing for thing in gc.get_referents(*added) if not callable(thing)}
        added = [thing for number, thing in referred.items() if number not in found]
        found |= referred
    return len(found)


def test_outdated_entries_of_the_order_are_dropped() -> None:
    """Flows that come and go while the first one waits leave nothing behind."""
    queue = queue_of(*items("first", 1))
    for number in range(20 * MAX_IDLE_FLOWS):
        queue.append(item := Item(f"flow{number}", 0, 1))
        queue.remove([item])
    assert num_objects(queue) <= 8 * MAX_IDLE_FLOWS
    assert queue.first() == Item("first", 0, 1)


@given(ARRIVALS, st.lists(st.integers(0, 3), max_size=40))
def test_the_order_is_deterministic(arrivals: list[tuple[str, int]], served: list[int]) -> None:
    """It depends only on arrivals and serving."""

    def history() -> list[Item]:
        queue, order, turns = queue_of(), [], iter(served)
        for number, (flow, cost) in enumerate(arrivals):
            queue.append(Item(flow, number, cost))
            for _ in range(min(next(turns, 0), len(queue))):
                order.append(next(iter(queue)))
                queue.serve(order[-1:])
        return order + list(drained(queue))

    assert history() == history()
    assert len(history()) == len(arrivals)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6))
def test_flows_with_waiting_items_get_equal_shares(costs: list[int]) -> None:
    """At any moment two flows differ by at most the costs of one item of each, whatever their items cost."""
    queue, work, numbers = queue_of(), [0] * len(costs), [0] * len(costs)
    for flow, cost in enumerate(costs):
        queue.append(Item(str(flow), 0, cost))
    for _ in range(200):
        item = next(iter(queue))
        queue.serve([item])
        flow = int(item.flow)
        work[flow] += costs[flow]
        numbers[flow] += 1
        queue.append(Item(item.flow, numbers[flow], costs[flow]))
        assert max(work) - min(work) <= 2 * max(costs)


@given(st.integers(1, 20), st.integers(1, 1000), st.integers(0, 60), st.integers(1, 1000))
def test_a_light_flow_waits_for_at_most_one_item_of_each_other_flow(heavy: int, cost: int, before: int, light: int) -> None:
    """However many items the heavy flows have waiting."""
    queue = queue_of(*(item for flow in range(heavy) for item in items(str(flow), *[float(cost)] * 70)))
    for _ in range(before):
        queue.serve([next(iter(queue))])
    queue.append(Item("light", 0, light))
    served = [item.flow for item in drained(queue)]
    ahead = served[: served.index("light")]
    assert len(ahead) == len(set(ahead)) <= heavy


def test_many_heavy_items_of_one_flow_do_not_delay_another_flow() -> None:
    """First come, first served would serve ten heavy items before the first light one."""
    queue = queue_of(*items("heavy", *[100.0] * 10), *items("light", 1.0, 1.0, 1.0))
    assert "".join(item.flow[0] for item in drained(queue)) == "hlll" + 9 * "h"


def test_an_idle_flow_accumulates_no_credit() -> None:
    """When it becomes active again, it gets an equal share from then on."""
    queue = queue_of(*items("a", *[1.0] * 20))
    for _ in range(10):
        queue.serve([next(iter(queue))])
    for item in items("b", *[1.0] * 10):
        queue.append(item)
    assert "".join(item.flow for item in drained(queue))[:8] in ("abababab", "babababa")


def test_a_flow_that_is_briefly_empty_keeps_its_tag() -> None:
    """A flow that has one item at a time gets the same share as others."""
    queue = queue_of(Item("a", 0, 10.0), *items("b", *[1.0] * 30))
    served = []
    for _ in range(24):
        item = next(iter(queue))
        queue.serve([item])
        served.append(item.flow)
        if item.flow == "a":
            queue.append(Item("a", item.number + 1, 10.0))
    assert served.count("a") == 3


def test_items_served_out_of_order_are_charged_to_their_flows() -> None:
    """Those that join the batch of another item."""
    queue = queue_of(*items("a", 1.0, 1.0, 1.0), *items("b", 1.0, 1.0, 1.0))
    first = list(queue)
    queue.serve([first[0], *(item for item in first if item.flow == "b")][:3])
    assert [item.flow for item in drained(queue)] == ["a", "a", "b"]


def test_removed_items_are_not_charged() -> None:
    """Wherever they are in the queue."""
    queue = queue_of(*items("a", *[100.0] * 5), *items("b", *[1.0] * 3))
    queue.remove([item for item in list(queue) if item.flow == "a" and item.number != 3])
    assert len(queue) == 4
    assert [item.flow for item in drained(queue)] == ["a", "b", "b", "b"]


def test_the_number_of_remembered_idle_flows_is_bounded() -> None:
    queue = queue_of()
    for number in range(20 * MAX_IDLE_FLOWS):
        queue.append(Item(str(number), 0, 1.0))
        queue.serve([next(iter(queue))])
    assert not queue
    assert num_objects(queue) <= 8 * MAX_IDLE_FLOWS


def cost(operations: int = 0, memory: int = 0) -> Cost:
    return Cost({}, operations, 0, memory, 0)


def filled(occupancy: Occupancy, flow: Flow, one: Cost) -> int:
    """The number of such calls of the flow that fit."""
    for count in range(1000):
        if occupancy.refusal(flow, one) is not None:
            return count
        occupancy.add(flow, one)
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("one", [cost(operations=1), cost(memory=1)], ids=["work", "memory"])
def test_one_caller_can_use_half_of_the_queue(one: Cost) -> None:
    """The next can use half of the rest, and so can the process itself. The first call of each needs only room."""
    occupancy = Occupancy(120, 120)
    assert filled(occupancy, Flow("a", 4), one) == 60
    assert filled(occupancy, Flow("b", 4), one) == 30
    assert filled(occupancy, Flow("a", 0), one) == 15
    assert filled(occupancy, Flow("", 0), one) == 7
    assert [filled(occupancy, Flow(f"other {i}", 4), one) for i in range(9)] == [4, 2, 1, 1, 0, 0, 0, 0, 0]
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
    assert len(occupancy.operations) == len(occupancy.memory_bytes) == 0
    assert (occupancy.calls, occupancy.operations.used, occupancy.memory_bytes.used) == (0, 0, 0)


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
