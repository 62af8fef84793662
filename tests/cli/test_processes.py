"""Several workers behind one port under real signals: what SIGTERM, SIGHUP and SIGKILL do, and workers that cannot start.

No test waits for time to pass: a drain is so long that it never ends by itself, SIGSTOP keeps a worker from answering,
and the last byte of a request is not sent until later.
"""

import ast
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import httpx
import pytest
import uvicorn

from attend.cli.processes import Worker
from attend.serving.threads import usable_cores
from support.command import run_attend
from support.processes import (
    ATTENDED,
    LONG,
    PATIENCE,
    HalfSent,
    Start,
    ask,
    attend,
    connects,
    counted,
    events,
    kill_one,
    only,
    several_workers,
    state,
    terminate_under_load,
    until,
    workers_of,
)
from support.server import Server, start_server

# Workers


@pytest.fixture(scope="module")
def two_without_folder() -> Iterator[Server]:
    """Two workers behind one port, both ready."""
    server = start_server("--workers", "2")
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    yield server
    server.stop()


@several_workers
def test_all_workers_answer_and_their_metrics_are_summed(two_without_folder: Server) -> None:
    """Both give the same reply, and the metrics of each have the calls of both."""
    parent = two_without_folder.process.pid
    workers = workers_of(parent)
    documents, before = [], int(counted(two_without_folder.url, "attend_batch_calls_sum"))
    posts = counted(two_without_folder.url, ATTENDED)

    for worker in (*workers, workers[0]):
        with only(worker, parent):
            documents += [attend(two_without_folder.url).json() for _ in range(2)]
            assert counted(two_without_folder.url, ATTENDED) == posts + len(documents)
            assert counted(two_without_folder.url, "attend_batch_calls_sum") == before + len(documents)
            assert counted(two_without_folder.url, 'attend_phase_seconds_count{phase="compute"}') == posts + len(documents)
            assert counted(two_without_folder.url, "attend_layers") == counted(two_without_folder.url, "attend_ready") == 1
            assert counted(two_without_folder.url, "attend_device_memory_bytes") > 100e6  # of both

    assert len(documents) == 6
    assert all(document == documents[0] for document in documents)


@several_workers
def test_a_supervisor_does_not_load_torch(two_without_folder: Server) -> None:
    """It would take two seconds of each start, and 200 MB. Its workers do."""
    parent = two_without_folder.process.pid
    assert ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (parent, *workers_of(parent))] == [False, True, True]


@several_workers
def test_several_workers_without_a_folder_refuse_changes_of_layers(two_without_folder: Server) -> None:
    """The other workers would not have the change: each answers 409, and the layers are the same afterwards."""
    for worker in workers_of(two_without_folder.process.pid):
        with only(worker, two_without_folder.process.pid):
            put = ask(two_without_folder.url, "PUT", "/layers/new", json={"spec": {"d_model": 4, "num_heads": 2}})
            assert put.status_code == 409
            assert put.headers["content-type"] == "application/problem+json"
            assert "workers" in put.json()["detail"]
            assert ask(two_without_folder.url, "DELETE", "/layers/default").status_code == 409
            assert [layer["name"] for layer in ask(two_without_folder.url, path="/layers").json()["layers"]] == ["default"]


@several_workers
def test_rule_11_the_number_of_threads_of_each_worker_is_logged(two_without_folder: Server) -> None:
    """The log says at the start how many threads each worker gets, the index says the same; together they do not exceed the cores."""
    index = ask(two_without_folder.url, path="/").json()
    (listening,) = events(two_without_folder, "listening")
    assert index["workers"] == listening["workers"] == 2
    assert index["threads"] == listening["threads"] == usable_cores() // 2
    assert {event["threads"] for event in events(two_without_folder, "ready")} == {listening["threads"]}


