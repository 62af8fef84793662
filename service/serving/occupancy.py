"""Bounds the predicted cost of the waiting calls, in total and per flow."""

from dataclasses import dataclass
from typing import NamedTuple

from service.errors import Problem
from service.serving.cost import Cost


class Flow(NamedTuple):
    """The calls of one caller in one size class."""

    caller: str  # empty for internal calls
    size: int


INTERNAL = Flow("", 0)  # light internal calls, such as probes


@dataclass(slots=True)
class Waiting:
    """Number and predicted cost of the waiting calls, of one flow or of all."""

    calls: int = 0
    operations: int = 0
    memory_bytes: int = 0

    def add(self, cost: Cost, count: int) -> None:
        self.calls += count
        self.operations += count * cost.operations
        self.memory_bytes += count * cost.memory_bytes


class Occupancy:
    """Predicted operations and bytes of the waiting calls, with two bounds on each.

    All calls together stay within the limit, and the calls of one flow take at most as much as stays free. So one flow alone fills at most
    half of the queue, two fill a third each, and there is always room for another. Internal calls are subject to the first bound only.
    """

    def __init__(self, operations: int, memory_bytes: int) -> None:
        self.operations, self.memory_bytes = operations, memory_bytes
        self.total = Waiting()
        self.flows: dict[Flow, Waiting] = {}

    def add(self, flow: Flow, cost: Cost) -> None:
        self.total.add(cost, 1)
        self.flows.setdefault(flow, Waiting()).add(cost, 1)

    def remove(self, flow: Flow, cost: Cost) -> None:
        self.total.add(cost, -1)
        held = self.flows[flow]
        held.add(cost, -1)
        if not held.calls:
            del self.flows[flow]

    def has_room(self, flow: Flow, cost: Cost) -> bool:
        """Whether a call may enter the queue. An empty queue accepts any call."""
        return self.refusal(flow, cost) is None

    def refusal(self, flow: Flow, cost: Cost) -> Problem | None:
        """The bound that a call would exceed, with its setting; None if it may enter the queue."""
        total, held = self.total, self.flows.get(flow)
        if not total.calls:
            return None
        own = Waiting() if held is None else held
        bounds = (
            ("max_queue_operations", "operations", self.operations, total.operations, own.operations, cost.operations),
            ("max_queue_bytes", "bytes", self.memory_bytes, total.memory_bytes, own.memory_bytes, cost.memory_bytes),
        )
        for setting, unit, most, waiting, _, more in bounds:
            if waiting + more > most:
                return Problem("", f"room in a queue of {most} {unit} in all ({setting})", f"{more} beside {waiting} of waiting calls")
        for setting, unit, most, waiting, mine, more in bounds if held is not None and flow.caller else ():
            if mine + more > most - waiting:
                wanted = f"one caller's waiting calls of one size to have at most as many {unit} as are left free ({setting})"
                return Problem("", wanted, f"{mine + more} beside {most - waiting} free ones")
        return None
