"""The service of one process: builds it from its parts, starts it, reports readiness, and shuts it down."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from service.errors import CallerGone, DeadlinePassed, NotReady
from service.serving.admission import ServingLimits
from service.serving.batching import limits_on
from service.serving.byte_budget import ByteBudget
from service.serving.engine import Engine
from service.serving.executor import one_core
from service.serving.layers.loader import LayerLoader
from service.serving.layers.registry import LayerRegistry
from service.serving.layers.store import LayerStore
from service.serving.metrics import Metrics
from service.serving.probe import Probe
from service.serving.requests import TOO_LATE
from service.serving.scheduler import QueueLimits, Scheduler
from service.serving.statistics import LayerStatistics
from service.spec import LayerSpec
from service.wire.limits import WireLimits

T = TypeVar("T")
Close = Callable[[], Coroutine[Any, Any, Any]]
STATM = Path("/proc/self/statm")
log = structlog.get_logger("attend")


class Service:
    """The parts that answer requests in one process, and its state. Has no layers until `start` or `begin` has loaded them."""

    def __init__(
        self, scheduler: Scheduler, metrics: Metrics, wire_limits: WireLimits, limits: ServingLimits, store: LayerStore | None
    ) -> None:
        self.scheduler, self.metrics, self.wire_limits, self.limits = scheduler, metrics, wire_limits, limits
        self.clock = scheduler.clock
        self.registry = LayerRegistry(scheduler.device, limits)
        self.statistics = LayerStatistics(metrics.folder)
        metrics.add(self.statistics)
        self.probe = Probe(scheduler)
        self.loader = LayerLoader(self.registry, self.probe, metrics, self.statistics, store, wire_limits.layer_bytes)
        self.engine = Engine(self.registry, scheduler, metrics, self.statistics, wire_limits, limits)
        self.budget = ByteBudget(scheduler.limits.memory_bytes)
        self.gate = ShutdownGate()
        self.started = self.draining = False
        self.failed = False  # whether the configured layers could not be loaded
        self.retiring = False  # another process takes over: connections are closed, but the server as a whole stays ready
        self.compress = False  # whether replies are compressed for clients that accept it
        self.timeout: float | None = None  # seconds for requests that set no deadline
        self.logged_when_ready: Mapping[str, str] = {}  # more fields of the event "ready"
        self._starting: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._sampling: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> bool:
        """Whether calls are answered: layers are loaded and warm, memory suffices, and the process is not draining."""
        return self.started and not self.draining and self.scheduler.healthy

    def require_started(self) -> None:
        """Raises NotReady before the configured layers are loaded and warm. A server that is shutting down still accepts calls."""
        if not self.started:
            raise NotReady("the layers are still being loaded; see /health/ready")

    async def is_answering(self) -> bool:
        """Whether calls are answered and the device responds to a probe of the first layer; without layers, the same as `ready`."""
        layers = self.registry.all()
        if not self.started or self.draining or not layers:
            return self.ready
        return await self.probe.responds(layers[0]) and self.ready

    async def is_serving_layers(self) -> bool:
        """Whether calls are answered and there is a layer: the Open Inference Protocol's definition of a ready server."""
        return len(self.registry) > 0 and await self.is_answering()

    @property
    def threads(self) -> int:
        """Number of threads for arithmetic."""
        return torch.get_num_threads()

    @property
    def device(self) -> str:
        return str(self.registry.device)

    def begin(self, specs: dict[str, LayerSpec]) -> "asyncio.Task[None]":
        """Start in the background on the running loop. The task ends when the start has succeeded or failed."""
        self._starting = asyncio.get_running_loop().create_task(self._start_and_log(specs))
        return self._starting

    async def _start_and_log(self, specs: dict[str, LayerSpec]) -> None:
        try:
            await self.start(specs)
        except Exception as error:
            self.failed = True
            log.error("not ready", error=str(error))
        else:
            layers = [layer.name for layer in self.registry.all()]
            log.info("ready", layers=layers, device=self.device, threads=self.threads, **self.logged_when_ready)

    async def start(self, specs: dict[str, LayerSpec]) -> None:
        """Load and warm the configured layers, measure the device's speed, then be ready."""
        await self.loader.start(specs)
        if len(self.registry):
            await self.probe.measure(self.registry.all()[0])
        gc.collect()
        gc.freeze()  # exempts torch's modules: a full collection of them would pause the process for tens of milliseconds
        self.started = True
        self._recovering = asyncio.get_running_loop().create_task(self.probe.recover(self.registry.all))
        self._keep_sampling()

    def stop_admitting(self) -> None:
        """Refuse new calls; those already accepted are still answered."""
        self.draining |= not self.retiring
        self.gate.close()

    def sample(self) -> None:
        """Update the gauges."""
        if (sessions := self.engine.sessions) is not None:
            self.metrics.sample_sessions(len(sessions), sessions.pool.used, sessions.pool.shared)
        self.metrics.sample(self.scheduler.load, self.budget.used, memory_in_use(self.registry.device), self.ready)

    def _keep_sampling(self) -> None:
        """Sample once a second if another process may report this one's metrics; otherwise GET /metrics samples."""
        if self.metrics.shared:
            self.sample()
            self._sampling = asyncio.get_running_loop().call_later(1.0, self._keep_sampling)

    def until(self, deadline: float) -> asyncio.Timeout:
        """A context manager that raises TimeoutError at `deadline`, a time of the service's clock."""
        return asyncio.timeout(deadline - self.clock())

    async def in_time(self, work: Coroutine[Any, Any, T], deadline: float | None, disconnected: "asyncio.Future[None] | None") -> T:
        """The result of `work`, unless it is cancelled first: at the deadline, or once `disconnected` is done.

        Raises DeadlinePassed or CallerGone.
        """
        task = asyncio.ensure_future(work)
        waiting: set[asyncio.Future[Any]] = {task} if disconnected is None else {task, disconnected}
        try:
            timeout = None if deadline is None else deadline - self.clock()
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            raise CallerGone if done else DeadlinePassed(TOO_LATE)
        finally:
            task.cancel()

    def close(self) -> None:
        for waiting in (self._starting, self._sampling, self._recovering):
            if waiting is not None:
                waiting.cancel()
        self.metrics.record()
        self.loader.close()
        self.scheduler.close()
        self.statistics.close()
        self.engine.close()


