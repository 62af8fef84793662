"""Sessions when things go wrong, over HTTP: no memory, deadlines, disconnected callers, other keys, shutdown; and steps in one batch."""

import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from attend.serving.service import Service
from attend.settings import Settings
from attend.web.keys import make_key, write_keys
from support.app import collecting_server, serve_service
from support.decoding import Gate
from support.processes import LONG, ask
from support.server import Server
from support.waiting import PATIENCE, until

RNG = np.random.default_rng(0)
SAFETENSORS = "application/vnd.safetensors"
FIRST_PAGE = 16 * 2 * 64 * 4  # bytes of the first page of a session of the default layer
MEMORY = {"session_memory": 100 * FIRST_PAGE, "access_log": False}


class Caller:
    """A client that begins and uses sessions."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url, self.http = url, httpx.Client(base_url=url, timeout=PATIENCE, headers=headers)

    def begin(self, **fields: Any) -> str:
        return str(self.http.post("/sessions", json=fields).json()["id"])

    def step(self, session: str, query: Any = None, timeout: str = "60", **fields: Any) -> httpx.Response:
        query = RNG.standard_normal((1, 64)) if query is None else query
        body = {"query": query.tolist(), "causal": True, "outputs": ["output"], **fields}
        return self.http.post(f"/sessions/{session}/attend", json=body, headers={"X-Request-Timeout": timeout})

    def length(self, session: str) -> int:
        return int(self.http.get(f"/sessions/{session}").json()["length"])

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


@pytest.fixture
def connect() -> Iterator[Callable[..., Caller]]:
    """Makes callers."""
    callers: list[Caller] = []

    def begin(url: str, **headers: str) -> Caller:
        callers.append(Caller(url, **headers))
        return callers[-1]

    yield begin
    for caller in callers:
        caller.http.close()


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, connect: Callable[..., Caller]) -> Iterator[tuple[Caller, Service, Gate]]:
    """A server whose steps wait, in the device's thread, until the test opens a gate."""
    gate = Gate(monkeypatch)
    with serve_service(Settings(batch_delay=0.0001, **MEMORY)) as (url, service):
        yield connect(url), service, gate
        gate.opened.set()


def calls_of(service: Service, session: str) -> int:
    assert service.engine.sessions is not None
    return service.engine.sessions[session].calls


def test_a_step_that_is_being_computed_is_answered_after_its_deadline(gated: tuple[Caller, Service, Gate]) -> None:
    """The next step of the session starts after it, and `expected_length` shows that it was appended. A waiting step is 504."""
    caller, service, gate = gated
    session = caller.begin()
    with ThreadPoolExecutor(4) as threads:
        started = service.clock()
        first = threads.submit(caller.step, session, timeout="0.2")
        gate.wait()
        waiting = threads.submit(caller.step, session, timeout="0.05")
        assert waiting.result().status_code == 504
        for method, path in (("DELETE", ""), ("GET", "/cache")):
            late = caller.http.request(method, f"/sessions/{session}{path}", headers={"X-Request-Timeout": "0.05"})
            assert late.status_code == 504, late.text
        behind = threads.submit(caller.step, session, expected_length=1)
        until(lambda: service.clock() > started + 0.2 and calls_of(service, session) == 2, "the deadline and another call")
        assert not first.done()
        gate.opened.set()
        replies = first.result(), behind.result()
    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.json()["session"]["length"] for reply in replies] == [1, 2]


def test_expected_length_shows_whether_the_step_of_a_disconnected_caller_was_appended(gated: tuple[Caller, Service, Gate]) -> None:
    """One caller disconnects while its step is computed, the other while its step waits."""
    caller, service, gate = gated
    session = caller.begin()
    body = json.dumps({"query": [[0.5] * 64]}).encode()
    address = caller.url.removeprefix("http://").split(":")
    connections = []
    for number in range(2):
        connections.append(socket.create_connection((address[0], int(address[1]))))
        head = f"POST /sessions/{session}/attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connections[-1].sendall(head.encode() + body)
        until(lambda count=number + 1: calls_of(service, session) == count, "a call")
    gate.wait()
    for connection in connections:
        connection.close()
    gate.opened.set()
    reply = caller.step(session, expected_length=0)
    assert reply.status_code == 412 and "the length of the session is 1, but expected_length is" in reply.json()["detail"]
    assert caller.step(session, expected_length=1).json()["session"]["length"] == 2


