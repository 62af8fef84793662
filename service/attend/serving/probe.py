"""Synthetic zero-input calls, used for warm-up, throughput calibration and liveness checks."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from attend.errors import AttendError
from attend.limits import ServingLimits
from attend.serving.admission import Admission
from attend.serving.calls import make_call
from attend.serving.cost import predict
from attend.serving.executor import Outcome
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.scheduler import Scheduler
from attend.wire.schemas.attend import AttendRequest

RECOVERY_INTERVAL = 1.0  # seconds between probes of a device that ran out of memory
MIN_QUERIES, MAX_QUERIES = 16, 1024  # of the call that measures the device
MEASURED_OPERATIONS = 100_000_000  # intended operations of that call


class Probe:
    """Warms layers and checks the device of a scheduler."""

    def __init__(self, scheduler: Scheduler, timeout: float) -> None:
        self.scheduler = scheduler
        self.timeout = timeout  # a working device must finish something within so many seconds

    async def warm(self, layer: LoadedLayer, limits: ServingLimits) -> None:
        """Compute one tiny call, so that the first real call is not slow.

        Raises TooLarge if even a call of one query and one key exceeds the limits.
        """
        request = zeros(layer, 1)
        Admission(limits).require(predict(request, layer.spec))
        await self._submit_zeros(layer, 1)

    async def measure(self, layer: LoadedLayer) -> None:
        """Measure the device's speed with one call large enough to be reliable: the first Retry-After values depend on it."""
        length = MIN_QUERIES
        while length < MAX_QUERIES and predict(zeros(layer, length), layer.spec).operations < MEASURED_OPERATIONS:
            length *= 2
        operations = predict(zeros(layer, length), layer.spec).operations
        self.scheduler.calibrate(operations, (await self._submit_zeros(layer, length)).compute)

    async def responds(self, layer: LoadedLayer) -> bool:
        """Whether the device finished something within the last `timeout` seconds, or does so now.

        A busy device counts as working until its batch is overdue by `timeout`; then it must finish something within `timeout`. An idle
        device, or one that ran out of memory, must answer a tiny call.
        """
        if not self.scheduler.healthy:
            return await self._computes(layer)
        if self.scheduler.clock() - self.scheduler.finished_at <= self.timeout:
            return True
        if self.scheduler.busy:
            return self.scheduler.overdue <= self.timeout or await self.scheduler.wait_for_progress(self.timeout)
        return await self._computes(layer)

    async def recover(self, layers: Callable[[], Sequence[LoadedLayer]]) -> None:
        """Probe the device at intervals while it is unhealthy: an unready server may get no calls that show its recovery. Never ends."""
        while True:
            await asyncio.sleep(RECOVERY_INTERVAL)
            if not self.scheduler.healthy and (present := layers()):
                await self._computes(present[0])

    async def _computes(self, layer: LoadedLayer) -> bool:
        """Whether a tiny call is answered within `timeout`. Success makes the scheduler healthy."""
        try:
            async with asyncio.timeout(self.timeout):  # asyncio.wait_for of Python 3.11 may ignore that its caller is cancelled
                await self._submit_zeros(layer, 1)
        except (AttendError, TimeoutError):
            return False
        return True

    async def _submit_zeros(self, layer: LoadedLayer, length: int) -> Outcome:
        request = zeros(layer, length)
        return await self.scheduler.submit(Prepared(layer, make_call(request, layer.spec), predict(request, layer.spec)))


def zeros(layer: LoadedLayer, length: int) -> AttendRequest:
    """A request of zeros with `length` queries and keys, or as many as the layer has positions."""
    length = min([length, *(extent.stop for extent in layer.spec.extents)])
    widths = {"query": layer.spec.query_dim, "key": layer.spec.key_dim, "value": layer.spec.value_dim}
    inputs = {name: np.zeros((1, length, width)) for name, width in widths.items()}
    return AttendRequest(layer=layer.name, **inputs)  # type: ignore[arg-type]  # inputs are arrays
