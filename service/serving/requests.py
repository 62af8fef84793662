"""What the engine is asked, and what it answers: bytes and what belongs to them. Knows no HTTP."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from service.errors import CallerGone, DeadlinePassed
from service.serving.admission import Lease
from service.serving.metrics import Phases
from service.wire.codec import Codec
from service.wire.negotiation import JSON
from service.wire.reply import Buffer

TOO_LATE = "the caller's deadline (X-Request-Timeout, or the protocol's own) passed before there was an answer"


@dataclass(slots=True)
class RawRequest:
    """What came over the wire: bytes, what form they have, what form the reply shall have, and how long the caller waits."""

    body: bytes
    form: str = JSON
    coding: str = ""
    reply_form: str = JSON
    reply_coding: str = ""
    deadline: float | None = None
    gone: Callable[[], bool] = lambda: False
    caller: str = ""  # name of the API key, or the address, that this request came from
    lease: Lease | None = None  # which the reply is counted in, beside the body
    own: Codec | None = None  # of a protocol whose replies depend on more of the request than its form; it stands for both names then

    def take_body(self) -> bytes:
        """The body, which is not kept: a large one would stay in memory beside the arrays made of it."""
        body, self.body = self.body, b""
        return body

    def reserve(self, size: int) -> None:
        """Takes so many bytes for the reply. Raises Overloaded where there is no room for them."""
        if self.lease is not None:
            self.lease.add(size)

    def demand_waiting(self, now: float) -> None:
        """Raises CallerGone or DeadlinePassed where nobody waits for the answer any more."""
        if self.gone():
            raise CallerGone
        if self.deadline is not None and now > self.deadline:
            raise DeadlinePassed(TOO_LATE)


@dataclass(slots=True)
class EncodedReply:
    """A reply's bytes in pieces, how long each phase took, and what the log says of the call."""

    pieces: list[Buffer]
    phases: Phases
    about: dict[str, Any] = field(default_factory=dict)
    media_type: str = ""  # where it is not the form that was asked for
