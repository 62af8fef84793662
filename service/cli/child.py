"""Runs `attend serve` in a child process, on a free port, while a command runs.

A process, not a thread, so that signals, threads and logs are separate, and nothing remains when it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from service.settings import PREFIX

START_SECONDS = 120
STOP_SECONDS = 10
POLL = 0.05  # seconds
COMMAND = ["-P", "-m", "service", "serve", "--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--no-access-log"]


class NotStarted(Exception):
    """The server did not become ready; the message has the end of its log."""


@contextmanager
def child_server() -> Iterator[str]:
    """Yields the URL of a ready server with default settings; stops the server at the end of the block. Raises NotStarted."""
    root = str(Path(__file__).parents[2])  # not another package `service` in the current folder (-P)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with TemporaryDirectory(prefix="attend-") as folder:
        log = Path(folder) / "log"
        with log.open("ab") as stderr:
            process = subprocess.Popen([sys.executable, "-P", *COMMAND], stdin=subprocess.DEVNULL, stderr=stderr, env=environment)
        try:
            yield _wait_for_url(process, log)
        finally:
            process.send_signal(signal.SIGINT)  # stops without draining: there are no other clients
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The URL of the server once its log says that it is ready. Raises NotStarted."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        ended = process.poll() is not None or time.monotonic() > deadline
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        events = {event.get("event"): event for event in map(_event, lines)}
        if "ready" in events:
            return str(events["listening"]["url"])
        if ended or "not ready" in events:
            raise NotStarted("the server did not become ready; its log ends:\n" + "".join(lines[-8:]))
        time.sleep(POLL)


def _event(line: str) -> dict[str, str]:
    """The event of a structured line; {} for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
