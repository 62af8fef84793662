"""The path of a request, readable from top to bottom:

    bytes --decode--> request --bind--> call --submit--> result --reply--> reply --encode--> bytes

Small bodies are decoded and encoded where they are; large ones leave the event loop. Knows no HTTP.
"""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from service.attention.call import Result
from service.errors import DeadlinePassed, InvalidRequest, Overloaded, Problem, TooLarge
from service.serving import analysis, cost
from service.serving.batches import BatchLimits
from service.serving.bind import bind, fit, masked_rows
from service.serving.bound import Bound
from service.serving.catalogue import Catalogue, HeldLayer, numpy_of
from service.serving.easel import Easel
from service.serving.folder import LayerFolder
from service.serving.loading import Source, given_weights, read_layer_file, write_layer_file
from service.serving.metrics import Metrics, Phases
from service.serving.pulse import Pulse
from service.serving.scheduler import Outcome, QueueLimits, Scheduler
from service.serving.shards import Shards, cut, join, refusals, share
from service.serving.shelf import Shelf
from service.serving.sketch import Sketch, sketch
from service.serving.statistics import Statistics
from service.serving.threads import usable_cores
from service.spec import LayerSpec
from service.tensors import DATATYPES, Array
from service.wire.analysis import AnalysisRequest
from service.wire.arrays import Kind
from service.wire.compression import pack, unpack
from service.wire.documents import AttendRequest, Document, LayerReference, Plan, PlannedTensor, PutLayer, Refusal
from service.wire.figure import FigureRequest
from service.wire.forms import FORMS, Form
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.refusals import validate
from service.wire.reply import Buffer, Reply

T = TypeVar("T")
D = TypeVar("D", bound=Document)
log = structlog.get_logger("attend")
STATM = Path("/proc/self/statm")
ON_THE_LOOP = 64 * 1024  # bytes up to which decoding and encoding take well under a millisecond


@dataclass(slots=True)
class Asked:
    """What came over the wire: bytes, what form they have, what form the reply shall have, and how long the caller waits."""

    body: bytes
    form: str = JSON
    coding: str = ""
    reply_form: str = JSON
    reply_coding: str = ""
    deadline: float | None = None
    gone: Callable[[], bool] = lambda: False
    own: Form | None = None  # of a protocol whose replies depend on more of the request than its form; it stands for both names then

    def take_body(self) -> bytes:
        """The body, which is not kept: a large one would stay in memory beside the arrays made of it."""
        body, self.body = self.body, b""
        return body


@dataclass(slots=True)
class Answer:
    """A reply's bytes in pieces, how long each phase took, and what the log says of the call."""

    pieces: list[Buffer]
    phases: Phases
    about: dict[str, Any] = field(default_factory=dict)
    media_type: str = ""  # where it is not the form that was asked for


