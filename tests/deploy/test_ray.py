"""The application on a real Ray cluster of several nodes on this machine: the same replies; no call is lost when processes or nodes end."""

import asyncio
import os
import secrets
import socket
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from attend import errors
from attend.client import Client, Retries
from attend.settings import Settings
from support.waiting import until

with warnings.catch_warnings():  # Ray's warnings are Ray's
    warnings.simplefilter("ignore")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from attend.deploy.ray import RayShards, build


pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

PATIENCE = 60  # seconds
LIMIT = 6 << 20  # bytes: what the long calls below are predicted to take, less than twice
SETTINGS = {"replica_cpus": 0.5, "replicas": 2, "shards": 3, "access_log": False, "drain_seconds": 0.0, "shutdown_seconds": 5}
RNG = np.random.default_rng(0)
SHORT = RNG.standard_normal((2, 5, 64)).astype(np.float32)
LONG = RNG.standard_normal((1, 701, 64)).astype(np.float32)
WHERE = {"keys": RNG.random((1, 701)) < 0.2, "bias": RNG.standard_normal((701, 701)).astype(np.float32)}
LONG_CALLS = {
    "causal": {"causal": True},
    "a window": {"window": {"left": 300, "right": 2}},
    "masks and a bias": {"block_keys": WHERE["keys"], "bias": WHERE["bias"]},
    "lengths": {"valid_lens": [250], "fully_masked": "uniform"},
    "an offset": {"key": LONG[:, :600], "query_offset": -101, "causal": True},
}


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.leaver = made.add_node(num_cpus=2)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    yield made
    serve.shutdown()
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def url(cluster):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    serve.run(build(Settings(**SETTINGS, max_memory_bytes=LIMIT, session_memory=8 << 20)), name="attend")
    return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url):
    with Client(url, retries=Retries(times=30, longest=2.0), timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def embedded(server):
    with Client(server.url) as client:
        yield client


def replicas(name):
    found = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if f"#{name}#" in actor["name"] and "REPLICA" in actor["name"]]


def same(got, expected):
    assert list(got) == list(expected) and got.layer == expected.layer and got.fully_masked_rows == expected.fully_masked_rows
    for name in got:
        assert got[name].dtype == expected[name].dtype
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-6 * np.abs(expected[name]).max())


def test_replies_errors_ids_and_metrics_equal_those_of_one_process(client, embedded, url):
    same(client.attend(SHORT, causal=True), embedded.attend(SHORT, causal=True))
    for ask in (lambda c: c.attend(SHORT[..., :5]), lambda c: c.layer("none"), lambda c: c.attend(SHORT, scale="x")):
        refused = []
        for target in (client, embedded):
            with pytest.raises(errors.RequestError) as refusal:
                ask(target)
            refused.append(refusal.value)
        assert type(refused[0]) is type(refused[1]) and refused[0].problems == refused[1].problems
    answer = httpx.post(f"{url}/attend", json={"query": [[0] * 63]}, headers={"X-Request-Id": "mine-7"})
    assert answer.status_code == 422 and answer.json()["request_id"] == "mine-7"
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    assert answer.headers["content-type"] == "application/problem+json"
    # Each replica counts what it answered, and Ray chooses which one is asked: one of them has not answered anything, perhaps.
    until(lambda: "attend_requests_total{" in httpx.get(f"{url}/metrics").text, "the metrics of a replica that answered a request")
    assert client.ready() and client.layers() == embedded.layers()
    with pytest.raises(errors.LayerConflict, match=r"under Ray Serve, .*ATTEND_LAYERS"):
        client.put_layer("mine", {"d_model": 4, "num_heads": 2})


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_call_too_large_for_one_process_is_computed_by_several(client, embedded, name):
    fields = {
        "outputs": ["output", "attention_weights", "log_sum_exp"],
        "select": {"queries": [700, 3], "heads": [5, 0]},
        **LONG_CALLS[name],
    }
    plan = client.plan(LONG, **fields)
    assert plan.admitted and plan.memory_bytes > LIMIT
    same(client.attend(LONG, **fields), embedded.attend(LONG, **fields))


def test_a_call_too_large_for_all_processes_is_413(client):
    with pytest.raises(errors.TooLarge, match="max_memory_bytes"):
        client.attend(np.zeros((1, 9001, 64), np.float32), outputs=["output"])


def begin(url):
    return httpx.post(f"{url}/sessions", json={}, timeout=PATIENCE).json()["id"]


def step(url, session, expected_length):
    body = {"query": SHORT[0, :1].tolist(), "causal": True, "expected_length": expected_length}
    return httpx.post(f"{url}/sessions/{session}/attend", json=body, timeout=PATIENCE)


