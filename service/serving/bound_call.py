"""What `bind` makes of a request and a layer, with the cost that was predicted for it: all that a call needs to be computed."""

from dataclasses import dataclass

from service.attention.call import Call
from service.attention.layer import Operation
from service.serving.cost import Cost
from service.serving.layers.registry import HeldLayer
from service.wire.schemas.attend import AttendRequest


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A request that nothing can be wrong with any more, and all that its call needs."""

    request: AttendRequest
    layer: HeldLayer
    call: Call
    cost: Cost
    in_parts: bool = False  # too large for this process: others compute it, each some of the keys
    operation: Operation | None = None  # what runs in place of the layer's forward pass