class Engine:
    """Everything between bytes and bytes, for one process."""

    def __init__(
        self,
        catalogue: Catalogue,
        scheduler: Scheduler,
        metrics: Metrics,
        wire_limits: WireLimits,
        limits: cost.ServingLimits,
        folder: LayerFolder | None = None,
    ) -> None:
        self.catalogue, self.scheduler, self.metrics = catalogue, scheduler, metrics
        self.pulse = Pulse(scheduler)
        self.shelf = Shelf(catalogue, self.pulse, metrics, folder)
        self.wire_limits, self.limits, self.clock = wire_limits, limits, scheduler.clock
        self.started = self.draining = False
        self.compress = False  # whether replies are compressed for everyone who accepts it
        self.timeout: float | None = None  # seconds for requests that set no deadline
        self.statistics: dict[str, Statistics] = {}  # by layer
        self.held_bytes = 0  # of bodies between their first byte and their answer
        self._starting: asyncio.Task[None] | None = None
        self._sampling: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(min(2, usable_cores()), thread_name_prefix="codec")  # they hold the GIL most of the time
        self.easel = Easel(self.clock)
        self.shards: Shards | None = None  # who computes what is too large for this process

    @property
    def ready(self) -> bool:
        """Whether calls are welcome: layers loaded and warm, memory not short, not about to leave."""
        return self.started and not self.draining and self.scheduler.healthy

    @property
    def serves(self) -> bool:
        """Ready, and with a layer to call: what the Open Inference Protocol calls a ready server."""
        return self.ready and len(self.catalogue) > 0

    async def answers(self) -> bool:
        """Whether calls are welcome and the device really computes; without layers there is nothing to ask it."""
        layers = self.catalogue.all()
        return self.ready and (not layers or await self.pulse.beats(layers[0]))

    def sample(self) -> None:
        """Brings the gauges up to date."""
        memory = torch.cuda.memory_allocated(self.catalogue.device) if self.catalogue.device.type == "cuda" else resident_bytes()
        self.metrics.sample(self.scheduler.load, self.held_bytes, memory, self.ready)

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
        return str(self.catalogue.device)

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
            log.info("ready", layers=[layer.name for layer in self.catalogue.all()], device=self.device, threads=self.threads)

    async def start(self, specs: dict[str, LayerSpec]) -> None:
        """Makes and warms the configured layers; ready afterwards."""
        await self.shelf.start(specs)
        if len(self.catalogue):
            await self.pulse.measure(self.catalogue.all()[0])
        gc.collect()
        gc.freeze()  # what is here stays: going through torch's modules again would stop everything for tens of milliseconds
        self.started = True
        self._keep_sampling()

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Counts a body among those held, from before it is read until it is answered: what it yields is told of bytes to come.

        That raises Overloaded where they would be too many beside those already held.
        """
        room, held = self.scheduler.limits.memory_bytes, 0

        def hold(size: int) -> None:
            nonlocal held
            if self.held_bytes > held and self.held_bytes + size > room:
                wanted = f"room for request bodies of {room} bytes in all (max_queue_bytes)"
                raise Overloaded(1, problems=[Problem("", wanted, f"{size} beside {self.held_bytes}")])
            self.held_bytes += size
            held += size

        try:
            yield hold
        finally:
            self.held_bytes -= held

    async def attend(self, asked: Asked) -> Answer:
        """POST /attend."""
        return await self._answer(asked, AttendRequest)

    async def analyse(self, asked: Asked) -> Answer:
        """POST /attend/analysis: the same line, with the metrics in place of the outputs."""
        return await self._answer(asked, AnalysisRequest)

    async def _answer(self, asked: Asked, document: type[AttendRequest]) -> Answer:
        started = self.clock()
        large = len(asked.body) > ON_THE_LOOP or bool(asked.coding)
        bound = await self._aside(self._bound, asked, document) if large else self._bound(asked, document)
        phases, statistics = Phases(decode=self.clock() - started), self.statistics_of(bound.layer.name)
        try:
            outcome = await self._computed(bound, asked)
            phases.queue, phases.compute = outcome.queue, outcome.compute
            encoding = self.clock()
            large = bound.cost.reply_bytes > ON_THE_LOOP
            pieces = await self._aside(_written, bound, outcome.result, asked) if large else _written(bound, outcome.result, asked)
        except BaseException:  # a caller who has gone among them
            statistics.failed(self.clock() - started)
            raise
        phases.encode = self.clock() - encoding
        self.metrics.computed(phases, bound.layer.name, bound.cost.operations)
        request = bound.request
        statistics.answered(phases, bound.call.query.shape[0], outcome.batch)
        wanted = request.outputs if bound.call.question is None else bound.call.question.metrics
        about = {"layer": bound.layer.name, "query": request.query.shape, "keys": bound.call.masks.num_keys, "outputs": wanted}
        return Answer(pieces, phases, {**about, "operations": bound.cost.operations, "batch": outcome.batch})

    async def figure(self, asked: Asked) -> Answer:
        """POST /attend/figure: the same line with one more step. Computed reproducibly, so that a picture is always the same."""
        started = self.clock()
        sketched = await self._aside(self._sketched, asked)
        bound, phases = sketched.bound, Phases(decode=self.clock() - started)
        outcome = await self.scheduler.submit(bound.layer, bound.call, bound.cost, asked.deadline, asked.gone)
        phases.queue, phases.compute = outcome.queue, outcome.compute
        started = self.clock()
        refuse_empty(bound, outcome.result)
        if sketched.form == "png":
            asked.reply_coding = ""  # it is packed as it is
        picture = await self.easel.draw(sketched, outcome.result, asked.deadline, asked.gone)
        about = {"layer": bound.layer.name, "query": bound.request.query.shape, "keys": bound.call.masks.num_keys}
        pieces: list[Buffer] = [picture]
        if asked.reply_coding:
            pieces = await self._aside(pack, pieces, asked.reply_coding)
        phases.encode = self.clock() - started
        self.metrics.computed(phases, bound.layer.name, bound.cost.operations)
        return Answer(pieces, phases, {**about, "figure": sketched.subject.kind, "format": sketched.form}, sketched.media_type)

    async def plan(self, asked: Asked) -> Plan:
        """POST /attend/plan: the same request, up to the point where arrays would be made."""
        request, layer = await self._aside(self._fitted, asked, None, True)
        predicted = predict(request, layer.spec)
        problems, _ = self._refusals(request, predicted)
        outputs = {}
        for name, shape in predicted.outputs.items():
            datatype = _datatype(name, request, layer.spec)
            size = DATATYPES[datatype].size
            for length in shape:
                size *= length
            outputs[name] = PlannedTensor(shape=list(shape), datatype=datatype, bytes=size)
        return Plan(
            layer=LayerReference(name=layer.name, fingerprint=layer.fingerprint),
            outputs=outputs,
            operations=predicted.operations,
            memory_bytes=predicted.memory_bytes,
            reply_bytes=predicted.reply_bytes,
            admitted=not problems,
            refusals=[Refusal(at=p.at, expected=p.expected, got=p.got) for p in problems],
        )

    async def put_layer(self, name: str, asked: Asked, source: Source | None = None) -> tuple[HeldLayer, bool]:
        """PUT /layers/{name}: the layer, and whether the name is new. It serves when this returns."""
        return await self.shelf.put(name, partial(self._layer_read, asked, source or Source()), asked.deadline)

    async def read(self, asked: Asked, model: type[D]) -> D:
        """The body as a document of that model. Raises InvalidRequest and its kin where it is none."""
        return validate(model, await self._aside(self._parsed, asked, model.tensors))

    async def hold(self, name: str, spec: LayerSpec, weights: Mapping[str, Array] | None) -> tuple[HeldLayer, bool]:
        """Makes, warms and holds a layer; and whether the name is new. Raises TooLarge, or InvalidRequest for weights that do not fit."""
        return await self.shelf.put(name, lambda: (spec, weights))

    async def delete_layer(self, name: str, deadline: float | None = None) -> None:
        """DELETE /layers/{name}."""
        await self.shelf.remove(name, deadline)
        self.statistics.pop(name, None)

    async def export_layer(self, name: str) -> list[Buffer]:
        """GET /layers/{name}/weights: safetensors that PUT takes back."""
        return await self._aside(write_layer_file, self.catalogue.find(name))

    def statistics_of(self, name: str) -> Statistics:
        """What has been counted of the calls to a layer that is held."""
        return self.statistics.setdefault(name, Statistics())

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._sampling is not None:
            self._sampling.cancel()
        self.shelf.close()
        self.scheduler.close()
        self.easel.close()
        self._threads.shutdown()

    def _parsed(self, asked: Asked, kinds: dict[str, Kind], shapes_alone: bool = False) -> dict[str, Any]:
        form, limits = asked.own or FORMS[asked.form], self.wire_limits
        return form.parse(unpack(asked.take_body(), asked.coding, limits.body_bytes), kinds, limits, shapes_alone)

    def _layer_read(self, asked: Asked, source: Source) -> tuple[LayerSpec, Mapping[str, Array] | None]:
        if asked.form == SAFETENSORS:
            return read_layer_file(unpack(asked.take_body(), asked.coding, self.wire_limits.layer_bytes), source)
        for name in ("layout", "prefix", "spec"):
            if getattr(source, name) is not None:
                raise InvalidRequest.where(f"/{name}", f"a body of type {SAFETENSORS} beside it", asked.form)
        document = validate(PutLayer, self._parsed(asked, PutLayer.tensors))
        return (document.spec, None) if document.weights is None else (given_weights(document.spec), document.weights)

    def _fitted(self, asked: Asked, document: type[AttendRequest] | None, shapes_alone: bool = False) -> tuple[AttendRequest, HeldLayer]:
        """The request as such a document, and its layer; without one, the document is told by whether there are metrics."""
        members = self._parsed(asked, (document or AnalysisRequest).tensors, shapes_alone)
        request = validate(document or (AnalysisRequest if "metrics" in members else AttendRequest), members)
        layer = self.catalogue.find(request.layer)
        fit(request, layer.spec)
        if isinstance(request, AnalysisRequest):
            analysis.fit(request, layer.spec)
        return request, layer

    def _bound(self, asked: Asked, document: type[AttendRequest] = AttendRequest) -> "Bound":
        request, layer = self._fitted(asked, document)
        predicted = predict(request, layer.spec)
        problems, in_parts = self._refusals(request, predicted)
        if problems:
            raise TooLarge(problems=problems)
        call = bind(request, layer.spec)
        call = analysis.ask(request, layer.spec, call) if isinstance(request, AnalysisRequest) else call
        return Bound(request, layer, call, predicted, in_parts)

    def _refusals(self, request: AttendRequest, predicted: cost.Cost) -> tuple[list[Problem], bool]:
        whole = isinstance(request, AnalysisRequest)  # metrics see all keys of a row at once
        return refusals(request, predicted, self.limits, 0 if self.shards is None or whole else self.shards.count)

    async def _computed(self, bound: Bound, asked: Asked) -> Outcome:
        """The call's outcome: of this process's device, or of all shards together."""
        if self.shards is None or not bound.in_parts:
            return await self.scheduler.submit(bound.layer, bound.call, bound.cost, asked.deadline, asked.gone)
        started, parts = self.clock(), cut(bound.call, self.shards.count)
        try:
            async with asyncio.timeout(None if asked.deadline is None else asked.deadline - started):
                results = await self.shards.compute(bound.layer, parts, share(bound.cost, len(parts)))
        except TimeoutError:
            raise DeadlinePassed("the deadline of X-Request-Timeout passed before there was an answer") from None
        result = await self._aside(join, bound.layer.attention, bound.call, results)
        return Outcome(result, 0.0, self.clock() - started, 1)

    def _sketched(self, asked: Asked) -> Sketch:
        request = validate(FigureRequest, self._parsed(asked, FigureRequest.tensors))
        layer = self.catalogue.find(request.layer)
        fit(request, layer.spec)
        return sketch(request, layer, asked.reply_form, self.limits)

    async def _aside(self, function: Callable[..., T], *args: Any) -> T:
        """Off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not tell."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _written(bound: Bound, result: Result, asked: Asked) -> list[Buffer]:
    """The reply's bytes. Raises InvalidRequest where the caller wanted an error for rows without keys or numbers that are not finite."""
    refuse_empty(bound, result)
    form = asked.own or FORMS[asked.reply_form]
    pieces = form.encode(reply_of(bound.request, bound.layer, result), bound.request.reply)
    return pack(pieces, asked.reply_coding) if asked.reply_coding else pieces


