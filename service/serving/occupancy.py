"""Bounds the predicted cost of the calls in the queue, in all and of each flow. Pure arithmetic."""

from dataclasses import dataclass
from typing import NamedTuple

from service.errors import Problem
from service.serving.cost import Cost


class Flow(NamedTuple):
    """The calls of one caller of one size class."""

    caller: str  # empty for calls of the service itself
    size: int


INTERNAL = Flow("", 0)  # light calls of the service itself, such as probes


@dataclass(slots=True)
class Waiting:
    """The calls of one flow, or of all, that wait."""

    calls: int = 0
    operations: int = 0
    memory_bytes: int = 0

    def add(self, cost: Cost, count: int) -> None:
        self.calls += count
        self.operations += count * cost.operations
        self.memory_bytes += count * cost.memory_bytes


class Occupancy:
    """Predicted operations and bytes of the calls that wait.

    Two bounds: all calls together stay within the limits, and a caller's calls of one size class take at most as much as is left free for
    others. So one caller alone fills half of the queue, two fill a third each, and there is always room for one more. The service's own
    calls have the first bound only.
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
        """Whether such a call may wait. The first call of all always may."""
        return self.refusal(flow, cost) is None

    def refusal(self, flow: Flow, cost: Cost) -> Problem | None:
        """The bound that such a call would exceed, and its setting; None where it may wait."""
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