@several_workers
def test_a_killed_worker_is_replaced(two_without_folder: Server) -> None:
    """The other worker serves meanwhile, no count is lost, and the replacement gives the same answer as the killed worker."""
    answer = attend(two_without_folder.url).json()
    before, ready = counted(two_without_folder.url, ATTENDED), len(events(two_without_folder, "ready"))
    stays, replacement = kill_one(two_without_folder)
    with only(stays, two_without_folder.process.pid):
        for _ in range(3):
            assert attend(two_without_folder.url).json() == answer
        assert counted(two_without_folder.url, ATTENDED) == before + 3
    until(lambda: len(events(two_without_folder, "ready")) > ready, "ready again")
    with only(replacement, two_without_folder.process.pid):
        assert attend(two_without_folder.url).json() == answer
        assert counted(two_without_folder.url, ATTENDED) == before + 4


def sleeping_worker() -> Worker:
    """A worker that never answers the supervisor."""
    worker = Worker(uvicorn.Config("nowhere:app"), [])
    worker.process = get_context("spawn").Process(target=time.sleep, args=(3600,))
    worker.start()
    return worker


def test_a_worker_that_dies_during_a_ping_is_detected_at_once() -> None:
    """A worker may be killed while the supervisor waits for its answer to a ping: it is replaced without waiting for the timeout."""
    worker = sleeping_worker()
    threading.Timer(0.1, worker.process.kill).start()
    assert not worker.ping(timeout=3600)
    worker.join()


def test_a_signalled_supervisor_does_not_wait_for_an_unresponsive_worker() -> None:
    worker = sleeping_worker()
    assert worker.ping(3600, lambda: True)
    worker.kill()
    worker.join()


@several_workers
def test_rule_10_a_stopped_worker_does_not_delay_the_shutdown(start: Start) -> None:
    """The other workers exit as usual, and the supervisor kills it in the end."""
    server = start("--workers", "2", "--drain-seconds", "0", "--shutdown-seconds", "1")
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    still, other = workers_of(server.process.pid)
    os.kill(still, signal.SIGSTOP)
    until(lambda: state(still) == "T", "stopped")
    server.process.terminate()
    until(lambda: state(other) in ("", "Z"), "the other has left")
    assert server.process.wait(PATIENCE) == 0
    until(lambda: [event["pid"] for event in events(server, "worker killed")] == [still], "the log names it")
    assert not state(still)


@several_workers
def test_a_worker_accepts_no_calls_before_it_is_ready(two_without_folder: Server) -> None:
    """A restarted worker accepts no connections until its layers are loaded, so a ready server never replies 503."""
    answer, ready = attend(two_without_folder.url).json(), len(events(two_without_folder, "ready"))
    _, replacement = kill_one(two_without_folder)
    with only(replacement, two_without_folder.process.pid):
        answered = attend(two_without_folder.url)
    until(lambda: len(events(two_without_folder, "ready")) > ready, "ready again")
    assert answered.status_code == 200, answered.text
    assert answered.json() == answer


