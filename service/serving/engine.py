"""The request path, shared by all protocols:

    bytes --decode--> members --find--> layer --bind--> call --submit--> result --encode--> bytes

`Engine.answer` is that path. A call to a session waits for the earlier calls to that session before it is bound. Reading the body (decode
and bind) and writing the reply run on the event loop if there are few bytes, else in a thread of the codec pool. Independent of HTTP.
"""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from service.attention.call import Result
from service.errors import RequestError, SessionNotFound, TooLarge, WrongWorker
from service.serving.admission import Admission, ServingLimits
from service.serving.analysis import bind_analysis
from service.serving.binding import bind_attend
from service.serving.codec_pool import CodecPool
from service.serving.executor import Outcome
from service.serving.figures import FigureRenderer, bind_figure
from service.serving.layers.registry import LayerRegistry, LoadedLayer
from service.serving.metrics import Metrics, Phases
from service.serving.replies import compress, encode_reply
from service.serving.requests import BoundCall, EncodedReply, RawRequest
from service.serving.scheduler import Scheduler
from service.serving.sessions.registry import Session, SessionRegistry
from service.serving.sessions.steps import Bind, bind_step, bind_without_step
from service.serving.sessions.turns import require_this_worker, turn_of_call
from service.serving.shards import Shards, compute_in_shards
from service.serving.statistics import LayerStatistics
from service.serving.threads import usable_cores
from service.wire.codec import Decoded, Encoded
from service.wire.compression import unpack
from service.wire.limits import WireLimits
from service.wire.problems import validate
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest
from service.wire.schemas.figure import FigureRequest

T = TypeVar("T")
DEFAULT_LAYER: str = AttendRequest.model_fields["layer"].default
INLINE_BYTES = 64 * 1024  # bytes up to which decoding and encoding take well under a millisecond


class CallKind(NamedTuple):
    """What an endpoint computes: the model of its body, and the function that binds a decoded body to its layer."""

    document: type[AttendRequest]
    bind: Bind

    @property
    def takes_session(self) -> bool:
        """Whether the body may name a session in place of keys; otherwise the path does, and the call appends rows to it."""
        return "session" in self.document.model_fields


ATTEND = CallKind(AttendRequest, bind_attend)  # POST /attend, and infer of the Open Inference Protocol
ANALYSIS = CallKind(AnalysisRequest, bind_analysis)  # POST /attend/analysis
FIGURE = CallKind(FigureRequest, bind_figure)  # POST /attend/figure


