"""Logging: structlog to standard error, for people or as JSON, including the lines of uvicorn and asyncio."""

import json
import logging
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson
import structlog
import structlog.tracebacks
from structlog.typing import EventDict

Render = Callable[[str, EventDict], str]  # level and fields -> line
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
SEPARATORS = frozenset(" =\"'")
# tracebacks omit local variables, which may be payloads of requests
_structured = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_plain = structlog.processors.ExceptionRenderer()
_terminal = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


def configure_logs(log_format: str, level: str) -> None:
    """Sets up logging for the process. `log_format` is "console" or "json"; on a terminal, console lines are aligned and coloured."""
    render = _json_line if log_format == "json" else _terminal_line if sys.stderr.isatty() else _console_line
    structlog.configure(
        wrapper_class=_logger_class(level, render),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[_strip, lambda _, name, event: render(name, event)]))
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, LEVELS[level]), force=True)


def _logger_class(lowest: str, render: Render) -> Any:
    """structlog's logger, without its chain of processors, which takes longer than to render and write the line."""

    def method(level: str) -> Callable[..., None]:
        def write(self: Any, event: str, **fields: Any) -> None:
            self._logger.msg(render(level, {**self._context, **fields, "event": event}))

        return write

    methods = {level: method(level) for level, number in LEVELS.items() if number >= LEVELS[lowest]}
    return type("Logger", (structlog.make_filtering_bound_logger(lowest),), methods)


def _strip(logger: object, name: str, event: EventDict) -> EventDict:
    return structlog.stdlib.ProcessorFormatter.remove_processors_meta(logger, name, event)


def _json_line(level: str, event: EventDict) -> str:
    event.update(level=level, timestamp=_now())
    if event.get("exc_info"):
        event = _structured(None, level, event)
    try:
        return orjson.dumps(event, repr).decode()
    except TypeError:  # orjson refuses half a surrogate pair
        return json.dumps(event, default=repr)


def _terminal_line(level: str, event: EventDict) -> str:
    event.update(level=level, timestamp=_now())
    return str(_terminal(None, level, event))


def _console_line(level: str, event: EventDict) -> str:
    """The event as one line of `key=value`, followed by its traceback if there is one."""
    if event.get("exc_info"):
        event = _plain(None, level, event)
    parts, exception = [_now(), f"[{level}]", event.pop("event")], event.pop("exception", None)
    for key, value in event.items():
        if not isinstance(value, str) or not value.isprintable() or not SEPARATORS.isdisjoint(value):
            value = repr(value)  # in quotation marks if it contains what separates fields or lines
        parts.append(f"{key}={value}")
    line = " ".join(parts)
    return line if exception is None else f"{line}\n{exception}"


def _now() -> str:
    """The time in UTC, as ISO 8601 with microseconds."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{_whole_second(seconds)}.{nanoseconds // 1000:06}Z"


@lru_cache(1)
def _whole_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