def refuse_empty(bound: Bound, result: Result) -> None:
    """Raises InvalidRequest where a row has no key and the caller wanted to be told so."""
    if bound.call.fully_masked == "error" and (first := result.first_empty()):
        raise masked_rows(first)


def predict(request: AttendRequest, spec: LayerSpec) -> cost.Cost:
    """The cost of a request that fits the layer."""
    if not isinstance(request, AnalysisRequest):
        return cost.predict(request, spec)
    plain = request.model_copy(update={"outputs": ["output"], "select": None})
    return analysis.predict(request, spec, cost.predict(plain, spec))


def _datatype(name: str, request: AttendRequest, spec: LayerSpec) -> str:
    kind = analysis.datatype_of(name, request, spec) if isinstance(request, AnalysisRequest) else None
    return kind or cost.wire_datatype(name, request.reply.datatype, spec)


def reply_of(request: AttendRequest, layer: HeldLayer, result: Result) -> Reply:
    """The result under the caller's names and in the caller's order, without the batch axis where the caller sent none."""
    if isinstance(request, AnalysisRequest):
        return analysis.reply_of(request, layer, result)
    arrays = {name: numpy_of(tensor if request.batched else tensor[0]) for name, tensor in result.tensors.items()}
    tensors: dict[str, Any] = {}
    for name in request.outputs:
        tensors[name] = {part: arrays[part] for part in ("keys", "values")} if name not in arrays else arrays[name]
    datatype = cost.wire_datatype("output", request.reply.datatype, layer.spec)
    return Reply({"name": layer.name, "fingerprint": layer.fingerprint}, result.fully_masked_rows, datatype, tensors)


def open_engine(
    device: str,
    wire_limits: WireLimits,
    limits: cost.ServingLimits,
    queue: QueueLimits | None = None,
    batch: BatchLimits | None = None,
    layers_dir: Path | None = None,
) -> Engine:
    """An engine without layers on a device of torch's naming; "auto" takes the first GPU, or the CPU where there is none.

    With `layers_dir` the layers that are put are kept there, and those that are there are held once it starts.
    """
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    metrics = Metrics()
    folder = None if layers_dir is None else LayerFolder(layers_dir, wire_limits.layer_bytes)
    return Engine(Catalogue(where, limits), Scheduler(where, metrics, queue, batch), metrics, wire_limits, limits, folder)
