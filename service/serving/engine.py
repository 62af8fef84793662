"""The path of a request, readable from top to bottom:

    bytes --decode--> request --bind--> call --submit--> result --reply--> reply --encode--> bytes

Small bodies are decoded and encoded where they are; large ones leave the event loop. Knows no HTTP.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from service.errors import DeadlinePassed
from service.serving import cost
from service.serving.admission import ByteBudget
from service.serving.batching import limits_on
from service.serving.bound_call import BoundCall
from service.serving.codec_pool import CodecPool, size_of
from service.serving.decoding import Decoder, predict
from service.serving.device import find_device, taken
from service.serving.executor import Execution, Outcome, one_core
from service.serving.figures import FigureRenderer
from service.serving.layers.files import Source, write_layer_file
from service.serving.layers.loader import LayerLoader
from service.serving.layers.registry import HeldLayer, LayerRegistry
from service.serving.layers.store import LayerStore
from service.serving.lifecycle import ShutdownGate
from service.serving.metrics import Metrics, Phases
from service.serving.probe import Probe
from service.serving.replies import plan_of, predicted_bytes, refuse_empty, written
from service.serving.requests import EncodedReply, RawRequest
from service.serving.scheduler import QueueLimits, Scheduler
from service.serving.shards import Shards, cut, join, share
from service.serving.statistics import LayerStatistics
from service.serving.threads import usable_cores
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.compression import pack
from service.wire.limits import WireLimits
from service.wire.reply import Buffer
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest, Document, Plan

T = TypeVar("T")
D = TypeVar("D", bound=Document)
log = structlog.get_logger("attend")
ON_THE_LOOP = 64 * 1024  # bytes up to which decoding and encoding take well under a millisecond


class Engine:
    """Everything between bytes and bytes, for one process."""

    def __init__(
        self,
        registry: LayerRegistry,
        scheduler: Scheduler,
        metrics: Metrics,
        wire_limits: WireLimits,
        limits: cost.ServingLimits,
        folder: LayerStore | None = None,
    ) -> None:
        self.registry, self.scheduler, self.metrics = registry, scheduler, metrics
        self.probe = Probe(scheduler)
        self.statistics = LayerStatistics(metrics.folder)
        metrics.add(self.statistics)
        self.loader = LayerLoader(registry, self.probe, metrics, self.statistics, folder, wire_limits.layer_bytes)
        self.wire_limits, self.limits, self.clock = wire_limits, limits, scheduler.clock
        self.started = self.draining = False
        self.retiring = False  # another process takes over: connections are ended, but the server as a whole stays ready
        self.door = ShutdownGate()
        self.compress = False  # whether replies are compressed for everyone who accepts it
        self.timeout: float | None = None  # seconds for requests that set no deadline
        self.budget = ByteBudget(scheduler.limits.memory_bytes)
        self._starting: asyncio.Task[None] | None = None
        self._sampling: asyncio.TimerHandle | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._codecs = CodecPool(min(2, usable_cores()))  # threads that hold the GIL most of the time
        self.renderer = FigureRenderer(self.clock)
        self.decoder = Decoder(registry, wire_limits, limits)
        self.shards: Shards | None = None  # who computes what is too large for this process

    @property
    def ready(self) -> bool:
        """Whether calls are welcome: layers loaded and warm, memory not short, not about to leave."""
        return self.started and not self.draining and self.scheduler.healthy

    async def answers(self) -> bool:
        """Whether calls are welcome and the device really computes; without layers there is nothing to ask it."""
        layers = self.registry.all()
        if not self.started or self.draining or not layers:
            return self.ready
        return await self.probe.responds(layers[0]) and self.ready

    async def serves(self) -> bool:
        """Whether it answers and there is a layer to call: what the Open Inference Protocol calls a ready server."""
        return len(self.registry) > 0 and await self.answers()

    def stop_admitting(self) -> None:
        """No more calls are let in; those that are in are answered."""
        self.draining = True
        self.door.close()

    def sample(self) -> None:
        """Brings the gauges up to date."""
        self.metrics.sample(self.scheduler.load, self.budget.held, taken(self.registry.device), self.ready)

    def _keep_sampling(self) -> None:
        """Once a second where others may be asked how this process is; where it is asked itself, it samples then."""
        if self.metrics.shared:
            self.sample()
            self._sampling = asyncio.get_running_loop().call_later(1.0, self._keep_sampling)

    @property
    def threads(self) -> int:
        """Threads that arithmetic may use."""
        return torch.get_num_threads()

    @property
    def device(self) -> str:
        return str(self.registry.device)

    def begin(self, specs: dict[str, LayerSpec]) -> "asyncio.Task[None]":
        """Starts in the background, on the running loop; the task ends when it has, well or not."""
        self._starting = asyncio.get_running_loop().create_task(self._start_or_tell(specs))
        return self._starting

    async def _start_or_tell(self, specs: dict[str, LayerSpec]) -> None:
        try:
            await self.start(specs)
        except Exception as error:
            log.error("not ready", error=str(error))
        else:
            log.info("ready", layers=[layer.name for layer in self.registry.all()], device=self.device, threads=self.threads)

    async def start(self, specs: dict[str, LayerSpec]) -> None:
        """Makes and warms the configured layers; ready afterwards."""
        await self.loader.start(specs)
        if len(self.registry):
            await self.probe.measure(self.registry.all()[0])
        gc.collect()
        gc.freeze()  # what is here stays: going through torch's modules again would stop everything for tens of milliseconds
        self.started = True
        self._recovering = asyncio.get_running_loop().create_task(self.probe.recover(self.registry.all))
        self._keep_sampling()

    async def attend(self, raw: RawRequest) -> EncodedReply:
        """POST /attend."""
        return await self._answer(raw, AttendRequest)

    async def analyse(self, raw: RawRequest) -> EncodedReply:
        """POST /attend/analysis: the same line, with the metrics in place of the outputs."""
        return await self._answer(raw, AnalysisRequest)

    async def _answer(self, raw: RawRequest, document: type[AttendRequest]) -> EncodedReply:
        started = self.clock()
        large = len(raw.body) > ON_THE_LOOP or bool(raw.coding)
        bound = await self._aside_for(raw, self.decoder.bound, raw, document) if large else self.decoder.bound(raw, document)
        phases = Phases(decode=self.clock() - started)
        try:
            raw.reserve(predicted_bytes(bound, raw))
            outcome = await self._computed(bound, raw)
            phases.queue, phases.compute = outcome.queue, outcome.compute
            encoding = self.clock()
            large = bound.cost.reply_bytes > ON_THE_LOOP
            pieces = await self._aside_for(raw, written, bound, outcome.result, raw) if large else written(bound, outcome.result, raw)
        except BaseException:  # a caller who has gone among them
            self.statistics.failed(bound.layer.name, self.clock() - started)
            raise
        phases.encode = self.clock() - encoding
        self._count(bound, outcome, phases)
        request = bound.request
        wanted = request.wanted(bool(bound.layer.spec.positional)) if isinstance(request, AnalysisRequest) else request.outputs
        about = {"layer": bound.layer.name, "query": request.query.shape, "keys": bound.call.masks.num_keys, "outputs": wanted}
        return EncodedReply(pieces, phases, {**about, "operations": bound.cost.operations, "batch": outcome.batch})

    async def figure(self, raw: RawRequest) -> EncodedReply:
        """POST /attend/figure: the same line with one more step. Computed reproducibly, so that a picture is always the same."""
        started = self.clock()
        figure = await self._aside_for(raw, self.decoder.figure, raw)
        bound, phases = figure.bound, Phases(decode=self.clock() - started)
        outcome = await self._submit(bound, raw)
        phases.queue, phases.compute = outcome.queue, outcome.compute
        started = self.clock()
        refuse_empty(bound, outcome.result)
        if figure.spec.format == "png":
            raw.reply_coding = ""  # it is packed as it is
        picture = await self.renderer.draw(figure, outcome.result, raw.deadline, raw.gone)
        about = {"layer": bound.layer.name, "query": bound.request.query.shape, "keys": bound.call.masks.num_keys}
        pieces: list[Buffer] = [picture]
        if raw.reply_coding:
            pieces = await self._aside_for(raw, pack, pieces, raw.reply_coding)
        phases.encode = self.clock() - started
        self._count(bound, outcome, phases)
        return EncodedReply(pieces, phases, {**about, "figure": figure.spec.kind, "format": figure.spec.format}, figure.media_type)

    def _count(self, bound: BoundCall, outcome: Outcome, phases: Phases) -> None:
        self.metrics.computed(phases)
        self.statistics.answered(bound.layer.name, phases, bound.call.query.shape[0], outcome.execution, bound.cost.operations)

    async def plan(self, raw: RawRequest) -> Plan:
        """POST /attend/plan: the same request, up to the point where arrays would be made."""
        request, layer = await self._aside_for(raw, self.decoder.fitted, raw, None, True)
        predicted = predict(request, layer.spec)
        problems, _ = self.decoder.refusals(request, predicted)
        return plan_of(request, layer, predicted, problems)

    async def put_layer(self, name: str, raw: RawRequest, source: Source | None = None) -> tuple[HeldLayer, bool]:
        """PUT /layers/{name}: the layer, and whether the name is new. It serves when this returns."""
        return await self.loader.put(name, partial(self._unless_abandoned, raw, self.decoder.layer, raw, source or Source()), raw.deadline)

    async def read(self, raw: RawRequest, model: type[D]) -> D:
        """The body as a document of that model. Raises RequestError where it is not."""
        return await self._aside_for(raw, self.decoder.document, raw, model)

    async def read_object(self, raw: RawRequest, largest: int) -> dict[str, Any]:
        """The body as a JSON object that unpacks to at most so many bytes; an empty one where there is no body."""
        return await self._run_in_thread(self.decoder.plain_object, raw, largest)

    async def hold(self, name: str, spec: LayerSpec, weights: Mapping[str, Array] | None) -> tuple[HeldLayer, bool]:
        """Makes, warms and holds a layer; and whether the name is new. Raises TooLarge, or InvalidRequest for weights that do not fit."""
        return await self.loader.put(name, lambda: (spec, weights))

    async def delete_layer(self, name: str, deadline: float | None = None) -> None:
        """DELETE /layers/{name}."""
        await self.loader.remove(name, deadline)

    def until(self, deadline: float | None) -> asyncio.Timeout:
        """A block that ends in TimeoutError at the deadline, where there is one."""
        return asyncio.timeout(None if deadline is None else deadline - self.clock())

    async def join(self, pieces: list[bytes]) -> bytes:
        """The body that came in these pieces. Joining bytes leaves the interpreter to others."""
        return await self._run_in_thread(b"".join, pieces)

    async def unload_layer(self, name: str) -> None:
        """The repository's unload: the layer is kept, and answers no calls until it is loaded."""
        await self.loader.unload(name)

    async def load_layer(self, name: str) -> None:
        """The repository's load of a layer that is there."""
        await self.loader.load(name)

    async def export_layer(self, name: str) -> list[Buffer]:
        """GET /layers/{name}/weights: safetensors that PUT takes back."""
        return await self._run_in_thread(write_layer_file, self.registry.find(name))

    def cut_among(self, shards: Shards) -> None:
        """From now on calls that are too large for this process are cut, and computed there."""
        self.shards, self.decoder.parts = shards, shards.count

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._recovering is not None:
            self._recovering.cancel()
        self.loader.close()
        self.scheduler.close()
        self.statistics.close()
        self.renderer.close()
        self._codecs.close()

    async def _computed(self, bound: BoundCall, raw: RawRequest) -> Outcome:
        """The call's outcome: of this process's device, or of all shards together."""
        if self.shards is None or not bound.in_parts:
            return await self._submit(bound, raw)
        started, parts = self.clock(), cut(bound.call, self.shards.count)
        try:
            async with asyncio.timeout(None if raw.deadline is None else raw.deadline - started):
                results = await self.shards.compute(bound.layer, parts, share(bound.cost, len(parts)))
        except TimeoutError:
            raise DeadlinePassed("the deadline of X-Request-Timeout passed before there was an answer") from None
        result = await self._run_in_thread(join, bound.layer.attention, bound.call, results)
        return Outcome(result, 0.0, self.clock() - started, 1, Execution(bound.call.query.shape[0]))

    async def _submit(self, bound: BoundCall, raw: RawRequest) -> Outcome:
        """The call's outcome on this process's device."""
        return await self.scheduler.submit(
            bound.layer, bound.call, bound.cost, raw.deadline, raw.gone, raw.caller, operation=bound.operation
        )

    async def _run_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Off the event loop."""
        caller = next((one.caller for one in args if isinstance(one, RawRequest)), "")
        return await self._codecs.run(partial(function, *args), size_of(args), caller)

    async def _aside_for(self, raw: RawRequest, function: Callable[..., T], *args: Any) -> T:
        """The same, unless nobody waits for it any more when a thread is free. Raises CallerGone or DeadlinePassed then."""
        return await self._run_in_thread(self._unless_abandoned, raw, function, *args)

    def _unless_abandoned(self, raw: RawRequest, function: Callable[..., T], *args: Any) -> T:
        raw.demand_waiting(self.clock())
        return function(*args)


def open_engine(
    device: str,
    wire_limits: WireLimits,
    limits: cost.ServingLimits,
    queue: QueueLimits | None = None,
    batch_calls: int = 64,
    layers_dir: Path | None = None,
) -> Engine:
    """An engine without layers on a device of torch's naming, or "auto". Raises ValueError where there is none of that name.

    With `layers_dir` the layers that are put are kept there, and those that are there are held once it starts.
    """
    where = find_device(device)
    one_core()  # before there are other threads: see there
    metrics = Metrics()
    folder = None if layers_dir is None else LayerStore(layers_dir, wire_limits.layer_bytes)
    scheduler = Scheduler(where, metrics, queue, limits_on(where, batch_calls))
    return Engine(LayerRegistry(where, limits), scheduler, metrics, wire_limits, limits, folder)
