"""Counts, logs and traces every request, also those that are refused before they are complete."""

import time
from contextlib import suppress
from typing import Any

import structlog

from attend.errors import CallerGone, NotReady
from attend.serving.metrics import Metrics
from attend.serving.requests import Cancelled, Request
from attend.web.connections import STATUS_KEY
from attend.web.error_replies import reply_to_error
from attend.web.requests import Handler, HttpRequest
from attend.web.telemetry import Telemetry

log = structlog.get_logger("attend")


class AccessLog:
    """Counts each request, logs it with `log_requests`, and makes a span of it with `telemetry`."""

    def __init__(self, metrics: Metrics, log_requests: bool, telemetry: Telemetry | None) -> None:
        self.metrics, self.log_requests, self.telemetry = metrics, log_requests, telemetry
        self.log = log.bind()  # the logger that a call of `log.info` would look up each time

    def around(self, handle: Handler) -> Handler:
        """Middleware that records each request once `handle` has answered it, or its error is replied to."""
        metrics, telemetry = self.metrics, self.telemetry

        async def recorded(request: HttpRequest) -> None:
            started = time.monotonic()
            span = None if telemetry is None else telemetry.begin_request(request)
            try:
                await handle(request)
            except CallerGone:
                request.reason = "CallerGone"
            except Exception as error:
                await reply_to_error(error, request)
            except Cancelled:
                with suppress(Cancelled):  # once more at the end of the loop, if the rest of the request never arrives
                    await reply_to_error(NotReady("the server stopped before the request was answered"), request)
            request.status = request.scope.get(STATUS_KEY, request.status)
            if telemetry is not None and span is not None:
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
