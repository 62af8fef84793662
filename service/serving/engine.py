"""The path of a request, readable from top to bottom:

    bytes --decode--> request --bind--> call --submit--> result --reply--> reply --encode--> bytes

Small bodies are decoded and encoded where they are; large ones leave the event loop. Knows no HTTP.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
import torch

from service.attention.call import Result
from service.serving import cost
from service.serving.bind import bind, fit, masked_rows
from service.serving.catalogue import Catalogue, HeldLayer, numpy_of
from service.serving.metrics import Metrics, Phases
from service.serving.scheduler import Scheduler
from service.spec import LayerSpec
from service.tensors import DATATYPES
from service.wire.documents import AttendRequest, LayerReference, Plan, PlannedTensor, PutLayer, Refusal
from service.wire.json_form import parse
from service.wire.limits import WireLimits
from service.wire.refusals import validate
from service.wire.reply import Reply, encode_json

T = TypeVar("T")
log = structlog.get_logger("attend")
ON_THE_LOOP = 64 * 1024  # bytes up to which decoding and encoding take well under a millisecond


@dataclass(slots=True)
class Answer:
    """A reply's bytes, how long each phase took, and what the log says of the call."""

    body: bytes
    phases: Phases
    about: dict[str, Any] = field(default_factory=dict)


class Engine:
    """Everything between bytes and bytes, for one process."""

    def __init__(
        self, catalogue: Catalogue, scheduler: Scheduler, metrics: Metrics, wire_limits: WireLimits, limits: cost.ServingLimits
    ) -> None:
        self.catalogue, self.scheduler, self.metrics = catalogue, scheduler, metrics
        self.wire_limits, self.limits = wire_limits, limits
        self.ready = self.started = False
        self._starting: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="codec")

    @property
    def threads(self) -> int:
        """Threads that arithmetic may use."""
        return torch.get_num_threads()

    @property
    def device(self) -> str:
        return str(self.catalogue.device)

    def begin(self, specs: dict[str, LayerSpec]) -> None:
        """Starts in the background, on the running loop."""
        self._starting = asyncio.get_running_loop().create_task(self._start_or_tell(specs))

    async def _start_or_tell(self, specs: dict[str, LayerSpec]) -> None:
        try:
            await self.start(specs)
        except Exception as error:
            log.error("not ready", error=str(error))
        else:
            log.info("ready", layers=[layer.name for layer in self.catalogue.all()], device=self.device, threads=self.threads)

    async def start(self, specs: dict[str, LayerSpec]) -> None:
        """Makes and warms the configured layers; ready afterwards."""
        for name, spec in specs.items():
            self.catalogue.admit(name, spec)
            self.catalogue.put(await self._aside(self.catalogue.make, name, spec))
        self.metrics.layers.set(len(self.catalogue))
        for layer in self.catalogue.all():
            await self._warm(layer)
        self.ready = self.started = True

    async def attend(self, body: bytes) -> Answer:
        """POST /attend."""
        started = time.monotonic()
        large = len(body) > ON_THE_LOOP
        request, layer, call = await self._aside(self._bound, body) if large else self._bound(body)
        phases = Phases(decode=time.monotonic() - started)
        outcome = await self.scheduler.submit(layer, call)
        phases.queue, phases.compute = outcome.queue, outcome.compute
        started = time.monotonic()
        if outcome.result.first_masked:
            raise masked_rows(outcome.result.first_masked)
        reply = reply_of(request, layer, outcome.result)
        large = sum(tensor.numel() for tensor in outcome.result.tensors.values()) * 12 > ON_THE_LOOP
        encoded = await self._aside(encode_json, reply, request.reply) if large else encode_json(reply, request.reply)
        phases.encode = time.monotonic() - started
        self.metrics.computed(phases)
        about = {"layer": layer.name, "query": request.query.shape, "keys": call.masks.num_keys, "outputs": request.outputs}
        return Answer(encoded, phases, about)

    async def plan(self, body: bytes) -> Plan:
        """POST /attend/plan: the same request, up to the point where arrays would be made."""
        request, layer = await self._aside(self._fitted, body)
        predicted = cost.predict(request, layer.spec)
        problems = cost.admit(predicted, self.limits)
        outputs = {}
        for name, shape in predicted.outputs.items():
            datatype = cost.wire_datatype(name, request, layer.spec)
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

    async def put_layer(self, name: str, body: bytes) -> tuple[HeldLayer, bool]:
        """PUT /layers/{name}: the layer, and whether the name is new. It serves when this returns."""
        document = validate(PutLayer, await self._aside(parse, body, PutLayer.tensors, self.wire_limits))
        self.catalogue.admit(name, document.spec)
        layer = await self._aside(self.catalogue.make, name, document.spec, document.weights)
        self.catalogue.admit(name, document.spec)  # others may have come meanwhile
        await self._warm(layer)
        new = self.catalogue.put(layer)
        self.metrics.layers.set(len(self.catalogue))
        return layer, new

    def delete_layer(self, name: str) -> None:
        """DELETE /layers/{name}."""
        self.catalogue.remove(name)
        self.metrics.layers.set(len(self.catalogue))

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self.scheduler.close()
        self._threads.shutdown()

    def _fitted(self, body: bytes) -> tuple[AttendRequest, HeldLayer]:
        request = validate(AttendRequest, parse(body, AttendRequest.tensors, self.wire_limits))
        layer = self.catalogue.find(request.layer)
        fit(request, layer.spec)
        return request, layer

    def _bound(self, body: bytes) -> tuple[AttendRequest, HeldLayer, Any]:
        request, layer = self._fitted(body)
        cost.check(cost.predict(request, layer.spec), self.limits)
        return request, layer, bind(request, layer.spec)

    async def _aside(self, function: Callable[..., T], *args: Any) -> T:
        """Off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def _warm(self, layer: HeldLayer) -> None:
        """One tiny call, so that the first caller does not pay for torch's first times."""
        spec = layer.spec
        zeros = {"query": spec.d_model, "key": spec.key_dim, "value": spec.value_dim}
        request = AttendRequest(layer=layer.name, **{name: [[[0.0] * width]] for name, width in zeros.items()})  # type: ignore[arg-type]
        await self.scheduler.submit(layer, bind(request, spec))


def reply_of(request: AttendRequest, layer: HeldLayer, result: Result) -> Reply:
    """The result under the caller's names and in the caller's order, without the batch axis where the caller sent none."""
    arrays = {name: numpy_of(tensor if request.batched else tensor[0]) for name, tensor in result.tensors.items()}
    tensors: dict[str, Any] = {}
    for name in request.outputs:
        tensors[name] = {part: arrays[part] for part in ("keys", "values")} if name not in arrays else arrays[name]
    datatype = cost.wire_datatype("output", request, layer.spec)
    return Reply({"name": layer.name, "fingerprint": layer.fingerprint}, result.fully_masked_rows, datatype, tensors)


def open_engine(device: str, wire_limits: WireLimits, limits: cost.ServingLimits) -> Engine:
    """An engine without layers on a device of torch's naming; "auto" takes the first GPU, or the CPU where there is none."""
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    return Engine(Catalogue(where, limits), Scheduler(where), Metrics(), wire_limits, limits)
