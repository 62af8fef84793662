"""Counts, logs and traces every request, also those that are refused before they are complete."""

import time

import structlog

from attend.serving.metrics import Metrics
from attend.web.records import Handler, HttpRecord
from attend.web.telemetry import Telemetry

log = structlog.get_logger("attend")


class AccessLog:
    """Counts each request, logs it with `log_requests`, and makes a span of it with `telemetry`."""

    def __init__(self, metrics: Metrics, log_requests: bool, telemetry: Telemetry | None) -> None:
        self.metrics, self.log_requests, self.telemetry = metrics, log_requests, telemetry
        self.log = log.bind()  # the logger that a call of `log.info` would look up each time

    def around(self, handle: Handler) -> Handler:
        """Middleware that records each request once `handle` has answered it."""
        metrics, telemetry = self.metrics, self.telemetry

        async def recorded(record: HttpRecord) -> None:
            started = time.monotonic()
            if telemetry is None:
                await handle(record)
            else:
                span = telemetry.begin_request(record)
                record.reply_headers += span.reply_headers()
                await handle(record)
                telemetry.end_request(span, record, time.monotonic() - started)
            metrics.count_request(record.label, record.status, record.received, record.sent)
            if record.reason:
                metrics.count_failure(record.reason)
            if self.log_requests:
                self._write(record, time.monotonic() - started)

        return recorded

    def refusal(self, request_id: str, client: str, status: int, reason: str, detail: str) -> None:
        """Logs and traces a request that was refused before it was complete (`web/connections.py`, which counts it)."""
        if self.telemetry is not None:
            self.telemetry.refusal(request_id, status, reason)
        if self.log_requests:
            about = {"request_id": request_id, "method": "", "path": "", "client": client, "status": status}
            self.log.info("request", **about, reason=reason, detail=detail)

    def _write(self, record: HttpRecord, seconds: float) -> None:
        phases = {} if record.phases is None else record.phases.milliseconds()
        refusal = {"reason": record.reason, "detail": record.detail[:200]} if record.reason else {}
        self.log.info(
            "request",
            request_id=record.request_id,
            method=record.method,
            path=record.path,
            client=record.address,
            key=record.api_key,
            status=record.status,
            ms=round(seconds * 1e3, 3),
            received=record.received,
            sent=record.sent,
            **record.log_fields,
            **phases,
            **refusal,
        )
