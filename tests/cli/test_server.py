"""A server of one process under real signals: rule 10 (what SIGTERM does) and SIGHUP.

No test waits for time to pass: a drain is so long that it never ends by itself, and the last byte of a request is not sent until later.
"""

import itertools
import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.processes import (
    LONG,
    PATIENCE,
    QUERY,
    HalfSent,
    Start,
    ask,
    attend,
    connects,
    counted,
    events,
    terminate_under_load,
    until,
)
from support.server import Server, fork_server

# The device computes the calls of callers for ever
STUCK_DEVICE = """
from threading import Event
from attend.serving import scheduler

compute = scheduler.compute
scheduler.compute = lambda batch, *options: Event().wait() if batch[0].request.caller else compute(batch, *options)
"""
LATE = 10  # calls that a client still sends after /health/ready has returned 503


# 10. SIGTERM: /health/ready returns 503 while calls are accepted; then the port closes, accepted calls are answered, the process exits.


def test_rule_10_sigterm_drains_in_the_stated_order(start: Start) -> None:
    """First not ready, but alive and accepting calls; then the port closes, accepted calls are answered, and the process exits."""
    server = start("--drain-seconds", LONG)
    assert ask(server.url).status_code == 200
    sent_before_drain = HalfSent(server.url)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as kept:
        assert kept.get("/health/live").status_code == 200

        server.process.send_signal(signal.SIGTERM)
        until(lambda: ask(server.url).status_code == 503, "not ready after SIGTERM")
        assert ask(server.url).json() == {"ready": False}
        assert ask(server.url, path="/health/live").status_code == 200
        assert ask(server.url, path="/health/startup").status_code == 200
        assert attend(server.url).status_code == 200
        assert kept.post("/attend", json=QUERY).status_code == 200
        sent_while_draining = HalfSent(server.url)
        assert ask(server.url).status_code == 503

    server.process.send_signal(signal.SIGTERM)  # a second one skips the rest of the wait
    until(lambda: not connects(server.url), "the port is closed")
    assert server.process.poll() is None
    answers = [half_sent.finish() for half_sent in (sent_before_drain, sent_while_draining)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0] == answers[1]
    assert json.loads(answers[0][1])["fully_masked_rows"] == 0
    assert server.process.wait(PATIENCE) == 0
    log = "".join(server.log)
    assert "Traceback" not in log
    assert "exceeded" not in log


def test_rule_10_without_a_drain_delay_requests_are_refused_at_once(start: Start) -> None:
    """With --drain-seconds 0, the first SIGTERM closes the port; an accepted call is still answered."""
    server = start("--drain-seconds", "0")
    half_sent = HalfSent(server.url)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not connects(server.url), "the port is closed")
    assert half_sent.finish()[0] == 200
    assert server.process.wait(PATIENCE) == 0


def test_rule_10_sigint_does_not_wait(start: Start) -> None:
    """Ctrl-C in a terminal skips the drain, since a person waits; an accepted call is still answered."""
    server = start("--drain-seconds", LONG)
    half_sent = HalfSent(server.url)
    server.process.send_signal(signal.SIGINT)
    until(lambda: not connects(server.url), "the port is closed")
    assert half_sent.finish()[0] == 200
    assert server.process.wait(PATIENCE) == 130
    assert "Traceback" not in "".join(server.log)


def test_rule_10_a_call_that_never_ends_is_abandoned(start: Start) -> None:
    """The server exits `shutdown_seconds` after the port has closed, even if the rest of a request never arrives."""
    server = start("--drain-seconds", "0", "--shutdown-seconds", "1")
    half_sent = HalfSent(server.url)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    half_sent.connection.close()


