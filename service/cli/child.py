"""Runs `attend serve` in a child process, on a free port, while a command runs; reads from its log when it is ready.

A process, not a thread, so that signals, threads and logs are separate, and nothing remains when it ends.
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
    """The server did not become ready; the message has the end of its log."""


@contextmanager
def child_server() -> Iterator[str]:
    """Yields the URL of a ready server with default settings; stops the server at the end of the block. Raises NotStarted."""
    root = str(Path(__file__).parents[2])  # not another package `service` in the current folder (-P)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-P", *COMMAND], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    log = _Log(process)
    try:
        yield log.wait()
    finally:
        process.send_signal(signal.SIGINT)  # stops without draining: there are no other clients
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


class _Log:
    """Reads the server's log in a thread, so that the server never blocks on a full pipe."""

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
        """Returns the URL of the server once it is ready. Raises NotStarted."""
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
                raise NotStarted("the server did not become ready; its log ends:\n" + "".join(last))
            url = event.get("url", url) if event.get("event") == "listening" else url
            if event.get("event") == "ready":
                return url

    def close(self) -> None:
        self._thread.join(STOP_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()


def _event(line: str | None) -> dict[str, str]:
    """The event of a structured line; {} for any other line."""
    try:
        event = json.loads(line or "")
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
