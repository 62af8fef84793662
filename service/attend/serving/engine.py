"""The request path, shared by all protocols:

    bytes --decode--> members --find--> layer --prepare--> call --submit--> result --encode--> bytes

`Engine.answer` is that path. A `RequestType` (`request_type.py`) says what an endpoint computes: how its request is prepared, and how its
result is encoded. A call to a session waits for the earlier calls to that session before it is prepared. Reading the body (decode and
prepare) and writing the reply run on the event loop if there are few bytes, else in a thread of the codec pool. Independent of HTTP.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from attend.errors import InvalidRequest, RequestError, SessionNotFound, TooLarge
from attend.limits import ServingLimits, WireLimits
from attend.serving import codec_pool
from attend.serving.admission import Admission
from attend.serving.batching import batch_key
from attend.serving.codec_pool import INLINE_BYTES, CodecPool
from attend.serving.figures import FigureRenderer
from attend.serving.layers.registry import LayerRegistry, LoadedLayer
from attend.serving.metrics import Metrics, Phases
from attend.serving.prepared import Prepared
from attend.serving.request_type import RequestType, refuse_fully_masked
from attend.serving.requests import Request
from attend.serving.scheduler import Scheduler
from attend.serving.sessions.locks import lock_for_call
from attend.serving.sessions.registry import SessionRegistry
from attend.serving.sessions.rows import session_in_body
from attend.serving.sessions.session import Session
from attend.serving.sessions.steps import STEP, compute_step
from attend.serving.shards import Shards
from attend.serving.statistics import LayerStatistics
from attend.serving.threads import usable_cores
from attend.wire.codec import Decoded, Encoded
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest

T = TypeVar("T")
DEFAULT_LAYER: str = AttendRequest.model_fields["layer"].default


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
        self.sessions: SessionRegistry | None = None  # web/app.py, with `session_memory`

    async def answer(self, request: Request, request_type: RequestType[Any], session_id: str = "") -> Encoded:
        """Decode, prepare, compute and encode one request; its phases and log fields are written into the request.

        `session_id`: the session that its path names.

        Raises AttendError, whose paths point into the body that was sent.
        """
        started = self.clock()
        if request.coding:
            await self.unpack(request, self.wire_limits.max_body_bytes)
        size = request.size  # decoding takes the body out of the request
        if size <= INLINE_BYTES:
            decoded, prepared = self.decode_and_prepare(request, request_type, session_id)
        else:
            decoded, prepared = await self.run(request, size, self.decode_and_prepare, request, request_type, session_id)
        try:
            if prepared is not None:
                return await self.complete(request, decoded, request_type, prepared, started)
            if decoded.sequence is not None:
                request_type = STEP
            asked = self.clock()
            async with lock_for_call(self.require_sessions(), session_id, decoded, request) as session:
                waited = self.clock() - asked
                prepared = await self.run_by_size(request, size, self.prepare, request, decoded, request_type, session)
                return await self.complete(request, decoded, request_type, prepared, started, waited)
        except RequestError as error:
            raise error.translated(decoded.translate) from None

    def decode_and_prepare(self, request: Request, request_type: RequestType[Any], session_id: str = "") -> tuple[Decoded, Prepared | None]:
        """Decode the body and prepare the request. One of a session is None yet: it waits for the earlier ones.

        Raises AttendError, whose paths point into the body.
        """
        decoded = request.codec.decode(request.take_body(), request.codec_parameters, request_type.schema.tensor_kinds, self.wire_limits)
        try:
            in_body = session_in_body(decoded.members) if request_type.session_in_body else None
            if decoded.sequence is None and not session_id and in_body is None:
                return decoded, self.prepare(request, decoded, request_type)
            if decoded.sequence is not None and self.sessions is None:
                expected = "no sequence, since this server keeps none; `attend serve --session-memory BYTES` does"
                raise InvalidRequest.where("/sequence", expected, decoded.sequence.id)
            return decoded, None
        except RequestError as error:
            raise error.translated(decoded.translate) from None

    def prepare(self, request: Request, decoded: Decoded, request_type: RequestType[Any], session: Session | None = None) -> Prepared:
        """The request, prepared for its layer or for its session. Raises RequestError."""
        if session is None:
            prepared = request_type.prepare(decoded, self.find(decoded.members, request_type.schema), self.admission)
        else:
            prepared = request_type.prepare_for_session(session, decoded, self.admission)
        if prepared.cost.word_bytes > request.reply_codec.largest_text:
            expected = f"at most {request.reply_codec.largest_text} bytes of words in a safetensors reply; ask for fewer links, or for JSON"
            raise TooLarge.where("", expected, f"up to {prepared.cost.word_bytes}")
        if request.reply_codec.largest_reply is not None:
            setting, largest = request.reply_codec.largest_reply
            if (tensor_bytes := prepared.cost.tensor_bytes) > largest:
                expected = f"a reply of at most {largest} bytes ({setting}); ask for fewer outputs, or over HTTP"
                raise TooLarge.where("", expected, str(tensor_bytes))
        shares_batches = (prepared.operation.largest_batch or self.scheduler.batch_limits.calls) > 1
        if shares_batches and not self.scheduler.computes_inline(prepared):
            return prepared._replace(batch_key=batch_key(prepared.layer, prepared.call, prepared.operation))
        return prepared

    def find(self, members: Mapping[str, Any], schema: type[AttendRequest]) -> LoadedLayer:
        """The layer of the request. If there is none: InvalidRequest for an invalid request, else LayerNotFound or LayerUnloaded."""
        name = members.get("layer", DEFAULT_LAYER)
        layer = self.registry.get(name) if isinstance(name, str) else None
        return self.registry.find(validate(schema, members).layer, at="/layer") if layer is None else layer

    async def complete(
        self, request: Request, decoded: Decoded, request_type: RequestType[Any], prepared: Prepared, started: float, waited: float = 0.0
    ) -> Encoded:
        """Compute a prepared request that arrived at `started` and has `waited` for earlier calls, encode its result, and count it."""
        prepared_at, cost, layer = self.clock(), prepared.cost, prepared.layer.name
        if decoded.timeout is not None:
            request.limit_seconds(decoded.timeout, started)
        try:
            self._reserve(request, decoded, prepared)
            if prepared.session is None:
                outcome = await self.scheduler.submit(prepared, request)
            else:
                outcome = await compute_step(self.scheduler, self.require_sessions(), prepared.session, prepared, request)
            computed_at = self.clock()
            if request_type.draws:
                refuse_fully_masked(prepared, outcome.result)  # before it waits for other pictures
                reply = await self.renderer.draw(partial(request_type.encode, prepared, outcome.result, decoded, request), request)
            elif cost.reply_bytes <= INLINE_BYTES:
                reply = request_type.encode(prepared, outcome.result, decoded, request)
            else:
                reply = await self.run(request, cost.reply_bytes, request_type.encode, prepared, outcome.result, decoded, request)
        except BaseException:  # including CancelledError when the caller disconnects
            self.statistics.count_failed(layer, self.clock() - started)
            raise
        phases = Phases(prepared_at - started - waited, outcome.queue + waited, outcome.compute, self.clock() - computed_at)
        self.metrics.count_call(*phases)
        self.statistics.count_answered(layer, phases, prepared.call.options.items, cost.operations, outcome)
        request.phases, request.log_fields = phases, {**prepared.log_fields, "batch": outcome.batch}
        return reply

    def _reserve(self, request: Request, decoded: Decoded, prepared: Prepared) -> None:
        """Reserve the memory of a large request's arrays and of the reply. Raises Overloaded.

        The text `0,` becomes a number of 8 bytes as decoded and one of 4 or 8 in the layer's dtype.
        """
        if (lease := request.lease) is not None:
            if lease.held > INLINE_BYTES:
                lease.add(max(0, bytes_in_memory(decoded.members.values(), prepared.call.tensors()) - lease.held))
            reply = prepared.cost.reply_bytes if request.reply_codec.writes_text else prepared.cost.tensor_bytes + prepared.cost.word_bytes
            lease.resize(lease.held + reply, bounded=True)

    async def unpack(self, request: Request, limit: int) -> None:
        """Decompress the body of a request, if it is compressed, to at most `limit` bytes, which its lease counts from then on.

        Few bytes may unpack to many. So the threads for small bodies stop at the size of a large one, and the thread for large bodies
        begins anew. Raises what `Request.unpack` and `run` raise, and Overloaded.
        """
        if not request.coding:
            return
        received, large = request.size, codec_pool.LARGE_BYTES
        if received >= large or not await self.run(request, received, request.unpack, limit, large - 1):
            await self.run(request, max(received, large), request.unpack, limit, limit)
        if request.lease is not None:
            request.lease.add(max(0, request.size - received))

    async def run_by_size(self, request: Request, size: int, function: Callable[..., T], *args: Any) -> T:
        """Run a function that reads a body of `size` bytes: on the event loop if it is small, else in a thread of the codec pool."""
        if size <= INLINE_BYTES:
            return function(*args)
        return await self.run(request, size, function, *args)

    async def run(self, request: Request, size: int, function: Callable[..., T], *args: Any) -> T:
        """Run a function that reads or writes `size` bytes in a thread of the codec pool, and return its result.

        Raises CallerGone or DeadlinePassed, without running it, if the caller has disconnected or its deadline has passed when a thread is
        free.
        """
        return await self.codecs.run(partial(self.check_and_run, request, function, *args), size, request.caller)

    def check_and_run(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Run the function. Raises CallerGone or DeadlinePassed instead if its result is no longer needed."""
        request.check_caller(self.clock())
        return function(*args)

    def use_shards(self, shards: Shards) -> None:
        """Let other processes compute parts of the calls that are too large for this one."""
        self.scheduler.shards = shards
        self.admission = Admission(self.admission.limits, shards.count)

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


def bytes_in_memory(values: Iterable[Any], tensors: Iterable[Tensor]) -> int:
    """Bytes of the arrays among the values, and of the tensors; memory that several share counts once."""
    arrays = (value for value in values if isinstance(value, np.ndarray))
    sizes = {array.__array_interface__["data"][0]: array.nbytes for array in arrays if array.size}
    sizes |= {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(sizes.values())
