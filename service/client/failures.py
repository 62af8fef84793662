"""What went wrong, as exceptions: the server's refusals raised again as the classes they were, and a broken connection as one of ours.

A refusal is told by the title of its problem document, which names one class of the tree in `service/errors.py`. What comes without
such a document (a proxy's page, a path that is not there) is told by its status. Pure: reads a response, sends nothing.
"""

import ssl
from collections.abc import Iterator

import httpx

from service.errors import (
    AttendError,
    BadReply,
    CapacityError,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    Problem,
    RequestError,
    ServiceFault,
    TimedOut,
    Unreachable,
    Untrusted,
)
from service.wire.client_codec import decode_document
from service.wire.problems import validate
from service.wire.schemas.attend import ProblemDocument

SHOWN = 200  # characters of a page that is no problem document
LATER = {429, 503, 504, 507}


def _tree(root: type[AttendError]) -> Iterator[type[AttendError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


CLASSES = {kind.title: kind for kind in _tree(AttendError)}


def refusal(response: httpx.Response) -> AttendError:
    """The exception for a response that is no success; its note names the status and the request's id."""
    try:
        document = validate(ProblemDocument, decode_document(response.content))
    except (MalformedBody, InvalidRequest):
        text = " ".join(response.text.split())[:SHOWN]
        return _noted(_class_of(response.status_code)(f"HTTP {response.status_code} {response.reason_phrase}: {text}"), response)
    kind = CLASSES.get(document.title) or _class_of(document.status)
    problems = [Problem(item.at, item.expected, item.got) for item in document.errors]
    if kind is Overloaded:
        wait = response.headers.get("retry-after", "")
        return _noted(Overloaded(int(wait) if wait.isdigit() else 1, document.detail, problems), response)
    return _noted(kind(document.detail, problems), response)


def connection_failure(error: Exception, url: str) -> AttendError:
    """The exception for a call that brought no response."""
    if isinstance(error, httpx.TimeoutException):
        return TimedOut(f"no answer from {url} in time ({type(error).__name__})")
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return Unreachable(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
    if (doubt := doubted(error)) is not None:
        return Untrusted(f"the certificate of {url} is not trusted: {doubt.verify_message}")
    return Unreachable(f"no answer from {url}: {str(error) or type(error).__name__}")


def doubted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The doubt in a certificate that is behind an error, if one is."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _class_of(status: int) -> type[AttendError]:
    if status in LATER:
        return CapacityError
    if 400 <= status < 500:
        return RequestError
    return ServiceFault if status >= 500 else BadReply


def _noted(error: AttendError, response: httpx.Response) -> AttendError:
    error.add_note(f"HTTP {response.status_code}, request id {response.headers.get('x-request-id', 'unknown')}")
    return error
