"""The one table from errors to statuses, and the one way a refusal is written: RFC 9457 problem details.

A class without a row takes its nearest ancestor's. No reply shows a stack trace or a path of the machine.
"""

import json
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from service import errors

STATUSES: dict[type[errors.AttendError], int] = {
    errors.AttendError: 500,
    errors.RequestError: 422,
    errors.MalformedBody: 400,
    errors.InvalidRequest: 422,
    errors.Forbidden: 403,
    errors.LayerNotFound: 404,
    errors.LayerConflict: 409,
    errors.TooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.NotAcceptable: 406,
    errors.CapacityError: 503,
    errors.NotReady: 503,
    errors.Overloaded: 429,
    errors.DeadlinePassed: 504,
    errors.OutOfMemory: 507,
    errors.StorageFull: 507,
    errors.CallerGone: 499,  # never sent: there is nobody to send it to
    errors.ServiceFault: 500,
}
TITLES = {404: "no such page", 405: "method not allowed"}
log = structlog.get_logger("attend")
PROBLEM_JSON = "application/problem+json"


def status_of(error: errors.AttendError) -> int:
    """The status of the error's class, or of its nearest ancestor in the table."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def problem(status: int, title: str, detail: str, request_id: str, problems: tuple[errors.Problem, ...] = ()) -> bytes:
    """The body of a refusal."""
    found = [{"at": p.at, "expected": p.expected, "got": p.got} for p in problems]
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return json.dumps({**document, "request_id": request_id, "errors": found}).encode()


def respond(error: errors.AttendError, scope: Any) -> Response:
    """The response to a refusal; leaves its reason with the request's record."""
    record = scope["attend"]
    record.reason, record.detail = type(error).__name__, error.detail
    status = status_of(error)
    if status == 500:
        log.error("failed", request_id=record.request_id, path=scope["path"], exc_info=error.__cause__ or error)
    body = problem(status, error.title, error.detail, record.request_id, error.problems)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, errors.Overloaded) else None
    return Response(body, status, headers, media_type=PROBLEM_JSON)


def install(app: FastAPI) -> None:
    """Registers the handlers: ours, and the framework's own 404 and 405 in the same dress."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.AttendError)
        if isinstance(error, errors.CallerGone):
            raise error  # to where it is counted
        return respond(error, request.scope)

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        record = request.scope["attend"]
        record.reason, status = f"status_{error.status_code}", error.status_code
        headers, detail = {}, error.detail
        if status == 405:
            allowed = _allowed(app, request)
            headers, detail = {"Allow": ", ".join(allowed)}, f"expected {' or '.join(allowed)}, got {request.method}"
        elif status == 404:
            detail = f"nothing is served at {request.url.path}; see /docs"
        body = problem(status, TITLES.get(status, "error"), detail, record.request_id)
        return Response(body, status, headers, media_type=PROBLEM_JSON)

    app.add_exception_handler(errors.AttendError, refused)
    app.add_exception_handler(HTTPException, unrouted)


def _allowed(app: FastAPI, request: Request) -> list[str]:
    methods: set[str] = set()
    for route in app.router.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))
