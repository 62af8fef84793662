"""Triton's HTTP client against a real server."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from support.server import Server
from support.v2 import in_json, read

RNG = np.random.default_rng(29)
QUERY = RNG.standard_normal((2, 3, 6)).astype(np.float32)
KEY = RNG.standard_normal((2, 5, 6)).astype(np.float32)
Array = np.ndarray[Any, Any]


def tensor(name: str, array: Array, datatype: str = "FP32", binary: bool = True) -> Any:
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


@pytest.fixture
def client(v2_server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(v2_server.url.removeprefix("http://")) as made:
        yield made


@pytest.fixture(scope="module")
def want(v2: httpx.Client) -> dict[str, Array]:
    """The expected reply to the default request of these tests."""
    return read(v2.post("/v2/models/tiny/infer", json={"inputs": in_json(query=QUERY, key=KEY)})).arrays


def test_server_and_model_metadata(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("tiny") and client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("none") and not client.is_model_ready("tiny", "2")
    assert client.get_server_metadata()["name"] == "attend"
    assert client.get_model_metadata("tiny", "1")["inputs"][0] == {"name": "query", "datatype": "FP32", "shape": [-1, -1, 6]}
    assert client.get_model_config("tiny")["max_batch_size"] > 0


def test_default_options(client: Any, want: dict[str, Array]) -> None:
    """Inputs and outputs as bytes, no Content-Type."""
    reply = client.infer("tiny", [tensor("query", QUERY), tensor("key", KEY)])

    for name, array in want.items():
        np.testing.assert_allclose(reply.as_numpy(name), array, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inputs", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("outputs", [None, (True, True), (False, False), (True, False), (False, True)])
def test_inputs_and_outputs_in_bytes_and_json_can_be_mixed(
    client: Any, want: dict[str, Array], inputs: tuple[bool, ...], outputs: tuple[bool, ...] | None
) -> None:
    requested = outputs and [triton.InferRequestedOutput(name, binary_data=binary) for name, binary in zip(want, outputs, strict=True)]

    reply = client.infer("tiny", [tensor("query", QUERY, binary=inputs[0]), tensor("key", KEY, binary=inputs[1])], outputs=requested)

    for i, (name, array) in enumerate(want.items()):
        np.testing.assert_allclose(reply.as_numpy(name), array, rtol=0, atol=1e-6)
        assert ("data" in reply.get_output(name)) is (outputs is not None and not outputs[i])


@pytest.mark.parametrize(("request_coding", "response_coding"), [("gzip", "deflate"), ("deflate", "gzip"), (None, "gzip")])
def test_compression(client: Any, want: dict[str, Array], request_coding: str | None, response_coding: str | None) -> None:
    codings = {"request_compression_algorithm": request_coding, "response_compression_algorithm": response_coding}

    reply = client.infer("tiny", [tensor("query", QUERY), tensor("key", KEY, binary=False)], **codings)

    np.testing.assert_allclose(reply.as_numpy("output"), want["output"], rtol=0, atol=1e-6)


def test_bfloat16(client: Any, v2: httpx.Client) -> None:
    """As ml_dtypes provides it to numpy."""
    query = QUERY.astype(ml_dtypes.bfloat16)

    reply = client.infer("brain", [tensor("query", query, "BF16")], parameters={"reproducible": True})

    body = {"inputs": in_json(query=query), "parameters": {"reproducible": True}}
    by_hand = read(v2.post("/v2/models/brain/infer", json=body)).arrays
    assert reply.get_output("output")["datatype"] == "BF16"
    np.testing.assert_array_equal(reply.as_numpy("output"), by_hand["output"])


def test_tensors_without_elements(client: Any) -> None:
    reply = client.infer("tiny", [tensor("query", QUERY[:, :0]), tensor("key", KEY)])

    assert reply.as_numpy("output").shape == (2, 0, 6)


def test_parameters_id_priority_and_timeout(client: Any, v2: httpx.Client) -> None:
    window = {"causal": True, "window": json.dumps({"left": 0})}

    reply = client.infer("tiny", [tensor("query", QUERY)], parameters=window, request_id="7", priority=1, timeout=60_000_000)

    assert (reply.get_response()["id"], reply.get_response()["parameters"]["fully_masked_rows"]) == ("7", 0)
    np.testing.assert_array_equal(reply.as_numpy("attention_weights"), np.broadcast_to(np.eye(3), (2, 3, 3, 3)))
    with pytest.raises(InferenceServerException, match="deadline"):
        client.infer("tiny", [tensor("query", QUERY)], timeout=1)


def test_concurrent_requests(v2_server: Server, want: dict[str, Array]) -> None:
    """Asynchronous calls, and clients in several threads, with requests of different lengths."""
    failures: list[BaseException] = []

    def call(keys: int) -> None:
        try:
            with triton.InferenceServerClient(v2_server.url.removeprefix("http://"), concurrency=4) as client:
                inputs = [tensor("query", QUERY), tensor("key", KEY[:, :keys])]
                for handle in [client.async_infer("tiny", inputs) for _ in range(6)]:
                    reply = handle.get_result()
                    assert reply.as_numpy("attention_weights").shape == (2, 3, 3, keys)
                    if keys == 5:
                        np.testing.assert_allclose(reply.as_numpy("output"), want["output"], rtol=0, atol=1e-6)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=call, args=(keys,)) for keys in (1, 2, 5, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_the_asyncio_client(v2_server: Server, want: dict[str, Array]) -> None:
    async def test() -> None:
        async with triton_aio.InferenceServerClient(v2_server.url.removeprefix("http://")) as client:
            inputs = [tensor("query", QUERY), tensor("key", KEY)]
            for reply in await asyncio.gather(*(client.infer("tiny", inputs) for _ in range(8))):
                np.testing.assert_allclose(reply.as_numpy("output"), want["output"], rtol=0, atol=1e-6)
            assert (await client.get_model_repository_index())[0]["state"] == "READY"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.infer("none", [tensor("query", QUERY)]), 'expected a loaded layer .* got "none"'),
        (lambda c: c.infer("a/b", [tensor("query", QUERY)]), "nothing is served at"),
        (lambda c: c.infer("tiny", [tensor("query", QUERY[..., :5])]), "expected 6 values per query"),
        (lambda c: c.infer("tiny", [tensor("keys", KEY)]), 'expected key, .* got "keys", at /inputs/0/name'),
        (lambda c: c.infer("tiny", [tensor("query", QUERY)], outputs=[triton.InferRequestedOutput("logits")]), "/outputs/0"),
        (
            lambda c: c.infer("tiny", [tensor("query", QUERY)], outputs=[triton.InferRequestedOutput("output", class_count=3)]),
            "classification",
        ),
        (lambda c: c.infer("tiny", [tensor("query", QUERY)], parameters={"colour": 7}), "/parameters/colour"),
        (lambda c: c.infer("tiny", [tensor("query", np.array([b"a"], object), "BYTES")]), "BYTES"),
        (lambda c: c.get_trace_settings(), "nothing is served at"),
        (lambda c: c.get_system_shared_memory_status(), "nothing is served at"),
        (lambda c: c.load_model("x", config="{}"), "/parameters/config/d_model"),
        (lambda c: c.unload_model("none"), "none"),
    ],
)
def test_errors_have_status_and_message(client: Any, call: Any, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words) as caught:
        call(client)
    assert caught.value.status() in ("400", "404")


def test_repository_and_statistics(client: Any) -> None:
    client.load_model("loaded", config=json.dumps({"d_model": 6, "num_heads": 2}))
    try:
        assert {"name": "loaded", "version": "1", "state": "READY", "reason": ""} in client.get_model_repository_index()
        client.infer("loaded", [tensor("query", QUERY)])
        [statistics] = client.get_inference_statistics("loaded")["model_stats"]
        assert (statistics["inference_count"], statistics["execution_count"]) == (2, 1)
        assert len(client.get_inference_statistics()["model_stats"]) > 1
    finally:
        client.unload_model("loaded", unload_dependents=True)
    assert not client.is_model_ready("loaded")