def test_each_line_of_the_log_is_flushed() -> None:
    """Several processes share one standard error: a line written in two pieces could be split by a line of another process."""
    script = """
import io, sys

class Stream(io.StringIO):
    def write(self, text):
        pieces.append(text)
        return len(text)

pieces, real, sys.stderr = [], sys.stderr, Stream()
import structlog
from attend.cli.logs import configure_logs
for log_format in ("json", "console"):
    configure_logs(log_format, "info")
    structlog.get_logger("attend").info("said", number=log_format)
sys.stderr = real
print(pieces)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    pieces = ast.literal_eval(done.stdout)
    assert len(pieces) == 2, pieces
    assert all(piece.endswith("\n") and "said" in piece for piece in pieces)


@several_workers
def test_rule_10_several_workers_drain_on_sigterm(start: Start) -> None:
    """SIGTERM to the supervisor drains every worker: not ready, but accepting calls; the port closes; accepted calls are answered."""
    server = start("--workers", "2", "--drain-seconds", LONG, "--shutdown-seconds", "4")
    parent = server.process.pid
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    workers = workers_of(parent)
    half_sent = []
    for worker in workers:
        with only(worker, parent):
            half_sent.append(HalfSent(server.url))

    server.process.send_signal(signal.SIGTERM)
    for worker in workers:
        with only(worker, parent):
            until(lambda: ask(server.url).status_code == 503, "not ready after SIGTERM")
            assert attend(server.url).status_code == 200

    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    assert half_sent[0].finish()[0] == 200
    until(lambda: not connects(server.url), "the port is closed")
    assert half_sent[1].finish()[0] == 200, "the port stayed open without a process that serves it, until it was too late for this call"
    assert server.process.wait(PATIENCE) == 0
    assert not any(map(state, workers))
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize(
    "flags",
    [
        ("--workers", str(usable_cores() + 1)),
        ("--threads", str(usable_cores() + 1)),
        ("--workers", "2", "--threads", str(usable_cores())),
    ],
    ids=["workers", "threads", "their product"],
)
def test_rule_11_more_threads_than_cores_are_refused(flags: tuple[str, ...]) -> None:
    """Before a socket is opened, in one line with the number of cores, with the exit status of a usage error."""
    done = run_attend("serve", "--port", "0", *flags)
    message = done.stderr.decode()
    assert done.returncode == 2
    assert message.startswith("attend serve: ")
    assert f"{usable_cores()} cores" in message
    assert message.count("\n") == 1
    assert not done.stdout


@several_workers
def test_sigint_ends_several_workers_with_the_status_of_one(start: Start) -> None:
    server = start("--workers", "2", "--drain-seconds", LONG)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 130
    assert "Traceback" not in "".join(server.log)


@several_workers
def test_rule_10_no_connection_is_reset_when_workers_exit(start: Start) -> None:
    """Callers open a connection for each call, without pause, and ignore readiness: each is answered, or finds the port closed.

    Linux resets a connection whose handshake ends between the last `accept` and the closing of the port, which may happen to one.
    """
    server, callers = start("--workers", "2", "--drain-seconds", "1"), 6
    busy = threading.Barrier(callers + 1)
    ends: list[str] = []

    def call() -> None:
        for number in itertools.count():
            try:
                assert attend(server.url).status_code == 200
            except httpx.TransportError as error:
                ends.append(str(error))
                return
            if number == 5:
                busy.wait()

    terminate_under_load(server, call, busy)
    assert {*ends} <= {"[Errno 111] Connection refused", "[Errno 104] Connection reset by peer"}
    assert ends.count("[Errno 111] Connection refused") >= callers - 1


# Workers that cannot start


def break_folder(path: Path) -> Path:
    """Makes a folder of layers unusable for processes that start. Returns the path whose removal makes it usable again."""
    broken = path / ".broken.part"  # the name of an unfinished file
    broken.mkdir()
    return broken


def test_a_server_that_cannot_load_its_layers_exits(tmp_path: Path) -> None:
    """With the reason and an exit status, as with several workers."""
    break_folder(tmp_path)
    command = [sys.executable, "-m", "attend", "serve", "--port", "0", "--layers-dir", str(tmp_path), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5 * PATIENCE)
    found = Server(None, log=done.stderr.splitlines(keepends=True))  # type: ignore[arg-type]  # it has ended
    assert done.returncode == 1
    assert "Is a directory" in events(found, "not ready")[0]["error"]
    assert [event["reason"] for event in events(found, "stopping")] == ["the layers cannot be loaded; the lines before this one say why"]


@several_workers
def test_a_server_whose_workers_cannot_start_exits(tmp_path: Path) -> None:
    """With the reason and an exit status, instead of starting workers for ever behind an open port."""
    break_folder(tmp_path)
    flags = ["--port", "0", "--workers", "2", "--layers-dir", str(tmp_path), "--log-format", "json", "--drain-seconds", "0"]
    command = [sys.executable, "-m", "attend", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5 * PATIENCE)
    found = Server(None, log=done.stderr.splitlines(keepends=True))  # type: ignore[arg-type]  # it has ended
    assert done.returncode == 1
    assert "Is a directory" in events(found, "not ready")[0]["error"]
    assert [event["reason"] for event in events(found, "stopping")] == ["a worker cannot start; the lines before this one say why"]
    assert len(events(found, "not ready")) <= 2


@several_workers
def test_a_failed_replacement_of_a_worker_is_repeated(start: Start, tmp_path: Path) -> None:
    """The other worker serves meanwhile, and the pauses grow."""
    server = start("--workers", "2", "--layers-dir", str(tmp_path))
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    broken = break_folder(tmp_path)
    os.kill(workers_of(server.process.pid)[0], signal.SIGKILL)
    until(lambda: len(events(server, "worker cannot start")) >= 3, "three attempts")
    assert attend(server.url).status_code == 200
    pauses = [event["next_attempt_seconds"] for event in events(server, "worker cannot start")]
    assert pauses[0] == 0 and pauses == sorted(pauses) and pauses[-1] >= 1  # 0, 1, 2; or 0, 0, 1 if the other worker reports late
    broken.rmdir()
    until(lambda: len(events(server, "ready")) == 3, "a new worker")
    assert attend(server.url).status_code == 200


def test_several_workers_need_a_folder_for_their_metrics() -> None:
    """If no temporary folder is writable, shared memory is used; if that is not writable either, one line says what is missing."""
    script = """
