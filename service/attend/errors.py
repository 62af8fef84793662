"""All exceptions, as one tree. Tier 1. `web/errors.py` maps the classes to these HTTP statuses, and to gRPC codes.

    AttendError                   500
    ├── RequestError              422  the caller can correct it
    │   ├── MalformedRequest      400  the headers are not valid HTTP
    │   ├── MalformedBody         400  the body is not JSON, safetensors or gzip, or has a key twice
    │   ├── InvalidRequest        422  well-formed, but against the contract, or not for this layer
    │   ├── Unauthenticated       401  no API key, or an unknown one
    │   ├── Forbidden             403  this caller may not do it on this server
    │   ├── LayerNotFound         404
    │   ├── LayerConflict         409  this server cannot change layers that way
    │   │   └── LayerUnloaded     409  the layer has to be loaded first
    │   ├── SessionNotFound       404  no such session, or it belongs to another API key
    │   ├── SessionEnded          410  the session has been ended, and why
    │   ├── SessionConflict       409  the session has another layer, or rows that are needed are freed
    │   ├── LengthMismatch        412  the session does not have `expected_length` rows
    │   │   └── ReplyLost              raised by clients only: since an earlier attempt at this step was computed
    │   ├── WrongReplica          421  another replica has the session
    │   ├── TooLarge              413  in bytes, depth, parameters, or predicted memory and work
    │   ├── UnsupportedMediaType  415  of the body
    │   └── NotAcceptable         406  no media type of the reply is accepted
    ├── CapacityError             503  the same call may succeed later
    │   ├── NotReady              503
    │   ├── Overloaded            429  the queue is full; retry after `retry_after` seconds
    │   ├── DeadlinePassed        504  the deadline of the caller passed before the reply
    │   ├── OutOfMemory           507  the call was admitted, but memory ran out
    │   └── StorageFull           507  the disk has no room for the layer
    ├── CallerGone                499  the caller closed the connection; only counted
    ├── ServiceFault              500  an error of the service; the caller gets an id, the log the cause
    ├── Unreachable                    raised by clients only: no server listens, or the connection broke
    │   ├── TimedOut                   there was no reply in time
    │   └── Untrusted                  no trusted authority signed the server's certificate
    └── BadReply                       raised by clients only: the reply is not from this service

Every refusal has `Problem`s: where (a JSON pointer), what was expected, what was received. A pointer is into the members of a request; what
checks a part of them is given the pointer to it, `at`. Where the body has a member in another place, the codec that read the body says so
(`Decoded.translate`), and the error that leaves is `translated`. What a path, a query or headers say has no pointer, "".
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from heapq import nlargest
from os.path import commonprefix
from typing import Any, Self, TypeAlias

COMPARED = 64  # most known names that an unknown one is compared with, which takes milliseconds


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a request. `at` is a JSON pointer (RFC 6901) into the request, "" for all of it."""

    at: str
    expected: str
    got: str

    def __str__(self) -> str:
        place = f", at {self.at}" if self.at else ""
        return f"expected {self.expected}, got {self.got}{place}"


Translate: TypeAlias = Callable[[Problem], Problem]  # a problem of the members as one of the body


def pointer(parts: Iterable[object], at: str = "") -> str:
    """The JSON pointer of a path below `at`: ("query", 0, 3) -> /query/0/3."""
    return at + "".join(["/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts])


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question after the most similar known name: " (did you mean NAME?)"; "" if none is similar, or if `name` is no string."""
    if not isinstance(name, str):
        return ""
    text = name[:64]
    compared = nlargest(COMPARED, known, key=lambda other: len(commonprefix((text, other))))  # noqa: RUF071  # characters are meant
    near = get_close_matches(text, compared, 1)
    return f" (did you mean {near[0]}?)" if near else ""


class AttendError(Exception):
    """Root of the tree. `title`: a readable name of the class; `problems` is empty if the error concerns no part of a request."""

    title = "error"

    def __init__(self, detail: str = "", problems: Sequence[Problem] = ()) -> None:
        self.problems = tuple(problems)
        self.detail = detail or "; ".join(map(str, self.problems)) or self.title
        super().__init__(self.detail)

    @property
    def extensions(self) -> Mapping[str, Any]:
        """What the class has to say beside them: the extension members of a problem document (RFC 9457)."""
        return {}

    @classmethod
    def where(cls, at: str, expected: str, got: str) -> Self:
        """The error with this one problem, which is also its detail."""
        return cls(problems=[Problem(at, expected, got)])


class RequestError(AttendError):
    title = "the request cannot be served"

    def translated(self, translate: Translate | None) -> Self:
        """The same error with pointers into the body; those of `self` are into the members. None: they are the same."""
        if translate is None or not self.problems:
            return self
        error = copy(self)
        AttendError.__init__(error, problems=list(map(translate, self.problems)))
        return error


@contextmanager
def translating(translate: Translate | None) -> Iterator[None]:
    """Translates the RequestErrors that leave the `with` block."""
    try:
        yield
    except RequestError as error:
        raise error.translated(translate) from None


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


class SessionNotFound(RequestError):
    title = "no such session"


class SessionEnded(RequestError):
    title = "session ended"


class SessionConflict(RequestError):
    title = "session conflict"


class LengthMismatch(RequestError):
    """`length`: the number of rows that the session has; None if a reply does not say it."""

    title = "another length"

    def __init__(self, detail: str = "", problems: Sequence[Problem] = (), length: int | None = None) -> None:
        super().__init__(detail, problems)
        self.length = length

    @property
    def extensions(self) -> Mapping[str, Any]:
        return {} if self.length is None else {"length": self.length}


class ReplyLost(LengthMismatch):
    title = "reply lost"


class WrongReplica(RequestError):
    title = "wrong replica"


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
    retry_after = 1


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
    title = "client disconnected"


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
