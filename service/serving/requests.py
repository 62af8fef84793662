"""Value types of the request path: the raw request, the bound call and the encoded reply. Independent of HTTP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.attention.call import Call
from service.attention.figures import FigureSpec
from service.attention.operations import Operation
from service.errors import CallerGone, DeadlinePassed
from service.serving.byte_budget import Lease
from service.serving.cost import Cost
from service.serving.layers.registry import LoadedLayer
from service.serving.metrics import Phases
from service.serving.sessions.registry import Session
from service.wire.codec import Buffer, Codec, Headers
from service.wire.negotiation import CODECS, JSON
from service.wire.schemas.attend import AttendRequest

TOO_LATE = "the caller's deadline (X-Request-Timeout, or the protocol's own) passed before there was an answer"
ESTIMATED_COMPRESSION_RATIO = 10  # estimated bytes of an unpacked body for each byte of a compressed one
NO_PARAMETERS: Mapping[str, str] = {}


@dataclass(slots=True)
class RawRequest:
    """A request body as received, the codecs of body and reply, and whether the caller still needs a reply.

    Three fields change after construction: `take_body` empties `body`, `limit_seconds` may set an earlier `deadline`, and a route may set
    `session`.
    """

    body: bytes
    codec: Codec = CODECS[JSON]
    coding: str = ""  # Content-Encoding
    reply_codec: Codec = CODECS[JSON]
    reply_coding: str = ""
    parameters: Mapping[str, str] = field(default_factory=lambda: NO_PARAMETERS)  # the codec's parameters, from headers and path
    deadline: float | None = None  # on the engine's clock
    gone: Callable[[], bool] = lambda: False  # whether the client has disconnected
    caller: str = ""  # name of the API key, or address, of the sender
    key: str = ""  # name of the API key, the owner of sessions
    session: str = ""  # id of the session that the path names
    lease: Lease | None = None  # counts the bytes of the body, and then of the reply

    @property
    def size(self) -> int:
        """Bytes of the decompressed body; estimated for a compressed one."""
        return len(self.body) * (ESTIMATED_COMPRESSION_RATIO if self.coding else 1)

    def limit_seconds(self, seconds: float, now: float) -> None:
        """End the request `seconds` after `now`, unless it ends earlier."""
        self.deadline = now + seconds if self.deadline is None else min(self.deadline, now + seconds)

    def check_caller(self, now: float) -> None:
        """Raises CallerGone if the client has disconnected, DeadlinePassed if `now` is past the deadline."""
        if self.gone():
            raise CallerGone
        if self.deadline is not None and now > self.deadline:
            raise DeadlinePassed(TOO_LATE)

    def take_body(self) -> bytes:
        """Return the body and drop the reference to it, so that a large one does not stay in memory next to its decoded arrays."""
        body, self.body = self.body, b""
        return body


class BoundCall(NamedTuple):
    """A validated request and its layer: shapes fit, the cost is admitted, arrays are cast to the layer's dtype."""

    request: AttendRequest
    layer: LoadedLayer
    call: Call
    cost: Cost
    log_fields: Mapping[str, Any]  # of the request's log line
    in_parts: bool = False  # too large for one process: cut along its keys and computed by the shards
    operation: Operation | None = None  # runs in place of the layer's forward pass
    figure: FigureSpec | None = None  # the picture that the result becomes
    session: Session | None = None  # to which the call appends rows


class EncodedReply(NamedTuple):
    """A reply: headers that describe its bytes, the bytes in pieces, the duration of each phase, and fields for the log."""

    headers: Headers
    pieces: list[Buffer]
    phases: Phases
    log_fields: Mapping[str, Any]
