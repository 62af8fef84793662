"""Turns errors into HTTP responses (RFC 9457 problem details, or {"error": "…"} under /v2) and gRPC codes.

An error class without a row in STATUSES has the row of its nearest ancestor. No response contains a stack trace or a file path.
"""

import json
import math
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from fastapi import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from service import errors
from service.wire.negotiation import JSON, PROBLEM_JSON
from service.wire.problems import did_you_mean

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
TITLES = {404: "no such page", 405: "method not allowed"}
log = structlog.get_logger("attend")
V2_PREFIX = "/v2"
MAX_COMPARED = 128  # characters of an unknown path that are compared with the known paths
UNEXPECTED_ERROR = "unexpected error; the server's log has the cause"


def status_of(error: errors.AttendError) -> int:
    """The HTTP status of an error."""
    return _row_of(error)[0]


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


def _response(
    scope: Any, status: int, title: str, detail: str, problems: tuple[errors.Problem, ...] = (), headers: Mapping[str, str] = {}
) -> Response:
    """A refusal, as the protocol of the path defines it."""
    path = scope["attend"].path
    if path == V2_PREFIX or path.startswith(f"{V2_PREFIX}/"):  # the protocol has no 422
        return Response(json.dumps({"error": detail}), 400 if status == 422 else status, headers, media_type=JSON)
    body = problem_document(status, title, detail, scope["attend"].request_id, problems)
    return Response(body, status, headers, media_type=PROBLEM_JSON)


def error_response(error: errors.AttendError, scope: Any) -> Response:
    """The response to an error. Writes the reason into the request's record."""
    record, status = scope["attend"], status_of(error)
    record.reason, record.detail = type(error).__name__, error.detail
    if status == 500:
        log.error("failed", request_id=record.request_id, path=scope["path"], exc_info=error.__cause__ or error)
    headers = {}
    if isinstance(error, errors.Overloaded | errors.NotReady):
        headers["Retry-After"] = retry_after(error)
    elif isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="attend"'
    return _response(scope, status, error.title, error.detail, error.problems, headers)


def retry_after(error: errors.Overloaded | errors.NotReady, draw: Callable[[int, int], int] = random.randint) -> str:
    """Seconds for Retry-After: the estimate plus a random part of up to half of it, so that clients do not all retry at once."""
    return str(draw(error.retry_after, error.retry_after + math.ceil(error.retry_after / 2)))


def out_of_memory(error: Exception, scope: Any) -> Response:
    """The response when memory ran out. Frees the memory of the failed request first."""
    traceback.clear_frames(error.__traceback__)
    return error_response(errors.OutOfMemory("there was not enough memory for this request"), scope)


def internal_error(scope: Any) -> Response:
    """The response to an unexpected exception."""
    return _response(scope, 500, "internal error", UNEXPECTED_ERROR)


def routing_error(error: HTTPException, routes: Sequence[BaseRoute], scope: Any) -> Response:
    """The response to the framework's 404 and 405."""
    status, headers, detail = error.status_code, {}, error.detail
    scope["attend"].reason = f"status_{status}"
    if status == 405:
        matching = [route for route in routes if route.matches(scope)[0] != Match.NONE]
        methods = {method for route in matching for method in getattr(route, "methods", None) or ()} or {"GET"}  # a static file
        allowed = sorted(methods | ({"HEAD"} if "GET" in methods else set()))
        headers, detail = {"Allow": ", ".join(allowed)}, f"expected {' or '.join(allowed)}, got {scope['method']}"
    elif status == 404:
        detail = f"nothing is served at {scope['path']}{_similar_path(scope['path'], routes)}; see /docs"
    return _response(scope, status, TITLES.get(status, "error"), detail, headers=headers)


def _similar_path(path: str, routes: Sequence[BaseRoute]) -> str:
    """A suggestion of the documented path that is most similar to the given one: " (did you mean /attend?)"; "" if none is similar.

    Each part of the path must be similar; parameters, such as the name of a layer, are copied from the given path.
    """
    given, similar = path[:MAX_COMPARED].split("/"), []
    for template in (route.path.split("/") for route in routes if isinstance(route, APIRoute) and route.include_in_schema):
        if len(template) == len(given) and all(map(_is_similar_part, template, given)):
            similar.append("/".join(own if part.startswith("{") else part for part, own in zip(template, given, strict=True)))
    return did_you_mean(path, similar)


def _is_similar_part(part: str, given: str) -> bool:
    """Whether a part of a given path fits that of a route. A parameter, such as {name}, may have any value but ""."""
    return bool(given) if part.startswith("{") else part == given or bool(did_you_mean(given, [part]))
