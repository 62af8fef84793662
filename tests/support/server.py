"""A server as a user starts it: the command, a free port, a process of its own, waited for by its own log."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Server:
    """A running `attend serve`. `log` grows as the server writes; `events` are its structured lines."""

    process: subprocess.Popen[str]
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
    """Starts a server and returns once it says that it is ready. Raises AssertionError with its log if it never does."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--log-format", "json", "--drain-seconds", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    server, ready = Server(process), threading.Event()

    def follow() -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                server.log.append(line)
                if '"listening"' in line:
                    server.url = json.loads(line)["url"]
                if '"event":"ready"' in line:
                    ready.set()
        ready.set()

    threading.Thread(target=follow, daemon=True).start()
    assert ready.wait(120), "no sign of life"
    assert server.url and process.poll() is None, "".join(server.log)
    return server
