"""Everything that can be refused or go wrong, as one tree. Floor 1: knows no HTTP; `web/errors.py` maps classes to statuses.

    AttendError
    ├── RequestError              the caller can correct it
    │   ├── MalformedRequest      its headers are none that HTTP allows
    │   ├── MalformedBody         the bytes are no JSON or safetensors, or a key stands twice
    │   ├── InvalidRequest        well-formed, but it breaks the contract or does not fit the layer
    │   ├── Unauthenticated       no key, or one that nobody has
    │   ├── Forbidden             this server does not allow it to this caller
    │   ├── LayerNotFound
    │   ├── LayerConflict         the layers cannot be changed that way here
    │   │   └── LayerUnloaded     the layer is kept, and answers no calls until it is loaded
    │   ├── TooLarge              in bytes, depth, parameters, or predicted memory
    │   ├── UnsupportedMediaType  of the body
    │   └── NotAcceptable         of the reply
    ├── CapacityError             the same call may succeed later
    │   ├── NotReady
    │   ├── Overloaded            the queue is full; `retry_after` seconds may help
    │   ├── DeadlinePassed        the caller's own deadline came before the answer
    │   ├── OutOfMemory           it passed admission, and the memory was not there
    │   └── StorageFull           the disk has no room for the layer
    ├── CallerGone                the caller hung up; counted, and nobody is left to answer
    ├── ServiceFault              ours to mend; the caller learns an id, the log the cause
    ├── Unreachable               only a client raises it: nothing answers there, or the connection broke
    │   ├── TimedOut              the answer did not come in time
    │   └── Untrusted             the certificate that was shown is of no authority that the client believes in
    └── BadReply                  only a client raises it: an answer came, and it is none that this service gives

Every refusal carries `Problem`s: where (a JSON pointer), what was expected, what came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `at` is a JSON pointer (RFC 6901) into the request, "" for the whole of it."""

    at: str
    expected: str
    got: str

    def __str__(self) -> str:
        place = f", at {self.at}" if self.at else ""
        return f"expected {self.expected}, got {self.got}{place}"


class AttendError(Exception):
    """Root of the tree. `title` names the class for people; `problems` may be empty where no place is to blame."""

    title = "error"

    def __init__(self, detail: str = "", problems: Sequence[Problem] = ()) -> None:
        self.problems = tuple(problems)
        self.detail = detail or "; ".join(map(str, self.problems)) or self.title
        super().__init__(self.detail)

    @classmethod
    def where(cls, at: str, expected: str, got: str) -> Self:
        """The error with exactly one problem, which is also its detail."""
        return cls(problems=[Problem(at, expected, got)])


class RequestError(AttendError):
    title = "the request cannot be served"


class MalformedRequest(RequestError):
    title = "malformed request"


class MalformedBody(RequestError):
    title = "malformed body"


class InvalidRequest(RequestError):
    title = "invalid request"


class Unauthenticated(RequestError):
    title = "unauthenticated"


class Forbidden(RequestError):
    title = "forbidden"


class LayerNotFound(RequestError):
    title = "no such layer"


class LayerConflict(RequestError):
    title = "layer conflict"


class LayerUnloaded(LayerConflict):
    title = "layer unloaded"


class TooLarge(RequestError):
    title = "too large"


class UnsupportedMediaType(RequestError):
    title = "unsupported media type"


class NotAcceptable(RequestError):
    title = "not acceptable"


class CapacityError(AttendError):
    title = "no capacity at present"


class NotReady(CapacityError):
    title = "not ready"


class Overloaded(CapacityError):
    title = "overloaded"

    def __init__(self, retry_after: int, detail: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(detail, problems)
        self.retry_after = retry_after


class DeadlinePassed(CapacityError):
    title = "deadline passed"


class OutOfMemory(CapacityError):
    title = "out of memory"


class StorageFull(CapacityError):
    title = "storage full"


class CallerGone(AttendError):
    title = "the caller has gone"


class ServiceFault(AttendError):
    title = "internal error"


class Unreachable(AttendError):
    title = "no answer"


class TimedOut(Unreachable):
    title = "timed out"


class Untrusted(Unreachable):
    title = "certificate not trusted"


class BadReply(AttendError):
    title = "reply not understood"
