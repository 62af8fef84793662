"""How what is held changes: layers are made and warmed, one change at a time, on a thread of its own. Knows no bytes and no HTTP.

Reading, casting and hashing take neither the event loop, nor the threads that decode requests, nor the device; only choosing the products
and the first call of a new layer do. The old layer serves until the new one can.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from service.serving.catalogue import Catalogue, HeldLayer
from service.serving.metrics import Metrics
from service.serving.pulse import Pulse
from service.spec import LayerSpec
from service.tensors import Array

T = TypeVar("T")
Read = Callable[[], tuple[LayerSpec, Mapping[str, Array] | None]]


class Shelf:
    """Puts layers into a catalogue, and takes them out."""

    def __init__(self, catalogue: Catalogue, pulse: Pulse, metrics: Metrics) -> None:
        self.catalogue, self.pulse, self.metrics = catalogue, pulse, metrics
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")

    async def start(self, specs: Mapping[str, LayerSpec]) -> None:
        """Makes and warms the configured layers."""
        for name, spec in specs.items():
            self._hold(await self._made(name, spec, None))

    async def put(self, name: str, read: Read) -> tuple[HeldLayer, bool]:
        """Holds what `read` gives, and tells whether the name is new. Raises what reading raises, InvalidRequest or TooLarge."""
        async with self._changing:
            layer = await self._made(name, *await self.aside(read))
            return layer, self._hold(layer)

    async def remove(self, name: str) -> None:
        """Raises LayerNotFound."""
        async with self._changing:
            self._drop(name)

    def close(self) -> None:
        self._thread.shutdown()

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """On the thread that loads."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _made(self, name: str, spec: LayerSpec, weights: Mapping[str, Array] | None) -> HeldLayer:
        self.catalogue.admit(name, spec)
        layer = await self.aside(self.catalogue.make, name, spec, weights)
        await self.pulse.warm(layer)
        return layer

    def _hold(self, layer: HeldLayer) -> bool:
        new = self.catalogue.put(layer)
        self.metrics.layers.set(len(self.catalogue))
        return new

    def _drop(self, name: str) -> None:
        self.catalogue.remove(name)
        self.metrics.forget(name)
        self.metrics.layers.set(len(self.catalogue))
