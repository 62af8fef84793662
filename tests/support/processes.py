"""The processes of a server with workers: their ids and states, calls to one of them alone, and requests whose last byte is not sent."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from attend.serving.threads import usable_cores
from support.server import Server
from support.waiting import PATIENCE, until

QUERY = {"query": [[0.25] * 64] * 3, "causal": True}
LONG = "600"  # seconds of a drain that is longer than any test
Start = Callable[..., Server]
ATTENDED = 'attend_requests_total{endpoint="/attend",status="200"}'


def several_workers(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts several workers: seconds each, and two cores at least."""
    return pytest.mark.slow(pytest.mark.skipif(usable_cores() < 2, reason="rule 11 allows one worker on one core")(test))


def ask(url: str, method: str = "GET", path: str = "/health/ready", **keywords: Any) -> httpx.Response:
    """One request on a connection of its own."""
    with httpx.Client(base_url=url, timeout=PATIENCE, headers={"Connection": "close"}) as client:
        return client.request(method, path, **keywords)


def attend(url: str) -> httpx.Response:
    return ask(url, "POST", "/attend", json=QUERY)


def connects(url: str) -> bool:
    """Whether the port accepts connections. Sends no request."""
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: the port closed during the handshake
        return False
    return True


class HalfSent:
    """A request that the server is reading, and whose last byte is not sent yet."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.body = json.dumps(QUERY).encode()
        self.connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
        head = "POST /attend HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n"
        head += f"Content-Length: {len(self.body)}\r\n\r\n"
        self.connection.sendall(head.encode())
        assert self.connection.recv(1024).startswith(b"HTTP/1.1 100 ")  # the server is reading the request
        self.connection.sendall(self.body[:-1])

    def finish(self) -> tuple[int, bytes]:
        """Sends the last byte. Returns status and body of the reply."""
        self.connection.sendall(self.body[-1:])
        with self.connection, self.connection.makefile("rb") as reader:
            status = int(reader.readline().split()[1])
            while reader.readline() not in (b"\r\n", b""):
                pass
            return status, reader.read()


def workers_of(parent: int) -> list[int]:
    """The process ids of the workers."""
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with suppress(FileNotFoundError):  # it has ended since
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return sorted(found)


def state(pid: int) -> str:
    """R running, S sleeping, T stopped, Z ended but not reaped; empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@contextmanager
def only(pid: int, parent: int) -> Iterator[None]:
    """Stops all other workers, so that this one answers."""
    others = [worker for worker in workers_of(parent) if worker != pid]
    try:
        for other in others:
            os.kill(other, signal.SIGSTOP)
            until(lambda other=other: state(other) == "T", "a stopped worker")
        yield
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def events(server: Server, name: str) -> list[dict[str, Any]]:
    """The log lines of the event `name`, also if two processes wrote into one line."""
    found, text, decoder = [], "".join(server.log), json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        with suppress(ValueError):  # an incomplete line, or a line of another program
            event, end = decoder.raw_decode(text, at)
            found.append(event)
            at = end - 1
        at = text.find("{", at + 1)
    return [event for event in found if event.get("event") == name]


def counted(url: str, name: str) -> float:
    """A metric, summed over its labels, of the worker that answers."""
    lines = ask(url, path="/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


def kill_one(server: Server) -> tuple[int, int]:
    """Kills a worker as the kernel does when memory runs out. Returns the ids of the other worker and of the replacement."""
    killed, stays = workers_of(server.process.pid)
    os.kill(killed, signal.SIGKILL)
    until(lambda: state(killed) in ("", "Z"), "dead")
    until(lambda: len(set(workers_of(server.process.pid)) - {killed}) == 2, "a replacement")
    (replacement,) = set(workers_of(server.process.pid)) - {killed, stays}
    return stays, replacement


def terminate_under_load(server: Server, call: Callable[[], None], busy: threading.Barrier) -> None:
    """Sends SIGTERM once every caller has reached the barrier, and waits until the callers and the server have ended."""
    threads = [threading.Thread(target=call) for _ in range(busy.parties - 1)]
    for thread in threads:
        thread.start()
    busy.wait()
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert server.process.wait(PATIENCE) == 0
