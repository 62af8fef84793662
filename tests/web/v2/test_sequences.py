"""The sequence extension: Triton's clients decode step by step over HTTP and gRPC, and the server keeps the keys and values."""

import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.grpc_calls import address_of
from support.server import Server

RNG = np.random.default_rng(3)
STEPS, WIDTH = (5, 1, 1, 3, 1), 64


@pytest.fixture(scope="module")
def stateful() -> Any:
    """A server with memory for sequences."""
    from support.server import fork_server

    running = fork_server("--grpc-port", "0", "--session-memory", "10000000")
    yield running
    running.stop()


@pytest.fixture(params=["http", "grpc"])
def infer(request: pytest.FixtureRequest, stateful: Server) -> Any:
    """Sends rows as a part of a sequence, and returns the output."""
    library: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]
    url = stateful.url.removeprefix("http://") if request.param == "http" else address_of(stateful)
    client = library.InferenceServerClient(url)

    def send(rows: Any, sequence: int | str, **flags: bool) -> Any:
        query = library.InferInput("query", [1, *rows.shape], "FP32")
        query.set_data_from_numpy(rows[None])
        output, parameters = library.InferRequestedOutput("output"), {"causal": True, "reproducible": True}
        reply = client.infer("default", [query], outputs=[output], sequence_id=sequence, parameters=parameters, **flags)
        return reply.as_numpy("output")[0]

    yield send
    client.close()


def test_a_sequence_equals_one_causal_call(infer: Callable[..., Any], stateful: Server) -> None:
    rows = RNG.standard_normal((sum(STEPS), WIDTH)).astype(np.float32)
    whole = httpx.post(f"{stateful.url}/attend", json={"query": rows.tolist(), "causal": True, "outputs": ["output"]}).json()["output"]
    outputs: dict[int | str, list[Any]] = {7: [], "seven": []}
    start = 0
    for i, count in enumerate(STEPS):  # two sequences, one after the other
        for sequence, parts in outputs.items():
            flags = {"sequence_start": i == 0, "sequence_end": i == len(STEPS) - 1}
            parts.append(infer(rows[start : start + count], sequence, **flags))
        start += count

    for parts in outputs.values():
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-6 * np.abs(whole).max())
    assert httpx.get(f"{stateful.url}/sessions").json()["sessions"] == []


def test_sequence_start_starts_and_restarts_a_sequence(infer: Callable[..., Any], stateful: Server) -> None:
    row = RNG.standard_normal((1, WIDTH)).astype(np.float32)
    with pytest.raises(Exception, match=r"a part that begins a sequence, or is of one that has begun, .* at /parameters/sequence_id"):
        infer(row, 12)
    first = infer(row, 12, sequence_start=True)
    infer(row, 12)
    np.testing.assert_array_equal(infer(row, 12, sequence_start=True, sequence_end=True), first)
    with pytest.raises(Exception, match="has begun"):
        infer(row, 12)


def test_a_refused_start_leaves_the_sequence_as_it_was(infer: Callable[..., Any]) -> None:
    rows = RNG.standard_normal((5, WIDTH)).astype(np.float32)
    whole = infer(rows, 1, sequence_start=True, sequence_end=True)
    infer(rows[:4], 2, sequence_start=True)
    with pytest.raises(Exception, match="64 values per query"):
        infer(rows[:1, :32], 2, sequence_start=True)
    np.testing.assert_allclose(infer(rows[4:], 2, sequence_end=True), whole[4:], rtol=0, atol=1e-6)
    with pytest.raises(Exception, match="64 values per query"):
        infer(rows[:1, :32], 3, sequence_start=True)
    with pytest.raises(Exception, match="has begun"):
        infer(rows[:1], 3)


def test_the_metadata_name_the_extension(stateful: Server) -> None:
    assert "sequence" in httpx.get(f"{stateful.url}/v2").json()["extensions"]


def test_a_server_without_session_memory_refuses_sequences(v2: httpx.Client, v2_server: Server) -> None:
    """The request is wrong for this server; nothing says that its model is missing."""
    request = {
        "inputs": [{"name": "query", "shape": [1, 1, 6], "datatype": "FP32", "data": [0.5] * 6}],
        "parameters": {"sequence_id": 3, "sequence_start": True},
    }
    reply = v2.post("/v2/models/tiny/infer", json=request)
    assert reply.status_code == 400 and "--session-memory" in reply.json()["error"] and "/parameters/sequence_id" in reply.json()["error"]
    with contextlib.closing(tritonclient.grpc.InferenceServerClient(address_of(v2_server))) as client:
        query = tritonclient.grpc.InferInput("query", [1, 1, 6], "FP32").set_data_from_numpy(np.full((1, 1, 6), 0.5, np.float32))
        with pytest.raises(InferenceServerException, match="--session-memory") as refused:
            client.infer("tiny", [query], sequence_id=3, sequence_start=True)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    request["parameters"] = {"sequence_end": True}
    reply = v2.post("/v2/models/tiny/infer", json=request)
    assert reply.status_code == 400 and "a sequence_id in addition" in reply.json()["error"]


def test_the_configuration_says_whether_models_keep_sequences(stateful: Server, start: Callable[..., Server]) -> None:
    """Triton's configuration has one of the two schedulers; perf_analyzer sends sequences where it is that of sequences."""
    with contextlib.closing(tritonclient.http.InferenceServerClient(stateful.url.removeprefix("http://"))) as client:
        over_http = client.get_model_config("default")
    with contextlib.closing(tritonclient.grpc.InferenceServerClient(address_of(stateful))) as client:
        over_grpc = client.get_model_config("default").config
    batching = {
        "max_sequence_idle_microseconds": 300_000_000,
        "oldest": {"max_candidate_sequences": 10_000, "max_queue_delay_microseconds": 0},
    }
    assert over_http["sequence_batching"] == batching and "dynamic_batching" not in over_http
    assert over_grpc.WhichOneof("scheduling_choice") == "sequence_batching"
    assert over_grpc.sequence_batching.max_sequence_idle_microseconds == 300_000_000
    assert over_grpc.sequence_batching.oldest.max_candidate_sequences == 10_000

    without = httpx.get(f"{start().url}/v2/models/default/config").json()
    assert "dynamic_batching" in without and "sequence_batching" not in without