import os, sys, tempfile
from attend.cli import processes
def no_folder():
    raise FileNotFoundError(2, "No usable temporary directory found")
processes.tempfile.gettempdir = no_folder
assert processes.shared_folder() == processes.SHARED_MEMORY
processes.SHARED_MEMORY = "/nowhere"
from attend.settings import Settings
import socket
try:
    processes.serve_processes(Settings(workers=2), 1, socket.create_server(("127.0.0.1", 0)))
except processes.typer.Exit as ended:
    sys.exit(ended.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "neither $TMPDIR, /tmp nor /nowhere is writable" in done.stderr


# SIGHUP, and a supervisor that dies


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """SIGHUP does to a server started here what it does by default, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@several_workers
def test_sighup_replaces_the_workers_and_removes_their_metrics(start: Start, default_sighup: None) -> None:
    """One by one; the server stays ready, a call to an old worker is answered, and gauges are those of living workers. Then the supervisor
    is killed: its workers answer their calls, close the port and exit."""
    server = start("--workers", "2", "--drain-seconds", "0", "--client-timeout", LONG)
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    old = workers_of(server.process.pid)
    calls = counted(server.url, ATTENDED)
    half_sent = HalfSent(server.url)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: events(server, "retiring"), "an old worker retires")
    assert ask(server.url).status_code == 200
    assert half_sent.finish()[0] == 200
    until(lambda: len(events(server, "worker replaced")) == 2, "both replaced")
    new = workers_of(server.process.pid)
    assert len(new) == 2 and not set(new) & set(old)
    assert not events(server, "worker died")
    for worker in new:
        with only(worker, server.process.pid):
            assert ask(server.url).status_code == 200 == attend(server.url).status_code
            assert counted(server.url, "attend_ready") == 1
            resident = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in new)
            assert counted(server.url, "attend_device_memory_bytes") < 1.2 * resident * os.sysconf("SC_PAGE_SIZE")
    assert counted(server.url, ATTENDED) == calls + 3

    half_sent = HalfSent(server.url)
    server.process.kill()
    until(lambda: len(events(server, "supervisor died")) == 2, "both workers notice")
    assert half_sent.finish()[0] == 200
    until(lambda: not any(map(state, new)), "no worker stays")
    assert not connects(server.url)
