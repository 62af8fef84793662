"""A server for as long as a command needs one: `attend serve` in a process of its own, on a free port, waited for by its own log.

A process rather than a thread: its signals, threads and logs stay its own, it is the very server that a user starts, and when it is
told to stop it is gone.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.settings import PREFIX

START_SECONDS = 120
STOP_SECONDS = 10
COMMAND = ["-m", "service", "serve", "--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--no-access-log"]


class NotStarted(Exception):
    """The server did not get ready; the message has the end of its log."""


@contextmanager
def child_server() -> Iterator[str]:
    """The URL of a server with default settings that is ready; it ends with the block. Raises NotStarted."""
    root = str(Path(__file__).parents[2])  # and not whatever else is called `service` where the user stands (-P)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-P", *COMMAND], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    log = _Log(process)
    try:
        yield log.wait()
    finally:
        process.send_signal(signal.SIGINT)  # it has no other callers: no need to drain
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


class _Log:
    """What the server writes, read to the end by a thread, so that it never waits for a reader."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.put(line)
        self._lines.put(None)

    def wait(self) -> str:
        """The server's URL, once it says that it is ready."""
        url, last, until = "", deque[str](maxlen=8), time.monotonic() + START_SECONDS
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                line = None
            event = _event(line)
            if line is not None:
                last.append(line)
            if line is None or event.get("event") == "not ready":
                raise NotStarted("the server did not get ready; its log ends:\n" + "".join(last))
            url = event.get("url", url) if event.get("event") == "listening" else url
            if event.get("event") == "ready":
                return url

    def close(self) -> None:
        self._thread.join(STOP_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()


def _event(line: str | None) -> dict[str, str]:
    """A structured line of the log; empty for any other."""
    try:
        event = json.loads(line or "")
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
