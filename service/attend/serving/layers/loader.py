"""Loads, replaces and removes layers, one change at a time, and keeps them in step with a shared folder, if configured.

Reading, casting and hashing run in a thread, and one layer is made at a time. Meanwhile layers can be removed, and changes of the folder
are followed, which has a thread of its own. The device is used only to choose the matrix products and for the first call of a new layer.
When a layer is replaced, the old one serves until the new one is ready.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import structlog

from attend.errors import (
    AttendError,
    DeadlinePassed,
    InvalidRequest,
    LayerConflict,
    NotReady,
    RequestError,
    TooLarge,
    translating,
)
from attend.serving.layers.files import ParsedLayer, require_storable, require_storable_spec
from attend.serving.layers.registry import LayerRegistry, LoadedLayer, UnloadedLayer
from attend.serving.layers.store import SUFFIX, UNLOADED, Claim, LayerFile, LayerStore, storage_faults
from attend.serving.metrics import Metrics
from attend.serving.probe import Probe
from attend.serving.requests import TOO_LATE
from attend.serving.statistics import LayerStatistics
from attend.serving.threads import lower_priority
from attend.spec import LayerSpec

T = TypeVar("T")
log = structlog.get_logger("attend")
SCAN_INTERVAL = 0.1  # seconds between two scans of a folder that other processes may have changed
RETRY_INTERVAL = 1.0  # seconds between two attempts to load a layer whose file could not be read, or for which there was no memory
CHANGE_TIMEOUT = 30.0  # most seconds that a change waits for the claim, and again for the other processes to apply it; and of such attempts
Read = Callable[[], ParsedLayer]


class AddedLayer(NamedTuple):
    """A layer that was added, whether its name is new, and the fields of its spec that neither tensors nor caller gave."""

    layer: LoadedLayer
    new: bool
    assumed: Mapping[str, Any]


class Retry(NamedTuple):
    """A file whose layer could not be loaded for now, the time of the next attempt, and that of the last one."""

    file: LayerFile
    at: float
    until: float


class LayerLoader:
    """Loads, replaces, unloads and removes the layers of a registry. `largest`: most bytes of a layer's file."""

    def __init__(
        self, registry: LayerRegistry, probe: Probe, metrics: Metrics, statistics: LayerStatistics, store: LayerStore | None, largest: int
    ) -> None:
        self.registry, self.probe, self.metrics, self.statistics = registry, probe, metrics, statistics
        self.store, self.largest = store, largest
        self._adding = asyncio.Lock()  # held while a layer is made, which may take long
        self._changing = asyncio.Lock()  # held while registry and folder are changed together
        self._thread = ThreadPoolExecutor(1, "loader", lower_priority)
        self._folder_thread = ThreadPoolExecutor(1, "layers-folder")  # for what takes milliseconds
        self._configured: frozenset[str] = frozenset()
        self._files: dict[str, LayerFile] = {}  # the files of the store that have been read, valid or not
        self._retries: dict[str, Retry] = {}
        self._polling: asyncio.Task[None] | None = None

    async def start(self, specs: Mapping[str, LayerSpec]) -> None:
        """Load the configured layers, then those of the store, and follow its changes. Raises OSError if the store cannot be used."""
        self._configured = frozenset(specs)
        for name, spec in specs.items():
            self._add(await self._make(name, ParsedLayer(spec, None)))
        if self.store is not None:
            await self._run_on_folder(self.store.open)
            await self._follow(self.store)
            while self._retries:  # the process would answer that these layers do not exist
                await asyncio.sleep(RETRY_INTERVAL)
                await self._follow(self.store)
            self._polling = asyncio.get_running_loop().create_task(self._poll(self.store))

    async def put(self, name: str, read: Read, deadline: float | None = None) -> AddedLayer:
        """Load the layer that `read` returns. With a store, write it and wait for all processes.

        Raises what `read` raises, InvalidRequest, TooLarge, LayerConflict, StorageFull, or as `_exclusive` and `_wait_for_others` do.
        """
        self._require_not_configured(name)
        change = 0
        async with self._in_time(deadline) as limit, self._exclusive(deadline):
            parsed = await self._run_in_thread(read)
            with translating(parsed.translate):
                self.registry.check_size(name, parsed.spec)
                require_storable_spec(parsed.spec, self.largest)
                layer = await self._make(name, parsed)
                await self._run_in_thread(require_storable, layer, self.largest)
            async with self._changing:
                limit.reschedule(None)
                if self.store is not None:
                    change, self._files[name] = await self._run_in_thread(self.store.write, layer)
                new = self._add(layer)
        await self._wait_for_others(change, deadline)
        return AddedLayer(layer, new, parsed.assumed)

    async def remove(self, name: str, deadline: float | None = None) -> None:
        """Remove the layer or its invalid file. Raises LayerNotFound, LayerConflict, or as `_wait_for_others` does."""
        self._require_not_configured(name)
        change = 0
        async with self._in_time(deadline) as limit, self._changing:
            limit.reschedule(None)
            if name not in self._files:
                self.registry.layer_info(name)
            if self.store is not None:
                change = await self._run_on_folder(self.store.remove, name)
                self._files.pop(name, None)
            self.registry.remove(name)
            self._drop_statistics(name)
        await self._wait_for_others(change, deadline)

    async def unload(self, name: str, deadline: float | None = None) -> None:
        """Make the layer unavailable until `load`. Raises the same errors as `remove`."""
        self._require_not_configured(name)
        change = 0
        async with self._in_time(deadline) as limit, self._changing:
            limit.reschedule(None)
            if self.registry.unloaded(name) is not None:
                return
            layer, weights = self.registry.find(name), None
            self.registry.require_room_for_unloaded()
            if self.store is not None:
                change, self._files[name] = await self._run_on_folder(self.store.unload, name)
            elif layer.spec.init is None:
                weights = layer.arrays()
            self._mark_unloaded(UnloadedLayer(name, layer.spec, layer.fingerprint, weights, layer.origin))
        await self._wait_for_others(change, deadline)

    async def load(self, name: str, deadline: float | None = None) -> None:
        """Make an unloaded layer available; do nothing if it is loaded. Raises LayerNotFound, or the same errors as `put`."""
        if self.registry.unloaded(name) is None:
            self.registry.find(name)
            return
        change = 0
        async with self._in_time(deadline) as limit, self._exclusive(deadline):
            if (unloaded := self.registry.unloaded(name)) is not None:
                layer = await self._make_unloaded(unloaded)
            async with self._changing:
                limit.reschedule(None)
                if unloaded is None or self.registry.unloaded(name) is None:  # another caller was faster
                    self.registry.find(name)
                    return
                if self.store is not None:
                    change, self._files[name] = await self._run_on_folder(self.store.load, name)
                self._add(layer)
        await self._wait_for_others(change, deadline)

    def stop_following(self) -> None:
        """Withdraw this process from the coordination, so that others no longer wait for it. For a process whose event loop rarely runs."""
        if self.store is not None:
            self.store.close()

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        _submit(self._folder_thread, self.stop_following)  # after its work
        self._thread.shutdown(wait=False)
        self._folder_thread.shutdown(wait=False)

    def _require_not_configured(self, name: str) -> None:
        """With a store, raises LayerConflict for a configured layer, which a restart would restore."""
        if self.store is not None and name in self._configured:
            raise LayerConflict(f'the layer "{name}" is configured, and a restart would restore it: it can be neither replaced nor removed')

    @asynccontextmanager
    async def _in_time(self, deadline: float | None) -> AsyncIterator[asyncio.Timeout]:
        """End what the block waits for at `deadline`, with DeadlinePassed. Once it changes something, it must switch that off by
        `reschedule(None)`. A thread finishes what it has begun, for nobody."""
        limit = asyncio.timeout(None if deadline is None else deadline - self.probe.scheduler.clock())
        try:
            async with limit:
                yield limit
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(f"nothing has changed: {TOO_LATE}") from None

    @asynccontextmanager
    async def _exclusive(self, deadline: float | None) -> AsyncIterator[None]:
        """Let no other caller or process add layers, and load all of theirs first, so that limits are checked correctly.

        Raises DeadlinePassed, NotReady after CHANGE_TIMEOUT, StorageFull or ServiceFault.
        """
        if self.store is None:
            async with self._adding:
                yield
            return
        claim = Claim(self.store.path)
        busy = "nothing has changed: other processes that share the folder are changing layers"
        try:
            with storage_faults():
                await self._wait(lambda: "" if claim.acquire() else busy, deadline)
                following = asyncio.ensure_future(self._follow(self.store))
                following.add_done_callback(_retrieve)
                await asyncio.shield(following)  # else a file would count as read whose layer has not been loaded
            yield
        except BaseException:
            # after the work of either thread that a cancelled caller has left
            _submit(self._folder_thread, lambda: _submit(self._thread, claim.release))
            raise
        await self._run_on_folder(claim.release)

    async def _wait_for_others(self, change: int, deadline: float | None) -> None:
        """Wait until all processes have applied the change. Raises DeadlinePassed, NotReady after CHANGE_TIMEOUT, or ServiceFault."""
        if (store := self.store) is not None:
            behind = "the change is stored, but {} of the processes that share the folder have not applied it yet"
            with storage_faults("the change is stored, but it cannot be seen whether the other processes have applied it"):
                await self._wait(lambda: behind.format(count) if (count := store.coordinator.behind(change)) else "", deadline)

    async def _wait(self, obstacle: Callable[[], str], deadline: float | None) -> None:
        """Wait until `obstacle` returns "". Raises DeadlinePassed, or NotReady after CHANGE_TIMEOUT, with the obstacle as the detail."""
        clock = self.probe.scheduler.clock
        own_deadline = clock() + CHANGE_TIMEOUT
        while detail := await self._run_on_folder(obstacle):
            now = clock()
            if deadline is not None and now > deadline:
                raise DeadlinePassed(detail)
            if now > own_deadline:
                raise NotReady(detail)
            await asyncio.sleep(SCAN_INTERVAL / 4)

    async def _poll(self, store: LayerStore) -> None:
        while True:
            await asyncio.sleep(SCAN_INTERVAL)
            try:
                await self._follow(store)
            except OSError as error:
                log.error("layers folder unreadable", error=str(error))

    async def _follow(self, store: LayerStore) -> None:
        """Apply the state of the store to the registry, and record for the other processes that this is done, unless a layer must be
        tried again."""
        async with self._changing:
            changes, files = await self._run_on_folder(store.scan)
            for name in self._files.keys() - files.keys():
                del self._files[name]
                if name not in self._configured:
                    self.registry.remove(name)
                    self._drop_statistics(name)
            now = self.probe.scheduler.clock()
            self._retries = {name: retry for name, retry in self._retries.items() if files.get(name) == retry.file}
            waiting = {name for name, retry in self._retries.items() if now < retry.at}
            changed = [name for name, file in files.items() if self._files.get(name) != file and name not in waiting]
            too_large = []
            for name in sorted(changed, key=lambda name: files[name].suffix != UNLOADED):  # unloading makes room
                before, self._files[name] = self._files.get(name), files[name]
                if name in self._configured:
                    log.warning("layer file ignored", layer=name, reason="a layer of that name is configured")
                elif not await self._apply_file(store, name, before):
                    too_large.append((name, before))
            for name, before in too_large:  # loading the others may have made room, if one became smaller
                await self._apply_file(store, name, before, last=True)
            if not self._retries:
                await self._run_on_folder(store.coordinator.acknowledge, changes)

    async def _apply_file(self, store: LayerStore, name: str, before: LayerFile | None, last: bool = False) -> bool:
        """Load or unload a layer as its file says. On failure, log it and keep the old layer of that name; try again if it may pass.

        `before`: the file of that name that was last read. Returns False, without logging, if the layer is too large, unless this is the
        `last` attempt.
        """
        retry = self._retries.pop(name, None)
        try:
            if self._files[name].suffix == UNLOADED:
                self._mark_unloaded(await self._unloaded(store, name, before))
                return True
            if self.registry.unloaded(name) is not None:
                self.registry.remove(name)
            layer = await self._read(store, name)
            self._add(layer)
            log.info("layer loaded", layer=name, fingerprint=layer.fingerprint[:12])
        except FileNotFoundError:  # removed since; the next scan shows that
            del self._files[name]
        except (RequestError, PermissionError) as error:
            if isinstance(error, TooLarge) and not last:
                return False
            log.error("layer file refused", layer=name, error=str(error))
        except (AttendError, OSError, MemoryError) as error:
            now, file = self.probe.scheduler.clock(), self._files[name]
            retry = Retry(file, now + RETRY_INTERVAL, retry.until if retry else now + CHANGE_TIMEOUT)
            if now < retry.until:
                log.warning("layer file not loaded yet", layer=name, error=str(error))
                self._retries[name] = retry
                self._forget_file(name, before)
            else:
                log.error("layer file refused", layer=name, error=str(error))
        return True

    def _forget_file(self, name: str, before: LayerFile | None) -> None:
        """Let the next scan see the file as a new one; `before` is the one that was last read."""
        del self._files[name]
        if before is not None:
            self._files[name] = before

    async def _unloaded(self, store: LayerStore, name: str, before: LayerFile | None) -> UnloadedLayer:
        """The layer of an unloaded file; it is read unless it is the file `before` under another name."""
        loaded = self.registry.get(name)
        if loaded is not None and before is not None and before.stamp == self._files[name].stamp:
            return UnloadedLayer(name, loaded.spec, loaded.fingerprint, origin=loaded.origin)
        read, fingerprint = await self._run_in_thread(store.read, name, UNLOADED)
        return UnloadedLayer(name, read.spec, fingerprint, origin=read.origin)

    async def _read(self, store: LayerStore, name: str, suffix: str = SUFFIX) -> LoadedLayer:
        """Read and warm the layer of a file. Raises InvalidRequest if its fingerprint differs from the one in the file."""
        read, fingerprint = await self._run_in_thread(store.read, name, suffix)
        layer = await self._make(name, read)
        if fingerprint not in ("", layer.fingerprint):
            raise InvalidRequest.where("/__metadata__/fingerprint", layer.fingerprint, fingerprint[:64])
        return layer

    async def _make_unloaded(self, unloaded: UnloadedLayer) -> LoadedLayer:
        """The layer that was unloaded, warm; it is not added."""
        if self.store is None:
            return await self._make(unloaded.name, ParsedLayer(unloaded.spec, unloaded.weights, origin=unloaded.origin))
        with storage_faults():
            return await self._read(self.store, unloaded.name, UNLOADED)

    async def _run_in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in the loader's thread, where it may wait for a layer that is being made."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _run_on_folder(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work`, which reads or changes only names of files, in the thread of the folder."""
        return await asyncio.get_running_loop().run_in_executor(self._folder_thread, work, *args)

    async def _make(self, name: str, parsed: ParsedLayer) -> LoadedLayer:
        self.registry.check_size(name, parsed.spec)
        layer = await self._run_in_thread(self.registry.make, name, parsed.spec, parsed.weights, parsed.origin, parsed.in_tensors)
        await self.probe.warm(layer, self.registry.limits)
        return layer

    def _add(self, layer: LoadedLayer) -> bool:
        new = self.registry.put(layer)
        self.statistics.add_layer(layer.name)
        self.metrics.layers.set(len(self.registry))
        return new

    def _mark_unloaded(self, layer: UnloadedLayer) -> None:
        self.registry.unload(layer)
        self._drop_statistics(layer.name)

    def _drop_statistics(self, name: str) -> None:
        """Delete the statistics of a removed or unloaded layer, and update the number of layers."""
        self.statistics.remove_layer(name)
        self.metrics.layers.set(len(self.registry))


def _retrieve(following: "asyncio.Future[None]") -> None:
    """Look at an error that a cancelled caller does not see, which asyncio would log as never retrieved."""
    if not following.cancelled():
        following.exception()


def _submit(thread: ThreadPoolExecutor, work: Callable[[], object]) -> None:
    """Run this on a thread, or here if the thread is shut down, and so has nothing left to do."""
    try:
        thread.submit(work)
    except RuntimeError:
        work()