def test_rule_10_a_call_that_takes_too_long_is_refused() -> None:
    """A caller that still waits when the time for answers is over gets 503, and the log has the request; it has no traceback."""
    server = fork_server("--drain-seconds", "0", "--shutdown-seconds", "1", before=STUCK_DEVICE)
    batches = counted(server.url, "attend_batch_calls_count")
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server.url, "POST", "/attend", json=QUERY | {"reproducible": True})
        until(lambda: counted(server.url, "attend_batch_calls_count") > batches, "computed")
        server.process.send_signal(signal.SIGTERM)
        refused = reply.result()
    assert (refused.status_code, refused.headers["content-type"]) == (503, "application/problem+json")
    assert refused.json()["detail"] == "the server stopped before the request was answered"
    assert int(refused.headers["retry-after"]) >= 1
    assert server.process.wait(PATIENCE) == 0
    assert [event["reason"] for event in events(server, "request") if event["path"] == "/attend" and event["status"] == 503] == ["NotReady"]
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize(
    ("leaves", "number", "status"), [(True, signal.SIGTERM, 0), (False, signal.SIGINT, 130)], ids=["caller left", "caller waits, Ctrl-C"]
)
def test_rule_10_a_computation_that_never_ends_is_left_behind(leaves: bool, number: signal.Signals, status: int) -> None:
    """No thread can be stopped; the process exits in its time, with its usual status, and says which threads still worked."""
    server = fork_server("--shutdown-seconds", "1", before=STUCK_DEVICE)
    host, port = server.url.removeprefix("http://").split(":")
    batches = counted(server.url, "attend_batch_calls_count")
    body = json.dumps(QUERY | {"reproducible": True}).encode()  # not computed on the event loop
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: counted(server.url, "attend_batch_calls_count") > batches, "computed")
        if leaves:
            connection.close()
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE) == status
    assert [event["threads"] for event in events(server, "threads left behind")] == [["compute-cpu_0"]]
    assert events(server, "stopped")
    assert "Traceback" not in "".join(server.log)


def test_rule_10_a_draining_server_ends_its_connections(start: Start) -> None:
    """Every reply after SIGTERM has `Connection: close`, so that no client sends a request on a connection that is being closed."""
    server = start("--drain-seconds", LONG)
    with httpx.Client(base_url=server.url) as client:
        assert "connection" not in client.get("/health/ready").headers
        server.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/health/ready").status_code == 503, "not ready after SIGTERM")
        assert client.get("/health/live").headers["connection"] == "close"
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(PATIENCE)


def test_rule_10_nothing_is_lost_under_load(start: Start) -> None:
    """Clients send calls without pause and stop a little after /health/ready returns 503, as a load balancer does. All get replies."""
    server, callers = start("--drain-seconds", "2"), 6
    answered: list[int] = []
    busy = threading.Barrier(callers + 1)

    def call() -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            for number in itertools.count():
                leaving = client.get("/health/ready").status_code == 503
                for _ in range(LATE if leaving else 1):
                    answered.append(client.post("/attend", json=QUERY).status_code)
                if leaving:
                    return
                if number == 5:
                    busy.wait()

    terminate_under_load(server, call, busy)
    assert set(answered) == {200}
    assert len(answered) >= (6 + LATE) * callers
    steps = ["draining", "stopping", "stopped"]
    assert [event["event"] for event in server.events if event["event"] in steps] == steps
    assert sum(event.get("path") == "/attend" and event["status"] == 200 for event in events(server, "request")) == len(answered)


def test_one_process_drains_on_sighup(start: Start) -> None:
    """As after SIGTERM: not ready first, then the accepted call is answered; exit status 0. A terminal may send SIGHUP twice."""
    server = start("--drain-seconds", LONG)
    half_sent = HalfSent(server.url)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: ask(server.url).status_code == 503, "not ready after SIGHUP")
    server.process.send_signal(signal.SIGHUP)
    assert attend(server.url).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert half_sent.finish()[0] == 200
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in "".join(server.log)


def test_the_servers_of_tests_are_forked_from_a_process_that_has_imported_torch(server: Server) -> None:
    """Each of them would otherwise import it, in two seconds."""
    parent = re.search(r"^PPid:\s(\d+)", Path(f"/proc/{server.process.pid}/status").read_text(), re.MULTILINE)
    assert parent is not None and int(parent[1]) != os.getpid()
    assert "libtorch" in Path(f"/proc/{parent[1]}/maps").read_text()
