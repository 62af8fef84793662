"""The values that travel along the path of a request: what came, the call that it became, and the reply's bytes. Knows no HTTP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.attention.call import Call
from service.attention.figures import FigureSpec
from service.attention.layer import Operation
from service.errors import CallerGone, DeadlinePassed
from service.serving.admission import Lease
from service.serving.cost import Cost
from service.serving.layers.registry import HeldLayer
from service.serving.metrics import Phases
from service.wire.codec import CODECS, Codec, Headers
from service.wire.negotiation import JSON
from service.wire.reply import Buffer
from service.wire.schemas.attend import AttendRequest

TOO_LATE = "the caller's deadline (X-Request-Timeout, or the protocol's own) passed before there was an answer"
PACKED = 10  # estimated bytes of an unpacked body for each byte of a compressed one
NO_PARAMETERS: Mapping[str, str] = {}


class Waiting(NamedTuple):
    """Until when a caller waits for its reply, on the engine's clock, and whether it has gone."""

    deadline: float | None
    gone: Callable[[], bool]

    def demand(self, now: float) -> None:
        """Raises CallerGone or DeadlinePassed where nobody waits for the reply any more."""
        if self.gone():
            raise CallerGone
        if self.deadline is not None and now > self.deadline:
            raise DeadlinePassed(TOO_LATE)


@dataclass(slots=True)
class RawRequest:
    """A request's bytes as they came, the codecs of its body and its reply, and how long its caller waits.

    Of its fields `body` alone changes: `take_body` empties it.
    """

    body: bytes
    codec: Codec = CODECS[JSON]
    coding: str = ""  # Content-Encoding
    reply_codec: Codec = CODECS[JSON]
    reply_coding: str = ""
    parameters: Mapping[str, str] = field(default_factory=lambda: NO_PARAMETERS)  # what headers and path say to the codec
    deadline: float | None = None
    gone: Callable[[], bool] = lambda: False
    caller: str = ""  # name of the API key, or the address, that this request came from
    lease: Lease | None = None  # the budget of bytes that the body, and then the reply, are counted in

    @property
    def size(self) -> int:
        """Bytes of the unpacked body, estimated for a compressed one."""
        return len(self.body) * (PACKED if self.coding else 1)

    @property
    def waiting(self) -> Waiting:
        """How long the caller waits, as far as the headers say."""
        return Waiting(self.deadline, self.gone)

    def take_body(self) -> bytes:
        """The body. It is not kept here: a large one would stay in memory beside its arrays."""
        body, self.body = self.body, b""
        return body


class BoundCall(NamedTuple):
    """A validated request and its layer: shapes fit, the cost is admitted, arrays are cast to the layer's dtype."""

    request: AttendRequest
    layer: HeldLayer
    call: Call
    cost: Cost
    in_parts: bool = False  # too large for this process: computed in shards of its keys
    operation: Operation | None = None  # runs in place of the layer's forward pass
    figure: FigureSpec | None = None  # the picture that the result becomes


class EncodedReply(NamedTuple):
    """A reply: headers that describe its bytes, the bytes in pieces, how long each phase took, and what the log says of the call."""

    headers: Headers
    pieces: list[Buffer]
    phases: Phases
    about: dict[str, Any]
