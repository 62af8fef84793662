"""Errors as HTTP statuses, gRPC codes and problem documents. `web/error_replies.py` replies with them.

An error class without a row in STATUSES has the row of its nearest ancestor. No reply contains a stack trace or a file path.
"""

import json
import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from attend import errors


class Row(NamedTuple):
    """How one class of errors is reported."""

    status: int  # of HTTP
    code: str  # of gRPC
    meaning: str  # in the OpenAPI document


STATUSES: dict[type[errors.AttendError], Row] = {
    errors.AttendError: Row(500, "INTERNAL", "Server error."),
    errors.RequestError: Row(422, "INVALID_ARGUMENT", "The request cannot be served."),
    errors.MalformedRequest: Row(400, "INVALID_ARGUMENT", "The headers are not valid HTTP."),
    errors.MalformedBody: Row(400, "INVALID_ARGUMENT", "The body is not valid JSON, or a key is repeated."),
    errors.InvalidRequest: Row(422, "INVALID_ARGUMENT", "Well-formed, but it breaks the contract or does not fit the layer."),
    errors.Unauthenticated: Row(401, "UNAUTHENTICATED", "An API key is required."),
    errors.Forbidden: Row(403, "PERMISSION_DENIED", "This server does not allow it."),
    errors.LayerNotFound: Row(404, "NOT_FOUND", "No such layer."),
    errors.LayerConflict: Row(409, "FAILED_PRECONDITION", "The layers cannot be changed that way here."),
    errors.LayerUnloaded: Row(409, "FAILED_PRECONDITION", "The layer is unloaded."),
    errors.SessionNotFound: Row(404, "NOT_FOUND", "No such session, or this server keeps no sessions."),
    errors.SessionEnded: Row(410, "NOT_FOUND", "The session has ended."),
    errors.SessionConflict: Row(409, "FAILED_PRECONDITION", "The layer of the rows is another one, or rows that are needed are freed."),
    errors.LengthMismatch: Row(412, "FAILED_PRECONDITION", "The session does not have expected_length rows."),
    errors.WrongReplica: Row(421, "FAILED_PRECONDITION", "Another replica has the session."),
    errors.TooLarge: Row(413, "INVALID_ARGUMENT", "Too large: bytes, depth, parameters, or predicted memory."),
    errors.UnsupportedMediaType: Row(415, "INVALID_ARGUMENT", "An unsupported media type."),
    errors.NotAcceptable: Row(406, "INVALID_ARGUMENT", "No supported media type is accepted."),
    errors.CapacityError: Row(503, "UNAVAILABLE", "Not now."),
    errors.NotReady: Row(503, "UNAVAILABLE", "Not ready yet."),
    errors.Overloaded: Row(429, "RESOURCE_EXHAUSTED", "The queue is full; see Retry-After."),
    errors.DeadlinePassed: Row(504, "DEADLINE_EXCEEDED", "The deadline of X-Request-Timeout passed."),
    errors.OutOfMemory: Row(507, "RESOURCE_EXHAUSTED", "Not enough memory."),
    errors.StorageFull: Row(507, "UNAVAILABLE", "No disk space for the layer."),
    errors.CallerGone: Row(499, "CANCELLED", "Never sent: the client has disconnected."),
    errors.ServiceFault: Row(500, "INTERNAL", "Server error."),
}


def row_of(kind: type[errors.AttendError]) -> Row:
    """How errors of a class are reported."""
    return next(STATUSES[each] for each in kind.__mro__ if each in STATUSES)


def status_in(v2: bool, status: int) -> int:
    """The HTTP status in the protocol: the Open Inference Protocol (`v2`) has no 422."""
    return 400 if v2 and status == 422 else status


def problem_document(
    status: int,
    title: str,
    detail: str,
    request_id: str,
    problems: tuple[errors.Problem, ...] = (),
    extensions: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """The body of a refusal as problem details, with these extension members."""
    found = [{"at": p.at, "expected": p.expected, "got": p.got} for p in problems]
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return json.dumps({**document, "request_id": request_id, "errors": found, **extensions}).encode()


def retry_after(error: errors.Overloaded | errors.NotReady, draw: Callable[[int, int], int] = random.randint) -> str:
    """Seconds for Retry-After: the estimate plus a random part of up to half of it, so that clients do not all retry at once."""
    return str(draw(error.retry_after, error.retry_after + math.ceil(error.retry_after / 2)))
