"""What waits, in all and of each flow, and whether more may. Pure arithmetic."""

from dataclasses import dataclass
from typing import NamedTuple

from service.serving.cost import Cost


class Flow(NamedTuple):
    """The calls of one caller of one size class."""

    caller: str  # empty for the service's own calls
    size: int


OWN = Flow("", 0)  # of the service's own light calls


@dataclass(slots=True)
class Held:
    """What waits of one flow, or of all."""

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
        self.total = Held()
        self.flows: dict[Flow, Held] = {}

    def add(self, flow: Flow, cost: Cost) -> None:
        self.total.add(cost, 1)
        self.flows.setdefault(flow, Held()).add(cost, 1)

    def remove(self, flow: Flow, cost: Cost) -> None:
        self.total.add(cost, -1)
        held = self.flows[flow]
        held.add(cost, -1)
        if not held.calls:
            del self.flows[flow]

    def has_room(self, flow: Flow, cost: Cost) -> bool:
        """Whether such a call may wait. The first call of all always may."""
        total, held = self.total, self.flows.get(flow)
        if not total.calls:
            return True
        operations, memory_bytes = total.operations + cost.operations, total.memory_bytes + cost.memory_bytes
        if operations > self.operations or memory_bytes > self.memory_bytes:
            return False
        if held is None or not flow.caller:
            return True
        share, share_bytes = held.operations + cost.operations, held.memory_bytes + cost.memory_bytes
        return share <= self.operations - total.operations and share_bytes <= self.memory_bytes - total.memory_bytes
