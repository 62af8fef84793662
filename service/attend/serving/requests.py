"""A request of any protocol: what arrived, and how it ended. Independent of HTTP and gRPC, whose requests have more fields."""

from asyncio import CancelledError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attend.errors import CallerGone, DeadlinePassed
from attend.serving.byte_budget import Lease
from attend.serving.metrics import Phases
from attend.wire.codec import Codec
from attend.wire.compression import unpack, unpack_start
from attend.wire.negotiation import CODECS, JSON

TOO_LATE = "the caller's deadline (X-Request-Timeout, or the protocol's own) passed before there was an answer"
Cancelled = CancelledError  # is raised where a request waits when the time for answers is over (--shutdown-seconds)


def never() -> bool:
    """Whether the client has disconnected, where nothing says so."""
    return False


@dataclass(slots=True, eq=False)
class Request:
    """One request, from its arrival until it is logged and counted.

    A comment beside a field says what changes it once the body has been read.
    """

    body: bytes | list[bytes] = b""  # the body, or its pieces in the order of their arrival; `take_body` and `unpack`
    codec: Codec = CODECS[JSON]
    coding: str = ""  # Content-Encoding; "" once the body is decompressed; `unpack`
    reply_codec: Codec = CODECS[JSON]
    reply_coding: str = ""
    codec_parameters: Mapping[str, str] = field(default_factory=dict)  # from headers and path
    deadline: float | None = None  # on the engine's clock; `limit_seconds` may set an earlier one
    gone: Callable[[], bool] = never  # whether the client has disconnected
    caller: str = ""  # name of the API key, or address, of the sender
    api_key: str = ""  # name of the sender's, who owns sessions
    lease: Lease | None = None  # counts the bytes of the body, and then of the reply
    id: str = ""
    phases: Phases | None = None  # of a call that was answered; engine.py
    log_fields: Mapping[str, Any] = field(default_factory=dict)  # what the log line has of a call; engine.py
    reason: str = ""  # of a refusal or failure; the middleware that replies to errors
    detail: str = ""  # of the same

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
