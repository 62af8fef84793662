"""Replies to exceptions and to requests without an endpoint: problem details (RFC 9457), or {"error": "…"} under /v2."""

import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.responses import Response

from attend import errors
from attend.serving.faults import is_out_of_memory
from attend.serving.requests import Request
from attend.web.connections import STATUS_KEY
from attend.web.errors import problem_document, retry_after, row_of, status_in
from attend.web.http_parser import METHODS
from attend.web.requests import HttpRequest, is_v2
from attend.wire.negotiation import JSON, PROBLEM_JSON

log = structlog.get_logger("attend")
UNEXPECTED_ERROR = "unexpected error; the server's log has the cause"
TITLES = {404: "no such page", 405: "method not allowed", 501: "not implemented"}
MAX_COMPARED = 128  # characters of an unknown path that are compared with the known paths


async def reply_to_error(error: Exception, request: HttpRequest) -> None:
    """Reply to an exception, and write its reason into the request. If another reply has begun already, that stays without its end, and
    uvicorn closes the connection. A request that the connection has refused gets no other reply."""
    response = _response_to(error, request)
    if not request.status and STATUS_KEY not in request.scope:
        await response(request.scope, request.receive, request.send)


def recorded_error(error: Exception, request: Request, **where: str) -> errors.AttendError:
    """The error to reply with; the request gets its reason and detail. A fault of the server is logged with its cause and `where`.

    An exception that says that there is no memory is OutOfMemory, and what failed is freed; any other unknown one is a ServiceFault.
    """
    if is_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)
        error = errors.OutOfMemory("there was not enough memory for this request")
    if not isinstance(error, errors.AttendError):
        log.error("internal_error", request_id=request.id, **where, exc_info=error)
        request.reason, request.detail = "internal_error", UNEXPECTED_ERROR
        return errors.ServiceFault(UNEXPECTED_ERROR)
    if row_of(type(error)).status == 500:
        log.error("failed", request_id=request.id, **where, exc_info=error.__cause__ or error)
    request.reason, request.detail = type(error).__name__, error.detail
    return error


def _response_to(error: Exception, request: HttpRequest) -> Response:
    if isinstance(error, HTTPException):  # of a static file
        return _without_endpoint(request, error.status_code, f"nothing is served at {request.path}; see /docs")
    error = recorded_error(error, request, path=request.scope["path"])
    headers = {}
    if isinstance(error, errors.Overloaded | errors.NotReady):
        headers["Retry-After"] = retry_after(error)
    elif isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="attend"'
    return _response(request, row_of(type(error)).status, error.title, error.detail, error.problems, error.extensions, headers)


def no_endpoint(request: HttpRequest, paths: Sequence[str]) -> Response:
    """The reply to a request without an endpoint: 405 if its path has other methods, 501 for a method that HTTP does not define, else 404,
    which may suggest one of `paths`."""
    headers, given = {}, request.path
    if request.endpoints:
        allowed = sorted({*request.endpoints, "HEAD"} if "GET" in request.endpoints else request.endpoints)
        status, headers, detail = 405, {"Allow": ", ".join(allowed)}, f"expected {' or '.join(allowed)}, got {request.method}"
    elif request.method not in METHODS:
        status, detail = 501, f"expected a method among {', '.join(METHODS)}, got {request.method}"
    else:
        status, detail = 404, f"nothing is served at {given}{_similar_path(given, paths)}; see /docs"
    return _without_endpoint(request, status, detail, headers)


def _without_endpoint(request: HttpRequest, status: int, detail: str, headers: Mapping[str, str] = {}) -> Response:
    request.reason = f"status_{status}"
    return _response(request, status, TITLES.get(status, "error"), detail, headers=headers)


def _response(
    request: HttpRequest,
    status: int,
    title: str,
    detail: str,
    problems: tuple[errors.Problem, ...] = (),
    extensions: Mapping[str, Any] = {},
    headers: Mapping[str, str] = {},
) -> Response:
    """A refusal, as the protocol of the path defines it."""
    if is_v2(request.path):
        return Response(json.dumps({"error": detail}), status_in(True, status), headers, media_type=JSON)
    document = problem_document(status, title, detail, request.id, problems, extensions)
    return Response(document, status, headers, media_type=PROBLEM_JSON)


def _similar_path(path: str, templates: Sequence[str]) -> str:
    """A suggestion of the documented path that is most similar to the given one: " (did you mean /attend?)"; "" if none is similar.

    Each part of the path must be similar; parameters, such as the name of a layer, are copied from the given path.
    """
    given, similar = path[:MAX_COMPARED].split("/"), []
    for template in (template.split("/") for template in templates):
        if len(template) == len(given) and all(map(_is_similar_part, template, given)):
            similar.append("/".join(own if part.startswith("{") else part for part, own in zip(template, given, strict=True)))
    return errors.did_you_mean(path, similar)


def _is_similar_part(part: str, given: str) -> bool:
    """Whether a part of a given path fits that of a route. A parameter, such as {name}, may have any value but ""."""
    return bool(given) if part.startswith("{") else part == given or bool(errors.did_you_mean(given, [part]))
