"""How what is held changes: layers are made and warmed, one change at a time, on a thread of its own, and kept in a folder if there is one.

Reading, casting and hashing take neither the event loop, nor the threads that decode requests, nor the device; only choosing the products
and the first call of a new layer do. The old layer serves until the new one can.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import structlog

from service.errors import AttendError, DeadlinePassed, InvalidRequest, LayerConflict, NotReady, TooLarge
from service.serving.layers.files import demand_storable, demand_storable_spec
from service.serving.layers.registry import HeldLayer, LayerRegistry, UnloadedLayer
from service.serving.layers.store import SUFFIX, UNLOADED, LayerStore, Stamp, fault
from service.serving.metrics import Metrics
from service.serving.probe import Probe
from service.serving.statistics import LayerStatistics
from service.spec import LayerSpec
from service.tensors import Array

T = TypeVar("T")
log = structlog.get_logger("attend")
INTERVAL = 0.1  # seconds between two looks at a folder that others may have changed
PATIENCE = 30.0  # seconds for which a change waits for others to make room, and then to follow
Read = Callable[[], tuple[LayerSpec, Mapping[str, Array] | None]]


class LayerLoader:
    """Puts layers into a registry, and takes them out."""

    def __init__(
        self,
        registry: LayerRegistry,
        probe: Probe,
        metrics: Metrics,
        statistics: LayerStatistics,
        folder: LayerStore | None,
        largest: int,
    ) -> None:
        """`largest` is in bytes, of a layer's file."""
        self.registry, self.probe, self.metrics, self.statistics = registry, probe, metrics, statistics
        self.folder, self.largest = folder, largest
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._configured: frozenset[str] = frozenset()
        self._stamps: dict[str, Stamp] = {}  # of the files that have been looked into, whether they held a layer or not
        self._unloaded: dict[str, Stamp] = {}  # of the files of unloaded layers that have been looked into
        self._following: asyncio.Task[None] | None = None

    async def start(self, specs: Mapping[str, LayerSpec]) -> None:
        """Makes and warms the configured layers, then those of the folder, which is followed from then on. Raises OSError without one."""
        self._configured = frozenset(specs)
        for name, spec in specs.items():
            self._hold(await self._made(name, spec, None))
        if self.folder is not None:
            await self.aside(self.folder.open)
            await self._follow(self.folder)
            self._following = asyncio.get_running_loop().create_task(self._keep_following(self.folder))

    async def put(self, name: str, read: Read, deadline: float | None = None) -> tuple[HeldLayer, bool]:
        """Holds what `read` gives, and tells whether the name is new. With a folder it is kept there, and all who share it have followed.

        Raises what reading raises, InvalidRequest, TooLarge, LayerConflict, StorageFull, or as `_alone` and `_followed` do.
        """
        self._demand_own(name)
        change = 0
        async with self._alone(deadline), self._changing:
            spec, weights = await self.aside(read)
            demand_storable_spec(spec, self.largest)
            layer = await self._made(name, spec, weights)
            await self.aside(demand_storable, layer, self.largest)
            if self.folder is not None:
                change, self._stamps[name] = await self.aside(self.folder.write, layer)
                self._unloaded.pop(name, None)
            new = self._hold(layer)
        await self._followed(change, deadline)
        return layer, new

    async def remove(self, name: str, deadline: float | None = None) -> None:
        """Raises LayerNotFound, LayerConflict, or as `_followed` does. A file that holds no layer goes as well."""
        self._demand_own(name)
        change = 0
        async with self._changing:
            if name not in self._stamps and name not in self._unloaded:
                self.registry.document(name)
            if self.folder is not None:
                change = await self.aside(self.folder.remove, name)
                self._stamps.pop(name, None)
                self._unloaded.pop(name, None)
            self._drop(name)
        await self._followed(change, deadline)

    async def unload(self, name: str, deadline: float | None = None) -> None:
        """Keeps the layer, and answers no more calls with it, until it is loaded again. Raises as `remove` does."""
        self._demand_own(name)
        change = 0
        async with self._changing:
            if self.registry.unloaded(name) is not None:
                return
            layer, weights = self.registry.find(name), None
            self.registry.demand_room_for_unloaded()
            if self.folder is not None:
                change, self._unloaded[name] = await self.aside(self.folder.unload, name)
                self._stamps.pop(name, None)
            elif layer.spec.init is None:
                weights = layer.arrays()
            self._set_aside(UnloadedLayer(name, layer.spec, layer.fingerprint, weights))
        await self._followed(change, deadline)

    async def load(self, name: str, deadline: float | None = None) -> None:
        """Holds an unloaded layer again; one that is held stays as it is. Raises LayerNotFound, or as `put` does."""
        if self.registry.unloaded(name) is None:
            self.registry.find(name, at="")
            return
        change = 0
        async with self._alone(deadline), self._changing:
            unloaded = self.registry.unloaded(name)
            if unloaded is None:  # another caller was faster
                self.registry.find(name, at="")
                return
            if self.folder is None:
                layer = await self._made(name, unloaded.spec, unloaded.weights)
            else:
                try:
                    layer = await self._read(self.folder, name, UNLOADED)
                except OSError as error:
                    raise fault(error) from error
                change, self._stamps[name] = await self.aside(self.folder.load, name)
                self._unloaded.pop(name, None)
            self._hold(layer)
        await self._followed(change, deadline)

    def leave_peers(self) -> None:
        """Others do not wait any more for this process to follow; for one whose event loop stands still most of the time."""
        if self.folder is not None:
            self.folder.close()

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._thread.shutdown()
        if self.folder is not None:
            self.folder.close()

    def _demand_own(self, name: str) -> None:
        """Raises LayerConflict for a configured layer where a folder keeps the others: a restart would bring the configured one back."""
        if self.folder is not None and name in self._configured:
            raise LayerConflict(f'the layer "{name}" comes from the configuration, which wins over the folder of layers')

    @asynccontextmanager
    async def _alone(self, deadline: float | None) -> AsyncIterator[None]:
        """Among all who share the folder, and with what they have put there: what is let in now has room beside all else.

        Raises DeadlinePassed, NotReady when patience is at its end, or as the folder does.
        """
        if self.folder is None:
            yield
            return
        claim, patience = self.folder.claim(), self.probe.scheduler.clock() + PATIENCE
        try:
            try:
                while not await self.aside(claim.taken):
                    self._demand_time(patience, deadline, "nothing has changed: others that share the folder are still changing layers")
                    await asyncio.sleep(INTERVAL / 4)
                await self._follow(self.folder)
            except OSError as error:
                raise fault(error) from error
            yield
        finally:
            with suppress(RuntimeError):  # at the end of the process, which releases it as well
                self._thread.submit(claim.release)  # behind what the thread has in hand for a caller who did not wait

    def _demand_time(self, patience: float, deadline: float | None, what: str) -> None:
        """Raises DeadlinePassed, or NotReady when patience is at its end."""
        now = self.probe.scheduler.clock()
        if now > min(patience, deadline or patience):
            raise DeadlinePassed(what) if deadline and now > deadline else NotReady(what)

    async def _followed(self, change: int, deadline: float | None) -> None:
        """Returns once all who share the folder have followed. Raises DeadlinePassed, or NotReady when patience is at its end."""
        if self.folder is None:
            return
        patience = self.probe.scheduler.clock() + PATIENCE
        while behind := await self.aside(self.folder.peers.behind, change):
            what = f"the change is stored, but {behind} of the processes that share the folder have not followed yet"
            self._demand_time(patience, deadline, what)
            await asyncio.sleep(INTERVAL / 4)

    async def _keep_following(self, folder: LayerStore) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._follow(folder)
            except OSError as error:
                log.error("folder of layers unreadable", error=str(error))

    async def _follow(self, folder: LayerStore) -> None:
        """Makes what is held what the folder holds, and tells the others."""
        async with self._changing:
            changes, stamps, unloaded = await self.aside(folder.look)
            await self._follow_unloaded(folder, unloaded)
            for name in [name for name in self._stamps if name not in stamps]:
                del self._stamps[name]
                if name not in self._configured and name in self.registry:
                    self._drop(name)
            changed = [name for name, stamp in stamps.items() if self._stamps.get(name) != stamp]
            self._stamps |= stamps
            late = [name for name in changed if not await self._taken(folder, name)]
            for name in late:  # there was no room for it before another became smaller
                await self._taken(folder, name, last=True)
            folder.peers.acknowledge(changes)

    async def _follow_unloaded(self, folder: LayerStore, stamps: dict[str, Stamp]) -> None:
        """Keeps what is unloaded in the folder, and forgets what is not there any more."""
        for name in [name for name in self._unloaded if name not in stamps]:
            del self._unloaded[name]
            if self.registry.unloaded(name) is not None:
                self.registry.remove(name)  # where it has been loaded, it is held in a moment
        for name, stamp in stamps.items():
            if self._unloaded.get(name) == stamp or name in self._configured:
                continue
            self._unloaded[name] = stamp
            held = self.registry.get(name)
            try:
                if held is not None and self._stamps.get(name) == stamp:  # the very file that it came from
                    spec, fingerprint = held.spec, held.fingerprint
                else:
                    spec, _, fingerprint = await self.aside(folder.read, name, UNLOADED)
            except FileNotFoundError:
                del self._unloaded[name]
            except (AttendError, OSError, MemoryError) as error:
                log.error("layer file refused", layer=name, error=str(error))
            else:
                self._set_aside(UnloadedLayer(name, spec, fingerprint))

    async def _read(self, folder: LayerStore, name: str, kind: str = SUFFIX) -> HeldLayer:
        """The layer of a file, made and warmed."""
        spec, weights, fingerprint = await self.aside(folder.read, name, kind)
        layer = await self._made(name, spec, weights)
        if fingerprint not in ("", layer.fingerprint):
            raise InvalidRequest.where("/__metadata__/fingerprint", layer.fingerprint, fingerprint[:64])
        return layer

    async def _taken(self, folder: LayerStore, name: str, last: bool = False) -> bool:
        """Holds a layer of the folder. One that cannot be is logged, and whatever has been held under its name stays.

        False where it is too large, unless it is asked for the `last` time.
        """
        if name in self._configured:
            log.warning("layer file ignored", layer=name, reason="a layer of that name is configured")
            return True
        try:
            layer = await self._read(folder, name)
        except FileNotFoundError:  # removed since; the next look will see that
            del self._stamps[name]
        except (AttendError, OSError, MemoryError) as error:
            if isinstance(error, TooLarge) and not last:
                return False
            log.error("layer file refused", layer=name, error=str(error))
        else:
            self._hold(layer)
            log.info("layer loaded", layer=name, fingerprint=layer.fingerprint[:12])
        return True

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """On the thread that loads."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _made(self, name: str, spec: LayerSpec, weights: Mapping[str, Array] | None) -> HeldLayer:
        self.registry.admit(name, spec)
        layer = await self.aside(self.registry.make, name, spec, weights)
        await self.probe.warm(layer, self.registry.limits)
        return layer

    def _hold(self, layer: HeldLayer) -> bool:
        new = self.registry.put(layer)
        self.statistics.hold(layer.name)
        self.metrics.layers.set(len(self.registry))
        return new

    def _drop(self, name: str) -> None:
        self.registry.remove(name)
        self._forget(name)

    def _set_aside(self, layer: UnloadedLayer) -> None:
        self.registry.unload(layer)
        self._forget(layer.name)

    def _forget(self, name: str) -> None:
        """Drops what was counted of a layer that is not held any more."""
        self.statistics.forget(name)
        self.metrics.layers.set(len(self.registry))