def begin_on_each_replica(url):
    """One new session on each replica."""
    found = {}
    until(lambda: found.update({(session := begin(url)).split(".")[1]: session}) or len(found) == 2, "sessions of two replicas")
    return list(found.values())


def test_requests_of_a_session_reach_its_replica(url):
    sessions = begin_on_each_replica(url)
    for i in range(7):
        for session in sessions:
            assert step(url, session, i).json()["session"] == {"id": session, "length": i + 1}
    for session in sessions:
        fork = httpx.post(f"{url}/sessions/{session}/fork", json={}, timeout=PATIENCE).json()["id"]
        assert fork.split(".")[1] == session.split(".")[1]
        file = httpx.get(f"{url}/sessions/{session}/cache", timeout=PATIENCE)
        put = httpx.put(f"{url}/sessions/{fork}/cache", content=file.content, headers={"content-type": file.headers["content-type"]})
        assert put.json()["length"] == 7
        look = {"query": SHORT[0].tolist(), "session": session}
        for _ in range(3):
            plan = httpx.post(f"{url}/attend/plan", json=look, headers={"X-Attend-Session": session}, timeout=PATIENCE)
            assert plan.status_code == 200, plan.text
        assert httpx.delete(f"{url}/sessions/{session}", timeout=PATIENCE).status_code == 204


def test_requests_of_a_sequence_reach_one_replica(url):
    for sequence in range(1, 7):
        query = {"name": "query", "shape": [1, 1, 64], "datatype": "FP32", "data": SHORT[0, 0].tolist()}
        for i in range(4):
            body = {"inputs": [query], "parameters": {"sequence_id": sequence, "sequence_start": i == 0, "sequence_end": i == 3}}
            headers = {"X-Attend-Session": str(sequence)}
            reply = httpx.post(f"{url}/v2/models/default/infer", json=body, headers=headers, timeout=PATIENCE)
            assert reply.status_code == 200, reply.text


def test_only_the_sessions_of_a_killed_replica_are_lost(url):
    gone, stays = begin_on_each_replica(url)
    (victim,) = (name for name in replicas("Attend") if gone.split(".")[1] in name)
    ray.kill(ray.get_actor(victim, namespace="serve"))
    until(lambda: step(url, gone, 0).status_code == 421, "no replica of that name")
    assert step(url, stays, 0).status_code == 200
    until(lambda: len(replicas("Attend")) == 2, "another replica")
    assert step(url, stays, 1).status_code == 200


def under_load(client, embedded, disturb):
    """Sends calls of both sizes from four threads during `disturb()` and after it; every reply is correct."""
    expected = {"short": embedded.attend(SHORT), "long": embedded.attend(LONG, outputs=["output"], causal=True)}
    over = threading.Event()

    def attend_or_repeat(query, **fields):
        """Ray's proxy may never answer a call that it passed to a replica that ended then. So the call is repeated after a timeout."""
        try:
            return client.attend(query, **fields)
        except errors.TimedOut:
            return client.attend(query, **fields)

    def ask(number):
        count = 0
        while not over.is_set() or count < 3:
            same(attend_or_repeat(SHORT), expected["short"])
            if number == 0:
                same(attend_or_repeat(LONG, outputs=["output"], causal=True), expected["long"])
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            disturb()
        finally:
            over.set()
        assert all(done.result() >= 3 for done in asking)


def test_no_call_is_lost_when_replicas_and_shards_are_killed(client, embedded):
    def kill():
        for name in ("Attend", "Shard"):
            victim = replicas(name)[0]
            ray.kill(ray.get_actor(victim, namespace="serve"))

    under_load(client, embedded, kill)


def test_no_call_is_lost_when_a_node_leaves(client, embedded, cluster):
    under_load(client, embedded, lambda: cluster.remove_node(cluster.leaver))
    assert client.ready()


class FailingHandle:
    """Shards that fail each time."""

    def __init__(self):
        self.compute, self.calls = self, 0

    async def remote(self, *_):
        self.calls += 1
        raise ray.exceptions.RayError("gone")


def test_after_the_last_attempt_there_is_no_pause(monkeypatch):
    """The caller gets the error at once."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("attend.deploy.ray.asyncio.sleep", sleep)
    handle = FailingHandle()
    with pytest.raises(errors.CapacityError, match="the shards for this call have failed"):
        asyncio.run(RayShards(handle, 1).compute(SimpleNamespace(name="default", fingerprint=""), [None], None))
    assert handle.calls == 5 and len(pauses) == 4
