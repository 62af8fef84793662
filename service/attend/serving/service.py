"""The service of one process: builds it from its parts, starts it, reports readiness, and shuts it down."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from attend.errors import NotReady
from attend.limits import READY_SECONDS, BatchLimits, QueueLimits, ServingLimits, WireLimits
from attend.serving.batching import limits_on
from attend.serving.byte_budget import ByteBudget
from attend.serving.engine import Engine
from attend.serving.executor import one_core
from attend.serving.layers.loader import LayerLoader
from attend.serving.layers.registry import LayerRegistry
from attend.serving.layers.store import LayerStore
from attend.serving.metrics import Metrics
from attend.serving.probe import Probe
from attend.serving.scheduler import Scheduler
from attend.serving.statistics import LayerStatistics
from attend.spec import LayerSpec

T = TypeVar("T")
STATM = Path("/proc/self/statm")
NO_PAGES: Mapping[str, str] = {}
log = structlog.get_logger("attend")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What a service takes from the settings, whose defaults are the same."""

    wire_limits: WireLimits = field(default_factory=WireLimits)
    limits: ServingLimits = field(default_factory=ServingLimits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    max_buffered_bytes: int | None = None  # of bodies and replies; None: as many as those of waiting calls
    batch_calls: int = BatchLimits().calls  # in one batch, on a GPU
    layers_dir: Path | None = None  # stores layers added by PUT; `start` loads those found there
    compress: bool = False  # whether replies are compressed for clients that accept several codings
    timeout: float | None = None  # seconds for requests that set no deadline
    ready_timeout: float = READY_SECONDS  # for the device to answer a check


class Service:
    """The parts that answer requests in one process, and its state. Has no layers until `start` or `begin` has loaded them."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics, store: LayerStore | None, options: ServiceOptions) -> None:
        self.scheduler, self.metrics, self.clock = scheduler, metrics, scheduler.clock
        self.wire_limits, self.limits = wire_limits, limits = options.wire_limits, options.limits
        self.registry = LayerRegistry(scheduler.device, limits)
        self.statistics = LayerStatistics(metrics.folder)
        metrics.add(self.statistics)
        self.probe = Probe(scheduler, options.ready_timeout)
        self.loader = LayerLoader(self.registry, self.probe, metrics, self.statistics, store, wire_limits.max_layer_bytes)
        self.engine = Engine(self.registry, scheduler, metrics, self.statistics, wire_limits, limits)
        self.budget = ByteBudget(options.max_buffered_bytes or scheduler.limits.max_queue_bytes, scheduler.clock)
        self.gate = ShutdownGate()
        self.started = self.draining = False
        self.failed = False  # whether the configured layers could not be loaded
        self.retiring = False  # another process takes over: connections are closed, but the server as a whole stays ready
        self.compress, self.timeout = options.compress, options.timeout
        self._starting: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._sampling: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> bool:
        """Whether calls are answered: layers are loaded and warm, memory suffices, and the process is not draining."""
        return self.started and not self.draining and self.scheduler.healthy

    def require_started(self) -> None:
        """Raises NotReady before the configured layers are loaded and warm: one that is not there yet would be taken for a missing one.

        A server that is shutting down still accepts calls.
        """
        if not self.started:
            raise NotReady("the layers are still being loaded; see /health/ready")

    async def is_answering(self) -> bool:
        """Whether calls are answered and the device responds to a probe of a layer; without layers, the same as `ready`."""
        layer = self.registry.one()
        if not self.started or self.draining or layer is None:
            return self.ready
        return await self.probe.responds(layer) and self.ready

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

    def begin(self, specs: dict[str, LayerSpec], pages: Mapping[str, str] = NO_PAGES) -> "asyncio.Task[None]":
        """Start in the background on the running loop. The task ends when the start has succeeded or failed. `pages`: URLs to log then."""
        self._starting = asyncio.get_running_loop().create_task(self._start_and_log(specs, pages))
        return self._starting

    async def _start_and_log(self, specs: dict[str, LayerSpec], pages: Mapping[str, str]) -> None:
        try:
            await self.start(specs)
        except Exception as error:
            self.failed = True
            log.error("not ready", error=str(error))
        else:
            layers = sorted(layer.name for layer in self.registry.all())
            log.info("ready", layers=layers, device=self.device, threads=self.threads, **pages)

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

    def refuse_requests(self) -> None:
        """Refuse new calls; those already accepted are still answered."""
        self.draining |= not self.retiring
        self.gate.close()

    def sample(self) -> None:
        """Update the gauges."""
        if (sessions := self.engine.sessions) is not None:
            self.metrics.sample_sessions(len(sessions), sessions.pool.used, sessions.pool.shared)
        self.metrics.sample(self.scheduler.load, self.budget.held, memory_in_use(self.registry.device), self.ready)

    def _keep_sampling(self) -> None:
        """Sample once a second if another process may report this one's metrics; otherwise GET /metrics samples."""
        if self.metrics.shared:
            self.sample()
            self._sampling = asyncio.get_running_loop().call_later(1.0, self._keep_sampling)

    def until(self, deadline: float) -> asyncio.Timeout:
        """A context manager that raises TimeoutError at `deadline`, a time of the service's clock."""
        return asyncio.timeout(deadline - self.clock())

    def close(self) -> None:
        """Stop. Does not wait for what threads still compute: nobody needs it, and nobody can stop a thread."""
        for waiting in (self._starting, self._sampling, self._recovering):
            if waiting is not None:
                waiting.cancel()
        self.metrics.record()
        self.loader.close()
        self.scheduler.close()
        self.statistics.close()
        self.engine.close()


def open_service(device: str, options: ServiceOptions = ServiceOptions(), clock: Callable[[], float] = time.monotonic) -> Service:
    """A service without layers on `device`, a torch device name or "auto". Raises ValueError if there is no such device."""
    where = find_device(device)
    one_core()  # must be created before other threads compute: see `one_core`
    metrics = Metrics()
    store = None if options.layers_dir is None else LayerStore(options.layers_dir, options.wire_limits.max_layer_bytes)
    scheduler = Scheduler(where, metrics, options.queue, limits_on(where, options.batch_calls), clock)
    return Service(scheduler, metrics, store, options)


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
        self._servers: list[Callable[[], Coroutine[Any, Any, Any]]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def open(self) -> bool:
        return not self._closing.is_set()

    def add(self, close: Callable[[], Coroutine[Any, Any, Any]]) -> None:
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
        item: asyncio.Future[T] | None = None
        try:
            while True:
                item = asyncio.ensure_future(anext(items))
                await asyncio.wait((item, closing), return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    return
                try:
                    yield item.result()
                except StopAsyncIteration:
                    return
        finally:
            ending = [task for task in (item, closing) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)  # asyncio logs an exception that nobody retrieves
