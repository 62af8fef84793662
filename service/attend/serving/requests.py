"""The request as received, and the encoded reply. Independent of HTTP."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from attend.errors import CallerGone, DeadlinePassed
from attend.serving.byte_budget import Lease
from attend.serving.metrics import Phases
from attend.wire.codec import Buffer, Codec, Headers
from attend.wire.compression import unpack, unpack_start
from attend.wire.negotiation import CODECS, JSON

TOO_LATE = "the caller's deadline (X-Request-Timeout, or the protocol's own) passed before there was an answer"
NO_PARAMETERS: Mapping[str, str] = {}


@dataclass(slots=True)
class RawRequest:
    """A request body as received, the codecs of body and reply, and whether the caller still needs a reply.

    Three fields change after construction: `take_body` empties `body`, `unpack` replaces it and its `coding`, and `limit_seconds` may set
    an earlier `deadline`.
    """

    body: bytes | list[bytes]  # the body, or its pieces in the order of their arrival
    _: KW_ONLY
    codec: Codec = CODECS[JSON]
    coding: str = ""  # Content-Encoding; "" once the body is decompressed
    reply_codec: Codec = CODECS[JSON]
    reply_coding: str = ""
    parameters: Mapping[str, str] = field(default_factory=lambda: NO_PARAMETERS)  # the codec's parameters, from headers and path
    deadline: float | None = None  # on the engine's clock
    gone: Callable[[], bool] = lambda: False  # whether the client has disconnected
    caller: str = ""  # name of the API key, or address, of the sender
    api_key: str = ""  # name of the sender's, who owns sessions
    lease: Lease | None = None  # counts the bytes of the body, and then of the reply

    @property
    def size(self) -> int:
        """Bytes of the body: as received, and after `unpack` those of the decompressed one."""
        return len(self.body) if isinstance(self.body, bytes) else sum(map(len, self.body))

    def limit_seconds(self, seconds: float, now: float) -> None:
        """End the request `seconds` after `now`, unless it ends earlier."""
        self.deadline = now + seconds if self.deadline is None else min(self.deadline, now + seconds)

    def check_caller(self, now: float) -> None:
        """Raises CallerGone if the client has disconnected, DeadlinePassed if `now` is past the deadline."""
        if self.gone():
            raise CallerGone
        if self.deadline is not None and now > self.deadline:
            raise DeadlinePassed(TOO_LATE)

    def unpack(self, limit: int, most: int) -> bool:
        """Decompress the body, unless it unpacks to more than `most` bytes. Returns whether it is decompressed.

        Raises MalformedBody, UnsupportedMediaType, or TooLarge for more than `limit` bytes.
        """
        body = self.take_body()
        if most >= limit:
            self.body = unpack(body, self.coding, limit)
        elif len(start := unpack_start(body, self.coding, most + 1)) <= most:
            self.body = start
        else:
            self.body = body
            return False
        self.coding = ""
        return True

    def take_body(self) -> bytes:
        """Return the body and drop the reference to it, so that a large one does not stay in memory next to its decoded arrays.

        Called where the body is decoded: a large one is joined from its pieces there, not on the event loop.
        """
        body, self.body = self.body, b""
        return body if isinstance(body, bytes) else b"".join(body)


class EncodedReply(NamedTuple):
    """A reply: headers that describe its bytes, the bytes in pieces, the duration of each phase, and fields for the log."""

    headers: Headers
    pieces: list[Buffer]
    phases: Phases
    log_fields: Mapping[str, Any]
