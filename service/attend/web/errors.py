"""Errors as HTTP statuses, gRPC codes and problem documents. `web/error_replies.py` replies with them.

An error class without a row in STATUSES has the row of its nearest ancestor. No reply contains a stack trace or a file path.
"""

import json
import math
import random
import traceback
from collections.abc import Callable
from typing import Any

from attend import errors
from attend.serving.faults import is_out_of_memory

STATUSES: dict[type[errors.AttendError], tuple[int, str]] = {  # HTTP status, gRPC code
    errors.AttendError: (500, "INTERNAL"),
    errors.RequestError: (422, "INVALID_ARGUMENT"),
    errors.MalformedRequest: (400, "INVALID_ARGUMENT"),
    errors.MalformedBody: (400, "INVALID_ARGUMENT"),
    errors.InvalidRequest: (422, "INVALID_ARGUMENT"),
    errors.Unauthenticated: (401, "UNAUTHENTICATED"),
    errors.Forbidden: (403, "PERMISSION_DENIED"),
    errors.LayerNotFound: (404, "NOT_FOUND"),
    errors.LayerConflict: (409, "FAILED_PRECONDITION"),
    errors.SessionNotFound: (404, "NOT_FOUND"),
    errors.SessionEnded: (410, "NOT_FOUND"),
    errors.SessionConflict: (409, "FAILED_PRECONDITION"),
    errors.LengthMismatch: (412, "FAILED_PRECONDITION"),
    errors.WrongReplica: (421, "FAILED_PRECONDITION"),
    errors.TooLarge: (413, "INVALID_ARGUMENT"),
    errors.UnsupportedMediaType: (415, "INVALID_ARGUMENT"),
    errors.NotAcceptable: (406, "INVALID_ARGUMENT"),
    errors.CapacityError: (503, "UNAVAILABLE"),
    errors.NotReady: (503, "UNAVAILABLE"),
    errors.Overloaded: (429, "RESOURCE_EXHAUSTED"),
    errors.DeadlinePassed: (504, "DEADLINE_EXCEEDED"),
    errors.OutOfMemory: (507, "RESOURCE_EXHAUSTED"),
    errors.StorageFull: (507, "UNAVAILABLE"),
    errors.CallerGone: (499, "CANCELLED"),  # never sent: the client has disconnected
    errors.ServiceFault: (500, "INTERNAL"),
}
UNEXPECTED_ERROR = "unexpected error; the server's log has the cause"


def status_of(error: errors.AttendError) -> int:
    """The HTTP status of an error."""
    return _row_of(error)[0]


def known_error(error: Exception) -> Exception:
    """The error itself, or OutOfMemory in its place if it says that there is no memory; what failed is freed then."""
    if not is_out_of_memory(error):
        return error
    traceback.clear_frames(error.__traceback__)
    return errors.OutOfMemory("there was not enough memory for this request")


def grpc_code_of(error: errors.AttendError) -> str:
    """The name of an error's gRPC code."""
    return _row_of(error)[1]


def _row_of(error: errors.AttendError) -> tuple[int, str]:
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def problem_document(status: int, title: str, detail: str, request_id: str, problems: tuple[errors.Problem, ...] = ()) -> bytes:
    """The body of a refusal as problem details."""
    found = [{"at": p.at, "expected": p.expected, "got": p.got} for p in problems]
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return json.dumps({**document, "request_id": request_id, "errors": found}).encode()


def retry_after(error: errors.Overloaded | errors.NotReady, draw: Callable[[int, int], int] = random.randint) -> str:
    """Seconds for Retry-After: the estimate plus a random part of up to half of it, so that clients do not all retry at once."""
    return str(draw(error.retry_after, error.retry_after + math.ceil(error.retry_after / 2)))
