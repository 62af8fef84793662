"""Replies to exceptions and to requests without an endpoint: problem details (RFC 9457), or {"error": "…"} under /v2."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from attend import errors
from attend.web.access_log import recorded_error
from attend.web.errors import problem_document, retry_after, row_of, status_in
from attend.web.http_parser import METHODS
from attend.web.requests import Handler, HttpRequest, is_v2
from attend.wire.negotiation import JSON, PROBLEM_JSON

TITLES = {404: "no such page", 405: "method not allowed", 501: "not implemented"}
MAX_COMPARED = 128  # characters of an unknown path that are compared with the known paths


class ErrorReplies:
    """Middleware that replies to exceptions, and writes their reasons into the request."""

    def __init__(self, handle: Handler) -> None:
        self.handle = handle

    async def __call__(self, request: HttpRequest) -> None:
        """If the reply has begun already, it stays without its end, and uvicorn closes the connection."""
        try:
            await self.handle(request)
        except errors.CallerGone:
            request.reason = "CallerGone"
        except Exception as error:
            response = _response_to(error, request)
            if not request.status:
                await response(request.scope, request.receive, request.send)


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
    """The reply to a request without an endpoint: 405 if its path has other methods, 501 for a method that HTTP does not define, else 404.
    `paths`:
    those that it may suggest."""
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