def open_service(
    device: str,
    wire_limits: WireLimits,
    limits: ServingLimits,
    queue: QueueLimits | None = None,
    batch_calls: int = 64,
    layers_dir: Path | None = None,
) -> Service:
    """A service without layers on `device`, a torch device name or "auto". Raises ValueError if there is no such device.

    With `layers_dir`, layers added by PUT are stored in that folder, and `start` loads the layers found there.
    """
    where = find_device(device)
    one_core()  # must be created before other threads compute: see `one_core`
    metrics = Metrics()
    store = None if layers_dir is None else LayerStore(layers_dir, wire_limits.layer_bytes)
    return Service(Scheduler(where, metrics, queue, limits_on(where, batch_calls)), metrics, wire_limits, limits, store)


def find_device(name: str) -> torch.device:
    """The device of that name; for "auto", the first GPU, or the CPU if there is none. Raises ValueError for a missing CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= count:
        available = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        built = "" if torch.version.cuda else " (it is built without CUDA)"
        raise ValueError(f"cannot compute on {name}: the devices of torch here are {available}{built}")
    return device


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device's memory; for a CPU, the resident memory of this process, 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class ShutdownGate:
    """Makes other servers (gRPC) close at the same time as the HTTP server, not after it. Open until `close`."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._servers: list[Close] = []
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def open(self) -> bool:
        return not self._closing.is_set()

    def add(self, close: Close) -> None:
        """Registers a server to be closed with this gate; its `close` returns when the calls that it had accepted are answered."""
        self._servers.append(close)

    def close(self) -> None:
        """Close the gate and start to close the registered servers. Returns at once. Idempotent."""
        if self.open:
            self._closing.set()
            self._tasks = [asyncio.get_running_loop().create_task(close()) for close in self._servers]

    async def closed(self) -> None:
        """Wait until the registered servers have closed."""
        await asyncio.gather(*self._tasks)

    async def closes_within(self, seconds: float) -> None:
        """Wait until the gate closes, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def until_closed(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield the items until they end or the gate closes."""
        closing = asyncio.create_task(self._closing.wait())
        try:
            while True:
                item = asyncio.ensure_future(anext(items))
                await asyncio.wait((item, closing), return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    item.cancel()
                    return
                try:
                    yield item.result()
                except StopAsyncIteration:
                    return
        finally:
            closing.cancel()
