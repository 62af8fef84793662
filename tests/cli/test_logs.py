"""Lines of the log: their fields, their order, and what is quoted."""

import json
import re
import subprocess
import sys

SCRIPT = """
import logging, structlog
from attend.cli.logs import configure_logs
configure_logs({form!r}, "info")
log = structlog.get_logger("attend")
log.debug("hidden")
log.info("request", path="/attend", key="", name="two words", said='"', rows=(2, 3), ms=0.25, none=None, half="\\ud800")
log.warning("bare")
log.bind(part=1).info("bound", half=2)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("internal_error", request_id="5")
logging.getLogger("uvicorn.error").error("of %s", "uvicorn")
"""
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


def lines_of(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(form=form)], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_a_console_line_has_time_level_and_fields() -> None:
    request, bare, bound, internal_error, *traceback, foreign = lines_of("console")

    fields = r"""path=/attend key= name='two words' said='"' rows=(2, 3) ms=0.25 none=None half='\ud800'"""
    assert re.fullmatch(rf"{TIME} \[info\] request {re.escape(fields)}", request)
    assert re.fullmatch(rf"{TIME} \[warning\] bare", bare)
    assert re.fullmatch(rf"{TIME} \[info\] bound part=1 half=2", bound)
    assert re.fullmatch(rf"{TIME} \[error\] internal_error request_id=5", internal_error)
    assert traceback[0] == "Traceback (most recent call last):" and traceback[-1] == "ZeroDivisionError: division by zero"
    assert re.fullmatch(rf"{TIME} \[error\] of uvicorn", foreign)


def test_a_json_line_has_fields_event_level_and_time() -> None:
    request, bare, bound, internal_error, foreign = map(json.loads, lines_of("json"))

    assert re.fullmatch(TIME, request.pop("timestamp"))
    expected = {"path": "/attend", "key": "", "name": "two words", "said": '"', "rows": [2, 3], "ms": 0.25, "none": None, "half": "\ud800"}
    assert list(request.items()) == [*expected.items(), ("event", "request"), ("level", "info")]
    assert (bare["event"], bare["level"]) == ("bare", "warning")
    assert (bound["part"], bound["half"], bound["event"]) == (1, 2, "bound")
    assert (internal_error["event"], internal_error["level"], internal_error["request_id"]) == ("internal_error", "error", "5")
    assert internal_error["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert (foreign["event"], foreign["level"]) == ("of uvicorn", "error")
