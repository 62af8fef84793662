"""A server in a process of its own, on a free port. It is ready once its log says so."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TextIO

FLAGS = ("--port", "0", "--log-format", "json", "--drain-seconds", "0")
FORKS = get_context("forkserver")
COMMANDS = ("capture", "check", "demo", "describe", "families", "keys", "layers", "request_file", "serve")  # modules that `main` imports
FORKS.set_forkserver_preload(["__main__", "pytest", "attend.cli.server", *(f"attend.cli.{name}" for name in COMMANDS)])


class ForkedProcess(FORKS.Process):  # type: ignore[name-defined,misc]
    """A fork of a process that has imported the server, which takes seconds. It has the methods of `subprocess.Popen` that tests call."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("attend serve", timeout or 0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@dataclass
class Server:
    """A running `attend serve`. `log` grows as the server writes; `events` are its structured lines."""

    process: subprocess.Popen[str] | ForkedProcess
    url: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log if line.startswith("{")]

    def access_line(self, request_id: str) -> dict[str, object]:
        """The access line of that request, which is written after its answer."""
        for _ in range(6000):
            if found := [event for event in self.events if event.get("request_id") == request_id]:
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"nothing was logged of {request_id}")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


def start_server(*flags: str, env: dict[str, str] | None = None) -> Server:
    """Starts a server as a user does, in three seconds, and returns once it is ready. Raises AssertionError with its log if it never is."""
    command = [sys.executable, "-m", "attend", "serve", *FLAGS, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    assert process.stderr is not None
    return _ready(Server(process), process.stderr)


def fork_server(*flags: str, env: dict[str, str] | None = None, before: str = "") -> Server:
    """Does the same in half a second: the server is a fork of a process that has imported it. `before`: code that the fork runs first."""
    reader, writer = FORKS.Pipe(duplex=False)
    process = ForkedProcess(target=_serve, args=([*FLAGS, *flags], {**os.environ, **(env or {})}, before, writer))
    process.start()
    writer.close()
    with reader:
        stderr = os.fdopen(os.dup(reader.fileno()))
    return _ready(Server(process), stderr)


def _serve(flags: list[str], env: dict[str, str], before: str, stderr: Connection) -> None:
    """Runs `attend serve` in this process."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where they run in the background
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.environ.clear()
    os.environ.update(env)
    gc.freeze()  # once it is ready, a server collects garbage: among the objects of all modules that takes a quarter of a second
    sys.argv = ["attend", "serve", *flags]
    exec(before, {})
    from attend.cli import main

    main()


def _ready(server: Server, stderr: TextIO) -> Server:
    """The server once its log says that it is ready."""
    ready = threading.Event()

    def follow() -> None:
        with stderr as lines:
            for line in lines:
                server.log.append(line)
                if '"listening"' in line:
                    server.url = json.loads(line)["url"]
                if '"event":"ready"' in line:
                    ready.set()
        ready.set()

    threading.Thread(target=follow, daemon=True).start()
    assert ready.wait(120), "the server wrote nothing to its log"
    assert server.url and server.process.poll() is None, "".join(server.log)
    return server
