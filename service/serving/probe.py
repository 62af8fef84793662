"""Synthetic zero-input calls, used for warm-up, throughput calibration and liveness checks."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from service.errors import AttendError
from service.serving import cost
from service.serving.binding import bind
from service.serving.executor import Outcome
from service.serving.layers.registry import HeldLayer
from service.serving.scheduler import Scheduler
from service.wire.schemas.attend import AttendRequest

RECOVERY = 1.0  # seconds between two calls that try whether a device without memory has some again
SHORTEST, LONGEST, TELLING = 16, 1024, 100_000_000  # queries, queries, operations of the call that measures the device


class Probe:
    """Warms layers and checks the device of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.timeout = 2.0  # seconds in which a device that works has something to show

    async def warm(self, layer: HeldLayer, limits: cost.ServingLimits) -> None:
        """The choice of products, and one tiny call: so that no caller pays for torch's first times.

        Raises TooLarge where not even a call of one query and one key is admitted.
        """
        cost.check(cost.predict(_zeros(layer, 1), layer.spec), limits)
        await self.scheduler.aside(layer.attention.tune)
        await self._submit_zeros(layer, 1)

    async def measure(self, layer: HeldLayer) -> None:
        """The device's speed, from a call of the size that says something: what a full queue first advises has nothing else to go by."""
        length = SHORTEST
        while length < LONGEST and cost.predict(_zeros(layer, length), layer.spec).operations < TELLING:
            length *= 2
        operations = cost.predict(_zeros(layer, length), layer.spec).operations
        self.scheduler.learn(operations, (await self._submit_zeros(layer, length)).compute)

    async def responds(self, layer: HeldLayer) -> bool:
        """Whether the device really computes: something came back from it within `timeout`, or does now.

        A device is trusted with a long call for as long as that may take; after that it shows that it works by finishing something. An idle
        one is given a tiny call, and so is one that was out of memory.
        """
        if not self.scheduler.healthy:
            return await self._computes(layer)
        if self.scheduler.clock() - self.scheduler.finished_at <= self.timeout:
            return True
        if self.scheduler.busy:
            return self.scheduler.overdue <= self.timeout or await self.scheduler.moves(self.timeout)
        return await self._computes(layer)

    async def recover(self, layers: Callable[[], Sequence[HeldLayer]]) -> None:
        """Tries, as long as the device is out of memory, whether it computes again: calls may not come before it is ready. Never ends."""
        while True:
            await asyncio.sleep(RECOVERY)
            if not self.scheduler.healthy and (present := layers()):
                await self._computes(present[0])

    async def _computes(self, layer: HeldLayer) -> bool:
        """Whether a tiny call is answered within `timeout`. The scheduler is healthy afterwards if it is."""
        try:
            await asyncio.wait_for(self._submit_zeros(layer, 1), self.timeout)
        except (AttendError, TimeoutError):
            return False
        return True

    async def _submit_zeros(self, layer: HeldLayer, length: int) -> Outcome:
        request = _zeros(layer, length)
        return await self.scheduler.submit(layer, bind(request, layer.spec), cost.predict(request, layer.spec))


def _zeros(layer: HeldLayer, length: int) -> AttendRequest:
    """A request of zeros for that layer, with so many queries and keys."""
    widths = {"query": layer.spec.query_dim, "key": layer.spec.key_dim, "value": layer.spec.value_dim}
    return AttendRequest(layer=layer.name, **{name: np.zeros((1, length, width)) for name, width in widths.items()})  # type: ignore[arg-type]