def test_a_session_outlives_a_deletion_whose_caller_has_disconnected(gated: tuple[Caller, Service, Gate]) -> None:
    """The caller disconnects while its deletion waits for a step."""
    caller, service, gate = gated
    session = caller.begin()
    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(caller.step, session)
        gate.wait()
        address = caller.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(f"DELETE /sessions/{session} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until(lambda: calls_of(service, session) == 2, "the deletion waits")
        caller.metric("attend_requests_total")  # a later request: the server has noticed before that the connection is closed
        gate.opened.set()
        assert step.result().status_code == 200
    assert caller.step(session).json()["session"]["length"] == 2  # it waits for the deletion


def test_two_callers_at_once_are_both_answered_in_one_order(connect: Callable[..., Caller]) -> None:
    with serve_service(Settings(**MEMORY)) as (url, _):
        caller = connect(url)
        session, rows = caller.begin(), RNG.standard_normal((12, 1, 64))
        with ThreadPoolExecutor(4) as threads:
            replies = list(threads.map(lambda row: caller.step(session, row).json(), rows))
        order = [reply["session"]["length"] - 1 for reply in replies]
        assert sorted(order) == list(range(12))
        again = caller.begin()
        for i in np.argsort(order):
            np.testing.assert_allclose(caller.step(again, rows[i]).json()["output"], replies[i]["output"], rtol=0, atol=1e-6)


def test_only_the_step_without_a_page_is_refused_in_a_batch(connect: Callable[..., Caller]) -> None:
    """Sessions in use do not end for its pages. The others are computed together, and equal to steps alone; a reproducible one is alone."""
    with collecting_server(64, session_memory=4 * FIRST_PAGE) as (url, collect), ThreadPoolExecutor(6) as threads:
        caller = connect(url)
        sessions, rows = [caller.begin() for _ in range(5)], RNG.standard_normal((5, 1, 64))
        counted = caller.metric("attend_batch_calls_count"), caller.metric("attend_batch_calls_sum")
        with collect(4):
            fields: list[dict[str, Any]] = [{}, {}, {}, {"reproducible": True}, {}]
            pending = [threads.submit(caller.step, *each, **field) for *each, field in zip(sessions, rows, fields, strict=True)]
            refused = next(iter(done(pending)))
        replies = [future.result() for future in pending]
        i = pending.index(refused)
        assert replies[i].status_code == 507 and "session_memory" in replies[i].json()["detail"]
        assert [caller.length(session) for session in sessions] == [int(j != i) for j in range(5)]
        batches = caller.metric("attend_batch_calls_count") - counted[0], caller.metric("attend_batch_calls_sum") - counted[1]
        assert batches == (3 if i != 3 else 2, 5)  # one is the batch of the call that occupied the device
        for session in sessions:
            caller.http.delete(f"/sessions/{session}")
        for j in set(range(5)) - {i}:
            alone = caller.step(caller.begin(), rows[j], **fields[j]).json()["output"]
            expected = np.array(alone)
            tolerance = 0.0 if j == 3 else 1e-6 * np.abs(expected).max()
            np.testing.assert_allclose(replies[j].json()["output"], expected, rtol=0, atol=tolerance)


def done(futures: list[Any]) -> list[Any]:
    """The first calls that are answered."""
    until(lambda: any(future.done() for future in futures), "an answer")
    return [future for future in futures if future.done()]


def test_a_layer_that_is_replaced_or_removed_ends_its_sessions(http: httpx.Client) -> None:
    spec = {"d_model": 4, "num_heads": 2}
    for name, ends in (("replaced", lambda: http.put("/layers/fleeting", json={"spec": {**spec, "seed": 9}})), ("removed", None)):
        http.put("/layers/fleeting", json={"spec": spec})
        session = http.post("/sessions", json={"layer": "fleeting"}).json()["id"]
        http.put("/layers/fleeting", json={"spec": spec})  # of the same fingerprint
        assert http.post(f"/sessions/{session}/attend", json={"query": [[1, 2, 3, 4]]}).status_code == 200
        (ends or (lambda: http.delete("/layers/fleeting")))()
        reply = http.post(f"/sessions/{session}/attend", json={"query": [[1, 2, 3, 4]]})
        assert reply.status_code == 410 and f"its layer was {name}" in reply.json()["detail"]


def test_capacity_bounds_rows_and_the_memory_of_forks_counts_once(http: httpx.Client, connect: Callable[..., Caller]) -> None:
    caller = connect(str(http.base_url))
    session = caller.begin(capacity=3)
    used, steps = caller.metric("attend_session_bytes"), caller.metric("attend_session_steps_total")
    assert caller.step(session, RNG.standard_normal((2, 64))).status_code == 200
    forks = [http.post(f"/sessions/{session}/fork", json={}).json() for _ in range(3)]
    assert caller.metric("attend_session_bytes") - used == caller.metric("attend_session_shared_bytes") == FIRST_PAGE
    assert {fork["bytes"] for fork in forks} == {FIRST_PAGE} and {fork["capacity"] for fork in forks} == {3}
    for name in (session, forks[0]["id"]):
        reply = caller.step(name, RNG.standard_normal((2, 64)))
        assert reply.status_code == 413 and "at most 3 rows (capacity)" in reply.json()["detail"]
        assert caller.step(name).json()["session"]["length"] == 3
    assert caller.metric("attend_session_bytes") - used == 3 * FIRST_PAGE
    counted = caller.metric('attend_sessions_ended_total{reason="deleted"}'), caller.metric("attend_sessions")
    for name in (session, *(fork["id"] for fork in forks)):
        http.delete(f"/sessions/{name}")
    assert caller.metric('attend_sessions_ended_total{reason="deleted"}') == counted[0] + 4
    assert caller.metric("attend_sessions") == counted[1] - 4
    assert caller.metric("attend_session_steps_total") == steps + 3
    assert caller.metric("attend_session_bytes") == used and caller.metric("attend_session_shared_bytes") == 0


def test_a_file_that_cannot_be_imported_leaves_the_session_as_it_was(connect: Callable[..., Caller]) -> None:
    """A wrong first row would show memory that was never written."""
    with serve_service(Settings(**{**MEMORY, "session_memory": 3 * FIRST_PAGE})) as (url, _):
        caller = connect(url)
        session, rows = caller.begin(), RNG.standard_normal((3, 64))
        caller.step(session, rows[:2])
        file = caller.http.get(f"/sessions/{session}/cache").content
        for old, new, status in (
            (b'"first":"0"', b'"first":"1"', 422),
            (b'"first":"0"', b'"first":"2"', 422),
            (b'"length":"2"', b'"length":"9"', 422),
            (b'"length":"2"', b'"length":"x"', 400),
            (b'"key"', b'"kex"', 422),
        ):
            assert old in file
            reply = caller.http.put(f"/sessions/{session}/cache", content=file.replace(old, new), headers={"content-type": SAFETENSORS})
            assert reply.status_code == status, reply.text
        assert caller.step(session, rows[2:], expected_length=2).status_code == 200


def test_keys_share_the_memory_and_see_only_their_own_sessions(tmp_path: Path, connect: Callable[..., Caller]) -> None:
    secrets, keys = zip(*(make_key(name, ("infer", "metrics")) for name in ("one", "two")), strict=True)
    file = tmp_path / "keys.txt"
    write_keys(file, keys)
    with serve_service(Settings(keys_file=file, session_memory=9 * FIRST_PAGE, access_log=False)) as (url, _):
        one, two = (connect(url, authorization=f"Bearer {secret}") for secret in secrets)
        own = two.begin()
        two.step(own)
        sessions = [one.begin() for _ in range(6)]
        assert all(one.step(session).status_code == 200 for session in sessions)
        ended = one.http.get(f"/sessions/{sessions[0]}")
        assert ended.status_code == 410 and "a session of the same owner needed its memory" in ended.json()["detail"]
        assert two.http.get(f"/sessions/{own}").status_code == 200
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/cache"), ("POST", "/fork"), ("POST", "/attend")):
            body = {} if method == "GET" or method == "DELETE" else {"json": {}}
            for session in (own, sessions[0]):
                other = one if session == own else two
                assert other.http.request(method, f"/sessions/{session}{path}", **body).status_code == 404
        assert len(one.http.get("/sessions").json()["sessions"]) == 5


def test_an_exported_cache_can_be_imported_into_the_next_server(start: Callable[..., Server], connect: Callable[..., Caller]) -> None:
    """It is exported while the server drains, and imported into the next one: the same bits follow. The old id is refused."""
    server, flags = start("--session-memory", "1000000", "--drain-seconds", LONG), ("--session-memory", "1000000")
    caller, rows = connect(server.url), RNG.standard_normal((9, 64))
    session = caller.begin()
    caller.step(session, rows[:7])
    server.process.send_signal(signal.SIGTERM)
    until(lambda: ask(server.url).status_code == 503, "not ready after SIGTERM")
    file = caller.http.get(f"/sessions/{session}/cache").content
    expected = caller.step(session, rows[7:]).json()["output"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0

    after = connect(start(*flags).url)
    ended = after.http.get(f"/sessions/{session}")
    assert ended.status_code == 410 and "its process was restarted" in ended.json()["detail"]
    new = after.begin()
    assert after.http.put(f"/sessions/{new}/cache", content=file, headers={"content-type": SAFETENSORS}).json()["length"] == 7
    assert after.step(new, rows[7:]).json()["output"] == expected


def test_the_removal_of_a_layer_refuses_only_the_steps_that_wait(gated: tuple[Caller, Service, Gate]) -> None:
    """The step that is being computed is answered, and the one that waits is refused. The memory is free afterwards."""
    caller, service, gate = gated
    caller.http.put("/layers/fleeting", json={"spec": {"d_model": 64, "num_heads": 8, "seed": 5}}).raise_for_status()
    row = RNG.standard_normal((1, 64))
    expected = caller.http.post("/attend", json={"layer": "fleeting", "query": row.tolist(), "outputs": ["output"]}).json()["output"]
    session = caller.begin(layer="fleeting")
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(caller.step, session, row)
        gate.wait()
        waiting = threads.submit(caller.step, session, row)
        until(lambda: calls_of(service, session) == 2, "a call that waits")
        assert caller.http.delete("/layers/fleeting").status_code == 204
        gate.opened.set()
    np.testing.assert_allclose(running.result().json()["output"], expected, rtol=0, atol=1e-6)
    assert waiting.result().status_code == 410 and "its layer was removed" in waiting.result().json()["detail"]
    assert caller.metric("attend_session_bytes") == caller.metric("attend_sessions") == 0


def test_idle_sessions_end_without_a_request(connect: Callable[..., Caller]) -> None:
    """Without any request to the server."""
    with serve_service(Settings(**MEMORY)) as (url, service):
        caller = connect(url)
        abandoned = [caller.begin(idle_seconds=0.01) for _ in range(50)]
        kept = caller.begin()
        assert service.engine.sessions is not None
        until(lambda: len(service.engine.sessions) == 1, "the end of idle sessions")
        ended = caller.http.get(f"/sessions/{abandoned[7]}")
        assert ended.status_code == 410 and "idle for longer than its idle_seconds" in ended.json()["detail"]
        assert caller.step(kept).status_code == 200 and caller.metric("attend_session_bytes") == FIRST_PAGE
