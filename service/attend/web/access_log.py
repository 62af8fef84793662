"""Counts, logs and traces every request, also those that are refused before they are complete."""

import time
import traceback
from typing import Any

import structlog

from attend import errors
from attend.serving.faults import is_out_of_memory
from attend.serving.metrics import Metrics
from attend.serving.requests import Request
from attend.web.errors import row_of
from attend.web.requests import Handler, HttpRequest
from attend.web.telemetry import Telemetry

log = structlog.get_logger("attend")
UNEXPECTED_ERROR = "unexpected error; the server's log has the cause"


class AccessLog:
    """Counts each request, logs it with `log_requests`, and makes a span of it with `telemetry`."""

    def __init__(self, metrics: Metrics, log_requests: bool, telemetry: Telemetry | None) -> None:
        self.metrics, self.log_requests, self.telemetry = metrics, log_requests, telemetry
        self.log = log.bind()  # the logger that a call of `log.info` would look up each time

    def around(self, handle: Handler) -> Handler:
        """Middleware that records each request once `handle` has answered it."""
        metrics, telemetry = self.metrics, self.telemetry

        async def recorded(request: HttpRequest) -> None:
            started = time.monotonic()
            if telemetry is None:
                await handle(request)
            else:
                span = telemetry.begin_request(request)
                request.reply_headers += span.reply_headers()
                await handle(request)
                telemetry.end_request(span, request, time.monotonic() - started)
            metrics.count_request(request.label, request.status, request.received, request.sent)
            if request.reason:
                metrics.count_failure(request.reason)
            if self.log_requests:
                seconds = time.monotonic() - started
                self.write(
                    request,
                    seconds,
                    method=request.method,
                    path=request.path,
                    client=request.address,
                    status=request.status,
                    received=request.received,
                    sent=request.sent,
                )

        return recorded

    def refusal(self, request_id: str, client: str, status: int, reason: str, detail: str) -> None:
        """Logs and traces a request that was refused before it was complete (`web/connections.py`, which counts it)."""
        if self.telemetry is not None:
            self.telemetry.refusal(request_id, status, reason)
        if self.log_requests:
            about = {"request_id": request_id, "method": "", "path": "", "client": client, "status": status}
            self.log.info("request", **about, reason=reason, detail=detail)

    def write(self, request: Request, seconds: float, **about: Any) -> None:
        """Logs a request or gRPC call that took so many seconds. `about`: what the protocol knows of it."""
        phases = {} if request.phases is None else request.phases.milliseconds()
        refusal = {"reason": request.reason, "detail": request.detail[:200]} if request.reason else {}
        self.log.info(
            "request",
            request_id=request.id,
            **about,
            key=request.api_key,
            ms=round(seconds * 1e3, 3),
            **request.log_fields,
            **phases,
            **refusal,
        )


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