class Engine:
    """Answers calls with the layers of one process."""

    def __init__(
        self,
        registry: LayerRegistry,
        scheduler: Scheduler,
        metrics: Metrics,
        statistics: LayerStatistics,
        wire_limits: WireLimits,
        limits: ServingLimits,
    ) -> None:
        self.registry, self.scheduler, self.metrics, self.statistics = registry, scheduler, metrics, statistics
        self.wire_limits, self.admission, self.clock = wire_limits, Admission(limits), scheduler.clock
        self.codecs = CodecPool(min(2, usable_cores()))  # more would contend for the interpreter's lock
        self.renderer = FigureRenderer(self.clock)
        self.shards: Shards | None = None
        self.sessions: SessionRegistry | None = None

    async def answer(self, raw: RawRequest, kind: CallKind) -> EncodedReply:
        """Decode, bind, compute and encode one call. Raises AttendError, whose paths point into the body that was sent."""
        started, size = self.clock(), raw.size  # decoding takes the body out of `raw`
        decoded, bound = await self.run_by_size(raw, size, self.decode_and_bind, raw, kind)
        if bound is not None:
            return await self.complete(raw, decoded, bound, started)
        async with turn_of_call(self.require_sessions(), raw, decoded) as session:
            bound = await self.run_by_size(raw, size, self.bind, raw, decoded, kind, session)
            return await self.complete(raw, decoded, bound, started)

    def decode_and_bind(self, raw: RawRequest, kind: CallKind) -> tuple[Decoded, BoundCall | None]:
        """Decode the body and bind the call to its layer. A call with a session is not bound yet: it has to wait for its turn."""
        decoded = self.decode(raw, kind.document)
        if raw.session or decoded.sequence is not None or (kind.takes_session and decoded.members.get("session") is not None):
            return decoded, None
        return decoded, self.bind(raw, decoded, kind)

    def decode(self, raw: RawRequest, document: type[AttendRequest], shapes_alone: bool = False) -> Decoded:
        """Decompress and decode the body; its members are not validated yet.

        Raises MalformedBody, InvalidRequest, TooLarge or UnsupportedMediaType; WrongWorker if another process has the session.
        """
        received = body = raw.take_body()
        if raw.coding:
            body = unpack(body, raw.coding, self.wire_limits.body_bytes)
        decoded = raw.codec.decode(body, raw.parameters, document.tensor_kinds, self.wire_limits, shapes_alone)
        if self.sessions is not None:
            try:
                require_this_worker(self.sessions, raw, decoded, document)
            except WrongWorker as error:
                raw.body, error.raw = received, raw  # to be forwarded
                raise
        return decoded

    def bind(self, raw: RawRequest, decoded: Decoded, kind: CallKind, session: Session | None = None) -> BoundCall:
        """Bind a call to its layer, or to the rows of its session. Raises RequestError with pointers into the body."""
        try:
            if session is None:
                bound = kind.bind(decoded, self.find(decoded.members, kind.document), self.admission)
            elif kind.takes_session:
                bound = bind_without_step(session, kind.bind, decoded, session.layer, self.admission)
            else:
                bound = bind_step(session, decoded, session.layer, self.admission)
            if raw.reply_codec.largest_reply is not None:
                _require_small_reply(bound, *raw.reply_codec.largest_reply)
        except RequestError as error:
            raise decoded.in_body(error) from None
        return bound

    def find(self, members: Mapping[str, Any], document: type[AttendRequest]) -> LoadedLayer:
        """The layer of the request. If there is none: InvalidRequest for an invalid request, else LayerNotFound or LayerUnloaded."""
        name = members.get("layer", DEFAULT_LAYER)
        layer = self.registry.get(name) if isinstance(name, str) else None
        return self.registry.find(validate(document, members).layer) if layer is None else layer

    async def complete(self, raw: RawRequest, decoded: Decoded, bound: BoundCall, started: float) -> EncodedReply:
        """Compute a bound call that arrived at `started`, encode its result, and count it."""
        bound_at, cost, layer = self.clock(), bound.cost, bound.layer.name
        if decoded.timeout is not None:
            raw.limit_seconds(decoded.timeout, started)
        try:
            self._reserve(raw, bound)
            outcome = await self.submit(bound, raw)
            computed_at = self.clock()
            if bound.figure is None and cost.reply_bytes <= INLINE_BYTES:
                encoded = encode_reply(bound, outcome.result, decoded, raw)
            else:
                encoded = await self._encode_in_thread(bound, outcome.result, decoded, raw)
        except BaseException as error:  # including CancelledError when the caller disconnects
            self.statistics.count_failed(layer, self.clock() - started)
            if isinstance(error, RequestError):
                raise decoded.in_body(error) from None
            raise
        phases = Phases(bound_at - started, outcome.queue, outcome.compute, self.clock() - computed_at)
        self.metrics.count_call(phases)
        if bound.session is not None:
            self.metrics.count_step()
        self.statistics.count_answered(layer, phases, bound.call.query.shape[0], outcome.execution, cost.operations)
        log_fields = bound.log_fields if bound.figure is not None else {**bound.log_fields, "batch": outcome.batch}
        return EncodedReply(encoded.headers, encoded.pieces, phases, log_fields)

    def _reserve(self, raw: RawRequest, bound: BoundCall) -> None:
        """Reserve the memory of the reply, and of the rows that a session gets. Raises Overloaded or OutOfMemory."""
        if raw.lease is not None and bound.figure is None:
            raw.lease.add(bound.cost.reply_bytes if raw.reply_codec.writes_text else bound.cost.tensor_bytes)
        if bound.session is not None and self.sessions is not None:
            self.sessions.reserve(bound.session.cache, bound.call.masks.num_keys)

    def submit(self, bound: BoundCall, raw: RawRequest) -> Coroutine[Any, Any, Outcome]:
        """Compute a bound call on this process's device, or in parts on the shards."""
        if self.shards is not None and bound.in_parts:
            return compute_in_shards(self.shards, bound, raw.deadline, self.clock, self.codecs)
        return self.scheduler.submit(bound.layer, bound.call, bound.cost, raw.deadline, raw.gone, raw.caller, bound.operation)

    async def _encode_in_thread(self, bound: BoundCall, result: Result, decoded: Decoded, raw: RawRequest) -> Encoded:
        """A large reply, or a picture."""
        if bound.figure is None:
            return await self.run(raw, bound.cost.reply_bytes, encode_reply, bound, result, decoded, raw)
        encoded = await self.renderer.reply(bound, result, raw)
        if not raw.reply_coding or bound.figure.format == "png":  # PNG is compressed already
            return encoded
        return await self.run(raw, sum(map(len, encoded.pieces)), compress, encoded, raw.reply_coding)

    async def run_by_size(self, raw: RawRequest, size: int, function: Callable[..., T], *args: Any) -> T:
        """Run a function that reads a body of `size` bytes: on the event loop if it is small, else in a thread of the codec pool."""
        if size <= INLINE_BYTES and not raw.coding:
            return function(*args)
        return await self.run(raw, size, function, *args)

    async def run(self, raw: RawRequest, size: int, function: Callable[..., T], *args: Any) -> T:
        """Run a function that reads or writes `size` bytes in a thread of the codec pool, and return its result.

        Raises CallerGone or DeadlinePassed, without running it, if the caller has disconnected or its deadline has passed when a thread is
        free.
        """
        return await self.codecs.run(partial(self.check_and_run, raw, function, *args), size, raw.caller)

    def check_and_run(self, raw: RawRequest, function: Callable[..., T], *args: Any) -> T:
        """Run the function. Raises CallerGone or DeadlinePassed instead if its result is no longer needed."""
        raw.check_caller(self.clock())
        return function(*args)

    def use_shards(self, shards: Shards) -> None:
        """Let other processes compute parts of the calls that are too large for this one."""
        self.shards, self.admission = shards, Admission(self.admission.limits, shards.count)

    def require_sessions(self) -> SessionRegistry:
        """The sessions. Raises SessionNotFound if this server keeps none."""
        if self.sessions is None:
            raise SessionNotFound("this server keeps no sessions; `attend serve --session-memory BYTES` does")
        return self.sessions

    def close(self) -> None:
        if self.sessions is not None:
            self.sessions.close()
        self.renderer.close()
        self.codecs.close()


def _require_small_reply(bound: BoundCall, setting: str, largest: int) -> None:
    """Raises TooLarge if the reply's tensors have more than `largest` bytes."""
    if (size := bound.cost.tensor_bytes) > largest:
        raise TooLarge.where("", f"a reply of at most {largest} bytes ({setting}); ask for fewer outputs, or over HTTP", str(size))
