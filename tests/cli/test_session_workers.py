"""Sessions of several workers behind one port: a request reaches the worker that has its session, whichever one accepts it.

A connection belongs to the worker that accepted it, so each caller here keeps the one connection that it opened while only that worker ran.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from support.grpc_calls import address_of
from support.processes import LONG, Start, ask, counted, events, only, several_workers, state, until, workers_of
from support.server import Server, start_server
from support.waiting import PATIENCE

from service.web.keys import make_key, write_keys
from service.wire.safetensors import write_tensors

RNG = np.random.default_rng(11)
SAFETENSORS = "application/vnd.safetensors"
FLAGS = ("--workers", "2", "--session-memory", str(64 << 20), "--max-body-bytes", str(1 << 20))
WIDTH = 64
STEPS = 'attend_requests_total{endpoint="/sessions/{id}/attend",status="200"}'
Callers = dict[int, httpx.Client]  # process id of a worker -> a caller whose connection that worker has


@contextmanager
def callers_of(server: Server, **headers: str) -> Iterator[Callers]:
    with ExitStack() as stack:
        found, parent = {}, server.process.pid
        for worker in workers_of(parent):
            limits = httpx.Limits(max_connections=1, keepalive_expiry=3600)
            found[worker] = stack.enter_context(httpx.Client(base_url=server.url, timeout=PATIENCE, limits=limits, headers=headers))
            with only(worker, parent):
                assert found[worker].get("/health/live").status_code == 200
        yield found


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    server = start_server(*FLAGS, "--grpc-port", "0")
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    yield server
    server.stop()


@pytest.fixture
def both(pair: Server) -> Iterator[list[httpx.Client]]:
    """A caller at each worker."""
    with callers_of(pair) as callers:
        yield list(callers.values())


def begin(caller: httpx.Client, **fields: Any) -> str:
    return str(caller.post("/sessions", json=fields).json()["id"])


def step(caller: httpx.Client, session: str, rows: Any, timeout: str = "60", **fields: Any) -> httpx.Response:
    body = {"query": rows.tolist(), "causal": True, "outputs": ["output"], **fields}
    return caller.post(f"/sessions/{session}/attend", json=body, headers={"X-Request-Timeout": timeout})


def refusal(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["detail"])


@several_workers
def test_each_kind_of_request_gives_the_same_at_each_worker(both: list[httpx.Client]) -> None:
    rows = RNG.standard_normal((13, WIDTH)).astype(np.float32).round(3)
    owner = both[0]
    parent = begin(owner)
    step(owner, parent, rows[:11]).raise_for_status()
    body = b"".join(map(bytes, write_tensors({"query": rows[12:]}, {"request": '{"causal": true, "outputs": ["output"]}'})))
    look = {"query": rows[3:5].tolist(), "query_offset": 3, "causal": True}
    answers = []
    for caller in both:
        fork = caller.post(f"/sessions/{parent}/fork", json={"length": None}, headers={"x-request-id": "mine"})
        assert fork.status_code == 201 and fork.headers.get_list("x-request-id") == ["mine"]
        session = fork.json()["id"]
        assert fork.headers["location"] == f"/sessions/{session}"
        seen: list[Any] = [step(caller, session, rows[11:12], expected_length=11).json()["output"]]
        binary = caller.post(f"/sessions/{session}/attend", content=body, headers={"content-type": SAFETENSORS, "accept": SAFETENSORS})
        assert binary.headers["content-type"] == SAFETENSORS
        seen.append(binary.content.replace(session.encode(), b""))
        named = {**look, "session": session}
        seen.append(caller.post("/attend/analysis", json={**named, "metrics": ["entropy"]}).json())
        seen.append(caller.post("/attend/plan", json=named).json())
        figure = caller.post("/attend/figure", json={**named, "figure": {"kind": "head", "format": "svg"}})
        assert figure.headers["content-type"].startswith("image/svg")
        seen.append(figure.text.count("<text"))
        seen.append(caller.get(f"/sessions/{session}/cache").content)
        head = caller.head(f"/sessions/{session}")
        assert head.status_code == 200 and not head.content and int(head.headers["content-length"]) > 0
        seen.append(caller.patch(f"/sessions/{session}", json={"length": 7}).json()["length"])
        put = caller.put(f"/sessions/{session}/cache", content=seen[5], headers={"content-type": SAFETENSORS})
        seen.append(put.json()["length"])
        seen.append(caller.get(f"/sessions/{session}").json()["length"])
        assert caller.delete(f"/sessions/{session}").status_code == 204
        assert "it was deleted" in refusal(caller.get(f"/sessions/{session}"), 410)
        answers.append(seen)

    assert answers[0] == answers[1]
    assert answers[0][6:] == [7, 13, 13]


@several_workers
def test_a_body_sent_in_pieces_reaches_the_session(both: list[httpx.Client]) -> None:
    """With a length and without one, and larger than what is read at once."""
    rows = RNG.standard_normal((1500, WIDTH)).astype(np.float32)
    body = b"".join(map(bytes, write_tensors({"query": rows}, {"request": '{"outputs": ["output"]}'})))
    session = begin(both[0])
    for expected, caller in enumerate(both, 1):
        pieces = (body[i : i + 70_000] for i in range(0, len(body), 70_000))
        reply = caller.post(f"/sessions/{session}/attend", content=pieces, headers={"content-type": SAFETENSORS})
        assert reply.status_code == 200 and f'"length": {1500 * expected}' in reply.text.replace('":', '": ').replace("  ", " ")


@several_workers
def test_refusals_are_those_of_the_worker_that_has_the_session(both: list[httpx.Client]) -> None:
    session = begin(both[0])
    step(both[0], session, RNG.standard_normal((5, WIDTH)))
    for caller in both:
        mismatch = step(caller, session, RNG.standard_normal((1, WIDTH)), expected_length=3)
        assert "expected 5, the length of the session, got 3" in refusal(mismatch, 412)
        assert mismatch.headers["content-type"] == "application/problem+json"
        assert "64 values per query" in refusal(step(caller, session, RNG.standard_normal((1, 63))), 422)
        assert "max_body_bytes" in refusal(caller.post(f"/sessions/{session}/attend", content=b"7" * (1 << 21)), 413)
        assert "X-Request-Timeout" in refusal(step(caller, session, RNG.standard_normal((1, WIDTH)), timeout="soon"), 422)
        assert "the id of a session" in refusal(caller.get(f"/sessions/{session[:-3]}abc"), 404)
        assert "the id of a session" in refusal(caller.post("/attend/plan", json={"query": [[0.0]], "session": "s.x"}), 404)
        assert caller.get(f"/sessions/{session}").json()["length"] == 5


@several_workers
def test_a_forwarded_request_is_logged_and_counted_once(pair: Server, both: list[httpx.Client]) -> None:
    session, before = begin(both[0]), counted(pair.url, STEPS)
    replies = [step(caller, session, RNG.standard_normal((1, WIDTH))) for caller in both]
    assert counted(pair.url, STEPS) == before + 2
    assert counted(pair.url, "attend_sessions") >= 1
    for reply in replies:
        identity = reply.headers["x-request-id"]
        until(lambda identity=identity: pair.access_line(identity), "logged")
        (line,) = [event for event in events(pair, "request") if event["request_id"] == identity]
        assert line["status"] == 200 and line["client"] == "127.0.0.1" and line["keys"] == replies.index(reply) + 1


@several_workers
def test_the_list_has_the_sessions_of_all_workers(both: list[httpx.Client]) -> None:
    before = {document["id"] for document in both[0].get("/sessions").json()["sessions"]}
    own = {begin(caller) for caller in both}
    for caller in both:
        listed = [document["id"] for document in caller.get("/sessions").json()["sessions"]]
        assert len(listed) == len(set(listed))
        assert set(listed) == before | own
        assert caller.head("/sessions").status_code == 200
    for session in own:
        assert both[0].delete(f"/sessions/{session}").status_code == 204
    assert {document["id"] for document in both[1].get("/sessions").json()["sessions"]} == before


@several_workers
def test_two_callers_at_two_workers_take_turns(both: list[httpx.Client]) -> None:
    session, count = begin(both[0]), 23

    def steps(caller: httpx.Client) -> list[int]:
        replies = [step(caller, session, RNG.standard_normal((1, WIDTH))) for _ in range(count)]
        return [reply.json()["session"]["length"] for reply in replies]

    with ThreadPoolExecutor(2) as threads:
        lengths = list(threads.map(steps, both))
    assert sorted(lengths[0] + lengths[1]) == list(range(1, 2 * count + 1))
    assert all(lengths[i] == sorted(lengths[i]) for i in range(2))


@several_workers
def test_a_deadline_ends_the_wait_for_another_worker(pair: Server) -> None:
    with callers_of(pair) as callers:
        (stays, caller), (_, owner) = callers.items()
        session = begin(owner)
        with only(stays, pair.process.pid):
            assert "deadline" in refusal(step(caller, session, RNG.standard_normal((1, WIDTH)), timeout="0.3"), 504)
            look = {"query": [[0.5] * WIDTH], "session": session}
            late = caller.post("/attend/plan", json=look, headers={"X-Request-Timeout": "0.3"})
            assert "deadline" in refusal(late, 504)
        assert step(caller, session, RNG.standard_normal((1, WIDTH))).status_code == 200


@several_workers
@pytest.mark.parametrize("protocol", ["http", "grpc", "stream"])
def test_sequences_equal_one_causal_call(pair: Server, both: list[httpx.Client], protocol: str) -> None:
    """The worker of a sequence is a hash of its id, so eight sequences reach both workers."""
    rows = RNG.standard_normal((4, WIDTH)).astype(np.float32)
    body = {"query": rows.tolist(), "causal": True, "outputs": ["output"]}
    whole = both[0].post("/attend", json=body).json()["output"]
    library: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    address = pair.url.removeprefix("http://") if protocol == "http" else address_of(pair)
    clients = [library.InferenceServerClient(address) for _ in range(3)]  # connections that any worker accepts
    queue: Queue[Any] = Queue()
    if protocol == "stream":
        clients[0].start_stream(lambda result, error: queue.put((result, error)))

    def infer(i: int, sequence: int, **flags: bool) -> Any:
        query = library.InferInput("query", [1, 1, WIDTH], "FP32")
        query.set_data_from_numpy(rows[None, i : i + 1])
        given = {"sequence_id": sequence, "parameters": {"causal": True}, **flags}
        if protocol == "stream":
            clients[0].async_stream_infer("default", [query], **given)
            result, error = queue.get(timeout=PATIENCE)
            if error is not None:
                raise error
            return result.as_numpy("output")[0]
        return clients[i % 3].infer("default", [query], **given).as_numpy("output")[0]

    try:
        for sequence in range(1, 9):
            replies = [infer(i, sequence, sequence_start=i == 0, sequence_end=i == 3) for i in range(4)]
            np.testing.assert_allclose(np.concatenate(replies), whole, rtol=0, atol=1e-6 * np.abs(whole).max())
            with pytest.raises(Exception, match="has begun"):
                infer(1, sequence)
    finally:
        for client in clients:
            client.close()


@several_workers
def test_keys_are_checked_at_each_worker(tmp_path: Path) -> None:
    secrets, keys = zip(*(make_key(name, ("infer", "metrics")) for name in ("one", "two")), strict=True)
    file = tmp_path / "keys.txt"
    write_keys(file, keys)
    server = start_server(*FLAGS, "--keys-file", str(file))
    try:
        until(lambda: len(events(server, "ready")) == 2, "both ready")
        with callers_of(server) as callers:
            first, second = callers.values()
            one, two = ({"authorization": f"Bearer {secret}"} for secret in secrets)
            session = first.post("/sessions", json={}, headers=one).json()["id"]
            for caller in (first, second):
                assert caller.get(f"/sessions/{session}", headers=one).status_code == 200
                assert caller.get(f"/sessions/{session}", headers=two).status_code == 404
                assert caller.get(f"/sessions/{session}").status_code == 401
                assert len(caller.get("/sessions", headers=one).json()["sessions"]) == 1
                assert caller.get("/sessions", headers=two).json()["sessions"] == []
                look = {"query": [[0.5] * WIDTH], "session": session}
                assert caller.post("/attend/plan", json=look, headers=one).status_code == 200
                assert caller.post("/attend/analysis", json={**look, "metrics": ["entropy"]}, headers=two).status_code == 404
    finally:
        server.stop()


@several_workers
def test_only_the_sessions_of_a_killed_worker_are_lost(start: Start) -> None:
    """Before the replacement is started, and afterwards."""
    server = start(*FLAGS)
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    rows = RNG.standard_normal((3, WIDTH))
    with callers_of(server) as callers:
        (killed, lost), (_, caller) = callers.items()
        gone, stays = begin(lost), begin(caller)
        step(caller, gone, rows[:1]).raise_for_status()

        def part(sequence: int, **flags: bool) -> httpx.Response:
            query = {"name": "query", "shape": [1, 1, WIDTH], "datatype": "FP32", "data": rows[0].tolist()}
            parameters = {"sequence_id": sequence, **flags}
            return caller.post("/v2/models/default/infer", json={"inputs": [query], "parameters": parameters})

        assert all(part(sequence, sequence_start=True).status_code == 200 for sequence in range(1, 9))
        os.kill(server.process.pid, signal.SIGSTOP)  # so that it starts no other worker yet
        os.kill(killed, signal.SIGKILL)
        until(lambda: state(killed) in ("", "Z"), "dead")
        until(lambda: step(caller, gone, rows[:1]).status_code != 503, "its sockets are closed")  # 503: it ended before it replied
        assert "its process was restarted" in refusal(step(caller, gone, rows[:1]), 410)
        assert "its process was restarted" in refusal(caller.get(f"/sessions/{gone}/cache"), 410)
        assert step(caller, stays, rows[:1]).status_code == 200
        assert len(caller.get("/sessions").json()["sessions"]) >= 1
        replies = [part(sequence) for sequence in range(1, 9)]
        lost_parts = [i for i, reply in enumerate(replies) if reply.status_code != 200]
        assert 0 < len(lost_parts) < 8
        for i in lost_parts:
            assert replies[i].status_code == 503 and int(replies[i].headers["retry-after"]) > 0
            assert "is being started" in replies[i].json()["error"]

        os.kill(server.process.pid, signal.SIGCONT)
        until(lambda: len(events(server, "ready")) == 3, "ready again")
        until(lambda: part(lost_parts[0] + 1, sequence_start=True).status_code == 200, "a sequence at the new worker")
        assert "its process was restarted" in refusal(step(caller, gone, rows[:1]), 410)
        assert step(caller, stays, rows[1:]).json()["session"]["length"] == 3
        (replacement,) = set(workers_of(server.process.pid)) - callers.keys()
        with callers_of(server) as now:
            assert now[replacement].get(f"/sessions/{stays}").json()["length"] == 3
            assert "its process was restarted" in refusal(now[replacement].get(f"/sessions/{gone}"), 410)


@several_workers
def test_sessions_of_a_worker_that_is_replaced_can_be_exported(start: Start) -> None:
    """Through the other worker and the new one, while the old one drains; the same bits follow after the import."""
    server = start(*FLAGS, "--drain-seconds", LONG)
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    rows = RNG.standard_normal((9, WIDTH))
    with callers_of(server) as callers:
        old, _ = callers
        session = begin(callers[old])
        step(callers[old], session, rows[:7]).raise_for_status()
    server.process.send_signal(signal.SIGHUP)
    until(lambda: events(server, "retiring"), "the old worker drains")
    with callers_of(server) as callers:
        replacement = callers[max(callers)]
        file = replacement.get(f"/sessions/{session}/cache").content
        expected = step(replacement, session, rows[7:]).json()["output"]
        os.kill(old, signal.SIGTERM)
        until(lambda: events(server, "draining"), "its drain")
        os.kill(old, signal.SIGTERM)  # skips the drain
        until(lambda: state(old) in ("", "Z"), "the old worker has ended")
        assert "its process was restarted" in refusal(replacement.get(f"/sessions/{session}"), 410)
        copy = begin(replacement)
        assert replacement.put(f"/sessions/{copy}/cache", content=file, headers={"content-type": SAFETENSORS}).json()["length"] == 7
        for caller in (caller for worker, caller in callers.items() if worker != old):
            fork = caller.post(f"/sessions/{copy}/fork", json={}).json()["id"]
            assert step(replacement, fork, rows[7:]).json()["output"] == expected
    workers = workers_of(server.process.pid)
    server.process.kill()  # its drain would take too long
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


@several_workers
def test_a_temporary_folder_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    """No Unix socket can be created in it. Without sessions none is needed."""
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    command = [sys.executable, "-m", "service", "serve", "--port", "0", *FLAGS]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "attend serve: sessions of several workers need a $TMPDIR of at most" in done.stderr


@several_workers
def test_sessions_can_be_exported_until_the_server_closes(start: Start) -> None:
    server = start(*FLAGS, "--drain-seconds", LONG)
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    with callers_of(server) as callers:
        sessions = [begin(caller) for caller in callers.values()]
    server.process.send_signal(signal.SIGTERM)
    until(lambda: len(events(server, "draining")) == 2, "both drain")
    for session in sessions * 2:
        assert ask(server.url, path=f"/sessions/{session}/cache").status_code == 200
    for worker in workers_of(server.process.pid):
        os.kill(worker, signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
