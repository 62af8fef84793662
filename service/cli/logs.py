"""Logging: structlog to standard error, for people or as JSON, including the lines of uvicorn and asyncio."""

import json
import logging
import sys
from typing import Any

import orjson
import structlog
import structlog.tracebacks

SEPARATORS = set(" =\"'")
# tracebacks omit local variables, which may be payloads of requests
_structured = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_plain = structlog.processors.ExceptionRenderer()


def configure_logs(log_format: str, level: str) -> None:
    """Sets up logging for the process. `log_format` is "console" or "json"; on a terminal, console lines are aligned and coloured."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor]
    if log_format == "json":
        renderer = [_with_exception(_structured), structlog.processors.JSONRenderer(serializer=_json)]
    elif sys.stderr.isatty():
        renderer = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:  # structlog's renderer for terminals takes as long as the arithmetic of a small request
        renderer = [_with_exception(_plain), _line]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_strip, *renderer]))
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, logging.getLevelName(level.upper())), force=True)


def _strip(logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return structlog.stdlib.ProcessorFormatter.remove_processors_meta(logger, name, event)


def _with_exception(renderer: structlog.typing.Processor) -> structlog.typing.Processor:
    """The renderer of exceptions, called only for events that have one."""
    return lambda logger, name, event: renderer(logger, name, event) if event.get("exc_info") else event


def _json(event: structlog.typing.EventDict, **_: Any) -> str:
    try:
        return orjson.dumps(event, repr).decode()
    except TypeError:  # orjson refuses half a surrogate pair
        return json.dumps(event, default=repr)


def _line(logger: object, name: str, event: structlog.typing.EventDict) -> str:
    """The event as one line of `key=value`, followed by its traceback if there is one."""
    head = f"{event.pop('timestamp')} [{event.pop('level')}] {event.pop('event')}"
    exception = event.pop("exception", None)
    line = " ".join([head, *(f"{key}={_value(value)}" for key, value in event.items())])
    return line if exception is None else f"{line}\n{exception}"


def _value(value: Any) -> str:
    """The value as text; in quotation marks if it contains what separates fields or lines."""
    return value if isinstance(value, str) and value.isprintable() and not SEPARATORS & set(value) else repr(value)
