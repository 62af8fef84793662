"""The Open Inference Protocol over HTTP: every path, parameters, headers and refusals.

`tests/web/test_numbers.py` compares the numbers of all forms with the reference.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from attend.settings import Settings
from attend.web.app import create_app
from support.app import collecting_server
from support.v2 import LAYERS, in_json, read, refused

B, Q = 2, 3
RNG = np.random.default_rng(17)
QUERY = RNG.standard_normal((B, Q, 6)).astype(np.float32)
INFER = "/v2/models/tiny/infer"


# Metadata and health


@pytest.mark.parametrize("slash", ["", "/"])
def test_server_metadata_with_and_without_a_trailing_slash(v2: httpx.Client, slash: str) -> None:
    answer = v2.get(f"/v2{slash}").json()

    assert set(answer) == {"name", "version", "extensions"}
    working = {"binary_tensor_data", "parameters", "model_configuration", "schedule_policy", "model_repository", "statistics"}
    assert set(answer["extensions"]) == working


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("path", ["", "/ready", "/config", "/stats"])
def test_every_path_of_a_model_exists_with_and_without_version_and_slash(v2: httpx.Client, path: str, version: str, slash: str) -> None:
    answer = v2.get(f"/v2/models/tiny{version}{path}{slash}")

    assert answer.status_code == 200, answer.text
    assert "tiny" in answer.text
    assert v2.head(f"/v2/models/tiny{version}{path}{slash}").status_code == 200


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_infer_exists_with_and_without_version_and_slash(v2: httpx.Client, version: str, slash: str) -> None:
    reply = read(v2.post(f"/v2/models/tiny{version}/infer{slash}", json={"inputs": in_json(query=QUERY)}))

    assert (reply.document["model_name"], reply.document["model_version"]) == ("tiny", "1")


@pytest.mark.parametrize("which", ["live", "ready"])
def test_health_has_a_status_and_members_for_all_clients(v2: httpx.Client, which: str) -> None:
    """Triton's clients read the status, KServe's the JSON."""
    answer = v2.get(f"/v2/health/{which}")

    assert (answer.status_code, answer.json()) == (200, {"live": True, "ready": True})


def test_a_server_without_models_is_not_ready(start_here: Callable[..., str]) -> None:
    """It is live, and becomes ready with its first model."""
    with httpx.Client(base_url=start_here()) as client:
        assert client.post("/v2/repository/models/default/unload").status_code == 200
        assert client.get("/v2/health/live").status_code == 200
        answer = client.get("/v2/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"live": True, "ready": False, "error": "not ready"})
        spec = {"parameters": {"config": json.dumps({"d_model": 4, "num_heads": 2})}}
        assert client.post("/v2/repository/models/default/load", json=spec).content == b""
        assert client.get("/v2/health/ready").status_code == 200


def test_announced_inputs_are_accepted_and_optional_ones_may_be_left_out(v2: httpx.Client) -> None:
    metadata, config = v2.get("/v2/models/tiny").json(), v2.get("/v2/models/tiny/config").json()

    assert [tensor["name"] for tensor in metadata["inputs"]] == [tensor["name"] for tensor in config["input"]]
    assert [tensor["name"] for tensor in config["input"] if not tensor["optional"]] == ["query"]
    assert [tensor["name"] for tensor in config["output"]] == ["output", "attention_weights"]
    for tensor, of_config in zip(metadata["inputs"], config["input"], strict=True):
        assert of_config["dims"] == tensor["shape"][1:]
        assert of_config["data_type"] == f"TYPE_{tensor['datatype']}"


# Outputs


@pytest.mark.parametrize("overall", [None, False, True])
@pytest.mark.parametrize("own", [None, False, True])
def test_binary_data_of_an_output_overrides_binary_data_output(v2: httpx.Client, overall: bool | None, own: bool | None) -> None:
    parameters = {} if overall is None else {"parameters": {"binary_data_output": overall}}
    wish = {} if own is None else {"parameters": {"binary_data": own}}

    reply = read(
        v2.post(
            INFER, json={"inputs": in_json(query=QUERY), "outputs": [{"name": "log_sum_exp", **wish}, {"name": "output"}], **parameters}
        )
    )

    assert ("log_sum_exp" in reply.binary) is bool(overall if own is None else own)
    assert ("output" in reply.binary) is bool(overall)
    assert list(reply.arrays) == ["log_sum_exp", "output"]


# Parameters


def test_parameters_that_client_libraries_add_are_ignored(v2: httpx.Client) -> None:
    """MLServer's codecs send `content_type` for tensors and requests."""
    codec, reproducible = {"parameters": {"content_type": "np"}}, {"reproducible": True}
    [query] = one()["inputs"]
    parameters = {**codec["parameters"], **reproducible}

    reply = v2.post(INFER, json={"inputs": [{**query, **codec}], "outputs": [{"name": "output", **codec}], "parameters": parameters})

    plain = {"inputs": [query], "outputs": [{"name": "output"}], "parameters": reproducible}
    assert reply.json() == v2.post(INFER, json=plain).json()


@pytest.mark.parametrize("binary", [False, True])
def test_a_null_field_equals_an_omitted_one(v2: httpx.Client, binary: bool) -> None:
    """Generated clients send null."""
    nothing = {"id": None, "parameters": None, "model_name": None, "model_version": None}
    [query] = one()["inputs"]
    if binary:
        query |= {"data": None, "parameters": {"binary_data_size": 48}}
    head = json.dumps({**nothing, "inputs": [query], "outputs": [{"name": "output", "parameters": None}]}).encode()
    body = head + np.full(12, 0.5, np.float32).tobytes() if binary else head

    reply = read(v2.post(INFER, content=body, headers={"Inference-Header-Content-Length": str(len(head))}))

    assert "id" not in reply.document
    np.testing.assert_allclose(reply.arrays["output"], read(v2.post(INFER, json=one())).arrays["output"], rtol=0, atol=2e-6)
    plain = {**one(), "parameters": {"reproducible": True}}
    assert v2.post(INFER, json={**plain, "outputs": None}).json() == v2.post(INFER, json=plain).json()


def test_the_id_is_returned_and_never_generated(v2: httpx.Client) -> None:
    inputs = in_json(query=QUERY)

    for given in ("größer/1", ""):
        assert read(v2.post(INFER, json={"id": given, "inputs": inputs})).document["id"] == given
    assert "id" not in read(v2.post(INFER, json={"inputs": inputs})).document


def test_the_body_may_repeat_model_name_and_version(v2: httpx.Client) -> None:
    """As KServe's client does."""
    reply = read(v2.post(INFER, json={"id": "1", "model_name": "tiny", "model_version": "1", "inputs": in_json(query=QUERY)}))

    assert reply.document["id"] == "1"


def test_the_parameter_timeout_is_a_deadline(v2: httpx.Client) -> None:
    """In microseconds; 0 is none. A passed one is 504."""
    body = {"inputs": in_json(query=QUERY)}

    assert "deadline" in refused(v2.post(INFER, json={**body, "parameters": {"timeout": 1}}), 504)
    for timeout in (0, 60_000_000):
        read(v2.post(INFER, json={**body, "parameters": {"timeout": timeout, "priority": 1}}))
    assert "deadline" in refused(
        v2.post(INFER, json={**body, "parameters": {"timeout": 10**9}}, headers={"X-Request-Timeout": "1e-9"}), 504
    )


# Limits of bodies


def test_the_size_of_a_decompressed_body_is_limited(v2: httpx.Client) -> None:
    bomb = gzip.compress(b"\0" * (64 << 20))
    assert "unpacks" in refused(v2.post(INFER, content=bomb, headers={"Content-Encoding": "gzip"}), 413)
    assert "body" in refused(v2.post("/v2/repository/index", content=bomb, headers={"Content-Encoding": "gzip"}), 413)
    assert "at most" in refused(v2.post(INFER, content=b" " * (2 << 20)), 413)
    assert "gzip or deflate" in refused(v2.post(INFER, content=b"{}", headers={"Content-Encoding": "br"}), 415)


def test_bodies_of_the_repository_are_limited_to_64_kib(v2: httpx.Client) -> None:
    """By Content-Length, and after decompression."""
    for path in ("/v2/repository/index", "/v2/repository/models/tiny/load", "/v2/repository/models/tiny/unload"):
        assert "at most 65536 bytes" in refused(v2.post(path, content=b" " * 65537), 413)
        packed = gzip.compress(b" " * 65537)
        assert "at most 65536 bytes" in refused(v2.post(path, content=packed, headers={"Content-Encoding": "gzip"}), 413)
    assert v2.post("/v2/repository/index", content=b" " * 65536).status_code == 200


# What is refused, and how


def one(**changes: Any) -> dict[str, Any]:
    """A request of one input, made invalid by these changes."""
    good = {"name": "query", "shape": [1, 2, 6], "datatype": "FP32", "data": [0.5] * 12}
    return {"inputs": [{name: value for name, value in {**good, **changes}.items() if value is not ...}]}


REFUSED: dict[str, tuple[Any, str]] = {
    "no inputs": ({}, "/inputs"),
    "an empty list of inputs": ({"inputs": []}, "/inputs"),
    "inputs that are no list": ({"inputs": {"query": 1}}, "/inputs"),
    "an input that is no object": ({"inputs": [7]}, "/inputs/0"),
    "a list": ([1], "object"),
    "too few values": (one(data=[1.0] * 11), "expected 12 values"),
    "too many values": (one(data=[1.0] * 13), "expected 12 values"),
    "ragged rows": (one(data=[[[1] * 6, [1] * 5]]), "/inputs/0/data"),
    "another nesting": (one(data=[[[1] * 4] * 3]), "expected 12 values"),
    "a string among numbers": (one(data=["1"] + [1] * 11), "/inputs/0/data/0"),
    "a null among numbers": (one(data=[1] * 11 + [None]), "/inputs/0/data/11"),
    "a boolean among numbers": (one(data=[1] * 11 + [True]), "/inputs/0/data/11"),
    "a list among flat numbers": (one(data=[1] * 11 + [[1]]), "/inputs/0/data"),
    "BYTES": (one(datatype="BYTES", data=["a"] * 12), "BYTES"),
    "a datatype that does not exist": (one(datatype="FP8"), "/inputs/0/datatype"),
    "no datatype": (one(datatype=...), "/inputs/0/datatype"),
    "no shape": (one(shape=...), "/inputs/0/shape"),
    "no name": (one(name=...), "/inputs/0/name"),
    "no data": (one(data=...), "data or binary_data_size"),
    "a negative length": (one(shape=[-1, 2, 6]), "/inputs/0/shape/0"),
    "a shape that overflows": (one(shape=[2**31 - 1, 2**31 - 1, 2**31 - 1]), "2^48"),
    "a length that no integer holds": (one(shape=[2**80]), "/inputs/0/shape/0"),
    "too many axes": (one(shape=[1, 1, 1, 2, 6]), "4 axes"),
    "data and binary_data_size": (one(parameters={"binary_data_size": 48}), "either data or binary_data_size"),
    "shared memory": (one(data=..., parameters={"shared_memory_region": "a"}), "shared_memory_region"),
    "an unknown member of an input": (one(dtype="FP32"), "/inputs/0/dtype"),
    "an unknown member": ({**one(), "sequence": 1}, "/sequence"),
    "an unknown parameter of an input": (one(parameters={"scale": 1}), "at /inputs/0/parameters/scale"),
    "a name that is ignored elsewhere": (one(parameters={"binary_data": True}), "at /inputs/0/parameters/binary_data"),
    "an unknown parameter of an output": ({**one(), "outputs": [{"name": "output", "parameters": {"scale": 1}}]}, "parameters/scale"),
    "outputs that are no list": ({**one(), "outputs": {}}, "/outputs"),
    "an unknown parameter": ({**one(), "parameters": {"temperature": 1}}, "/parameters/temperature"),
    "a parameter of another library": ({**one(), "parameters": {"is_causal": True}}, "expected causal (key j is visible"),
    "a misspelt parameter": ({**one(), "parameters": {"casual": True}}, 'got "casual" (did you mean causal?)'),
    "a parameter that lists the known ones": ({**one(), "parameters": {"x": 1}}, "sequence_start, softcap, timeout, tokens, "),
    "a misspelt output": ({**one(), "outputs": [{"name": "outptu"}]}, '"outptu" (did you mean output?)'),
    "the end of no sequence": ({**one(), "parameters": {"sequence_end": True}}, "/parameters/sequence_end"),
    "a reserved parameter": ({**one(), "parameters": {"triton_x": 7}}, "/parameters/triton_x"),
    "a tensor as a parameter": ({**one(), "parameters": {"key": "[]"}}, "/parameters/key"),
    "another layer as a parameter": ({**one(), "parameters": {"layer": "exact"}}, "/parameters/layer"),
    "parameters that are no object": ({**one(), "parameters": [1]}, "/parameters"),
    "an object as a parameter": ({**one(), "parameters": {"window": {"left": 1}}}, "/parameters/window"),
    "a form of ours": ({**one(), "parameters": {"reply": '{"form": "base64"}'}}, "/parameters/reply/form"),
    "a wrong option": ({**one(), "parameters": {"causal": "yes"}}, "at /parameters/causal"),
    "an option as an input": ({"inputs": [*one()["inputs"], one(name="causal")["inputs"][0]]}, "expected causal among the parameters"),
    "the layer as an input": ({"inputs": [*one()["inputs"], one(name="layer")["inputs"][0]]}, "at /inputs/1/name"),
    "an input named mask, which is ambiguous": ({"inputs": [*one()["inputs"], one(name="mask")["inputs"][0]]}, "attend_mask"),
    "an input twice": ({"inputs": one()["inputs"] * 2}, "twice"),
    "an input that does not exist": ({"inputs": [*one()["inputs"], one(name="input__0")["inputs"][0]]}, "at /inputs/1/name"),
    "an output twice": ({**one(), "outputs": [{"name": "output"}] * 2}, "twice"),
    "an output without a name": ({**one(), "outputs": [{}]}, "/outputs/0/name"),
    "classification": ({**one(), "outputs": [{"name": "output", "parameters": {"classification": 3}}]}, "classification"),
    "binary_data that is no boolean": (
        {**one(), "outputs": [{"name": "output", "parameters": {"binary_data": 1}}]},
        "/outputs/0/parameters/binary_data",
    ),
    "another model than the path's": ({**one(), "model_name": "exact"}, "/model_name"),
    "an offset that is no integer": (
        {"inputs": [*one()["inputs"], {"name": "query_offset", "shape": [1], "datatype": "FP32", "data": [0.5]}]},
        "at /inputs/1",
    ),
    "an id that is no string": ({**one(), "id": 7}, "/id"),
    "a priority below 0": ({**one(), "parameters": {"priority": -1}}, "/parameters/priority"),
    "a width that does not fit": (one(shape=[1, 3, 4]), "expected 6 values per query"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_requests_are_400_with_the_reason(v2: httpx.Client, case: str) -> None:
    """Also where Triton replies 500, or replies with other numbers than requested."""
    body, words = REFUSED[case]

    error = refused(v2.post(INFER, content=json.dumps(body)), 413 if "2^48" in words else 400)

    assert words in error, error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"inputs": [{"name": "query", "shape": [1, 1, 6], "datatype": "FP32", "data": [NaN,1,1,1,1,1]}]}', "NaN"),
        (b'{"inputs": [{"name": "query", "shape": [1, 1, 6], "datatype": "FP32", "data": [1e999,1,1,1,1,1]}]}', "finite"),
        (b'{"inputs": [{"name": "query\\u0000", "shape": [1], "datatype": "FP32", "data": [1]}]}', "query"),
        (b'{"inputs": ' + b"[" * 100 + b"]" * 100 + b"}", "deep"),
        (b'{"inputs": [{"name": "query", "shape": [1, 1, 6], "datatype": "FP32", "data": ' + b"[" * 3000 + b"]" * 3000 + b"}]}", "deep"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_malformed_bodies_are_refused(v2: httpx.Client, body: bytes, words: str) -> None:
    assert words.lower() in refused(v2.post(INFER, content=body), 413 if words == "deep" else 400).lower()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/none", 404),
        ("GET", "/v2/models/none/ready", 404),
        ("POST", "/v2/models/none/infer", 404),
        ("POST", "/v2/models/tiny/versions/2/infer", 404),
        ("GET", "/v2/models/tiny/versions/v1/config", 404),
        ("POST", "/v2/models/a/b/infer", 404),
        ("POST", "/v2/models/tiny/generate", 404),
        ("GET", "/v2/systemsharedmemory/status", 404),
        ("GET", "/v2/trace/setting", 404),
        ("GET", "/v2/logging", 404),
        ("GET", "/v2/models/tiny/infer", 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/models/tiny", 405),
    ],
)
def test_unknown_paths_and_models_are_refused_as_the_protocol_says(v2: httpx.Client, method: str, path: str, status: int) -> None:
    answer = v2.request(method, path)

    refused(answer, status)
    assert ("allow" in answer.headers) is (status == 405)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/atend", "/attend"),
        ("/attend/analyse", "/attend/analysis"),
        ("/layer/tiny", "/layers/tiny"),
        ("/health/livez", "/health/live"),
        ("/v2/model/tiny/infer", "/v2/models/tiny/infer"),
        ("/v2/healthy/ready", "/v2/health/ready"),
        ("/v1/chat/completions", None),
        ("/" + "a" * 60000, None),
        ("/%7Bname%7D/x", None),
    ],
    ids=lambda path: str(path)[:20],
)
def test_the_refusal_of_an_unknown_path_suggests_the_most_similar_one(v2: httpx.Client, path: str, meant: str | None) -> None:
    answer = v2.get(path)

    message = answer.json()["error" if path.startswith("/v2") else "detail"]
    assert answer.status_code == 404 and message.startswith("nothing is served at /")
    assert (f" (did you mean {meant}?); see /docs" in message) if meant else ("did you mean" not in message)


# Statistics and the repository


@pytest.fixture
def new_model(v2: httpx.Client) -> Iterator[str]:
    """A model of one test."""
    spec = json.dumps({"d_model": 4, "num_heads": 2, "seed": 1})
    assert v2.post("/v2/repository/models/new_model/load", json={"parameters": {"config": spec}}).content == b""
    yield "new_model"
    v2.delete("/layers/new_model")


def test_statistics_count_answered_items_and_failed_calls(v2: httpx.Client, new_model: str) -> None:
    """Requests refused before the model was called are not failures of the model."""
    query = np.ones((B, Q, 4), np.float32)
    before = v2.get(f"/v2/models/{new_model}/stats").json()["model_stats"][0]
    for _ in range(3):
        read(v2.post(f"/v2/models/{new_model}/infer", json={"inputs": in_json(query=query)}))
    assert v2.post("/attend", json={"layer": new_model, "query": query[0].tolist()}).status_code == 200
    refused(v2.post(f"/v2/models/{new_model}/infer", json={"inputs": in_json(query=query[..., :3])}))
    refused(
        v2.post(
            f"/v2/models/{new_model}/infer",
            json={"inputs": in_json(query=query, valid_lens=np.zeros(B, np.int64)), "parameters": {"fully_masked": "error"}},
        )
    )

    answer = v2.get(f"/v2/models/{new_model}/stats").json()["model_stats"][0]

    assert before["inference_count"] == before["last_inference"] == 0 and before["batch_stats"] == []
    assert (answer["inference_count"], answer["execution_count"]) == (3 * B + 1, 4)
    assert answer["inference_stats"]["success"]["count"] == answer["inference_stats"]["queue"]["count"] == 4
    assert answer["inference_stats"]["fail"]["count"] == 1
    parts = [answer["inference_stats"][name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert all(parts) and abs(sum(parts) - answer["inference_stats"]["success"]["ns"]) <= 16
    assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in answer["batch_stats"]] == [(1, 1), (B, 3)]
    assert answer["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": 4 * (4 * 4 * 4 + 4 * 4)}]
    everyone = v2.get("/v2/models/stats").json()["model_stats"]
    assert {entry["name"] for entry in everyone} == {"default", new_model, *LAYERS}


def test_statistics_count_executions_by_batch_size() -> None:
    """A call of one item and one of two in one batch: one execution of size three, whose time is counted once."""
    query = np.ones((2, 1, 64), np.float32)
    with collecting_server(64) as (url, collect), httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(2) as threads:

        def infer(items: int) -> None:
            read(http.post("/v2/models/default/infer", json={"inputs": in_json(query=query[:items])}))

        with collect(2):
            calls = [threads.submit(infer, items) for items in (1, 2)]
        for call in calls:
            call.result()
        [statistics] = http.get("/v2/models/default/stats").json()["model_stats"]

    assert (statistics["inference_count"], statistics["execution_count"], statistics["inference_stats"]["success"]["count"]) == (3, 1, 2)
    [batch] = statistics["batch_stats"]
    assert batch["batch_size"] == 3
    assert [batch[phase]["count"] for phase in ("compute_input", "compute_infer", "compute_output")] == [1, 1, 1]
    for phase, times in (("compute_input", 1), ("compute_infer", 2), ("compute_output", 1)):
        assert statistics["inference_stats"][phase] == {"count": 2, "ns": times * batch[phase]["ns"]}


@pytest.mark.parametrize(("width", "heads", "reproducible"), [(30, 5, False), (30, 5, True), (64, 8, False), (255, 5, False)])
def test_concurrent_requests_of_different_lengths_get_their_own_results(width: int, heads: int, reproducible: bool) -> None:
    """Each is one execution, since a CPU computes no batches, and equals that of the request alone. With `reproducible`, bit for bit."""
    rng = np.random.default_rng(7)
    lengths = [(1, 3), (1, 17), (2, 5), (1, 1), (1, 29)]
    queries = [rng.standard_normal((*shape, width)).astype(np.float32) for shape in lengths]

    def infer(query: Any) -> dict[str, Any]:
        body = {"inputs": in_json(query=query), "parameters": {"reproducible": reproducible}}
        return read(http.post("/v2/models/mixed/infer", json=body)).arrays

    with collecting_server(1) as (url, collect), httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(5) as threads:
        http.put("/layers/mixed", json={"spec": {"d_model": width, "num_heads": heads}}).raise_for_status()
        with collect(len(queries)):
            calls = [threads.submit(infer, query) for query in queries]
        together = [call.result() for call in calls]
        [statistics] = http.get("/v2/models/mixed/stats").json()["model_stats"]
        alone = [infer(query) for query in queries]

    assert statistics["inference_count"] == 6
    assert {batch["batch_size"]: batch["compute_infer"]["count"] for batch in statistics["batch_stats"]} == {1: 4, 2: 1}
    for (b, n), got, wanted in zip(lengths, together, alone, strict=True):
        assert got["output"].shape == (b, n, width)
        assert got["attention_weights"].shape == (b, heads, n, n)
        for name in ("output", "attention_weights"):
            assert np.abs(got[name] - wanted[name]).max() <= (0 if reproducible else 1e-6) * np.abs(wanted[name]).max()


def test_models_are_loaded_listed_and_unloaded(v2: httpx.Client, new_model: str) -> None:
    """As with PUT and DELETE of /layers."""
    layer = v2.get(f"/layers/{new_model}").json()
    assert (layer["spec"]["d_model"], layer["spec"]["seed"]) == (4, 1)
    index = v2.post("/v2/repository/index").json()
    assert {"name": new_model, "version": "1", "state": "READY", "reason": ""} in index
    assert index == v2.post("/v2/repository/index", json={"ready": True}).json()
    assert v2.post(f"/v2/repository/models/{new_model}/load").content == b""  # it is loaded already

    inputs = [{"name": "query", "shape": [1, 1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
    query = {"inputs": inputs, "parameters": {"reproducible": True}}
    before = v2.post(f"/v2/models/{new_model}/infer", json=query).json()
    assert v2.get(f"/v2/models/{new_model}/ready").json() == {"name": new_model, "ready": True}

    for _ in range(2):  # one that is unloaded stays so
        assert v2.post(f"/v2/repository/models/{new_model}/unload", json={"parameters": {"unload_dependents": False}}).content == b""

    assert v2.get(f"/layers/{new_model}").json() == {**layer, "state": "unloaded"}
    listed = {name: value for name, value in layer.items() if name != "steps"}
    assert {**listed, "state": "unloaded"} in v2.get("/layers").json()["layers"]
    index = v2.post("/v2/repository/index").json()
    assert {"name": new_model, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in index
    assert new_model not in [entry["name"] for entry in v2.post("/v2/repository/index", json={"ready": True}).json()]
    assert f"/v2/repository/models/{new_model}/load" in refused(v2.get(f"/v2/models/{new_model}/ready"), 409)
    for answer in (
        v2.post(f"/v2/models/{new_model}/infer", json=query),
        v2.get(f"/v2/models/{new_model}"),
        v2.get(f"/v2/models/{new_model}/stats"),
    ):
        assert f"/v2/repository/models/{new_model}/load" in refused(answer, 409)
    assert v2.post("/attend", json={"layer": new_model, "query": [[1, 2, 3, 4]]}).status_code == 409

    assert v2.post(f"/v2/repository/models/{new_model}/load").content == b""
    assert v2.get(f"/layers/{new_model}").json() == layer
    assert v2.post(f"/v2/models/{new_model}/infer", json=query).json() == before

    v2.post(f"/v2/repository/models/{new_model}/unload")
    assert v2.delete(f"/layers/{new_model}").status_code == 204
    assert v2.get(f"/layers/{new_model}").status_code == 404
    refused(v2.post(f"/v2/repository/models/{new_model}/unload"), 404)
    refused(v2.post(f"/v2/repository/models/{new_model}/load"), 404)


def test_an_unloaded_layer_with_given_weights_can_be_loaded_again(v2: httpx.Client, new_model: str) -> None:
    """Without --layers-dir its weights stay in memory."""
    weights = v2.get(f"/layers/{new_model}/weights").content
    put = v2.put("/layers/given", content=weights, headers={"Content-Type": "application/vnd.safetensors"})
    try:
        assert put.status_code == 201 and put.json()["spec"]["init"] is None
        for verb in ("unload", "load"):
            assert v2.post(f"/v2/repository/models/given/{verb}").status_code == 200
        assert v2.get("/layers/given").json().items() >= put.json().items()

        v2.post("/v2/repository/models/given/unload")
        assert v2.put("/layers/given", json={"spec": {"d_model": 4, "num_heads": 2}}).status_code == 200
        assert v2.get("/layers/given").json()["state"] == "ready"
    finally:
        v2.delete("/layers/given")


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("x", {"parameters": {"config": "{}"}}, "at /parameters/config/d_model"),
        ("x", {"parameters": {"config": "{"}}, "JSON"),
        ("x", {"parameters": {"config": '{"d_model": 4, "num_heads": 2}, "weights": {}'}}, "JSON"),
        ("x", {"parameters": {"config": '{"d_model": 4, "num_heads": 2, "scale": NaN}'}}, "NaN"),
        ("x", {"parameters": {"config": {"d_model": 4}}}, "/parameters/config"),
        ("x", {"parameters": {"file:1/model.pt": "AAAA"}}, "file:1"),
        ("x", {"config": "{}"}, "/config"),
        ("x", [], "object"),
        ("-x", {"parameters": {"config": '{"d_model": 4, "num_heads": 2}'}}, "name"),
    ],
)
def test_invalid_loads_are_refused(v2: httpx.Client, name: str, body: Any, words: str) -> None:
    assert words in refused(v2.post(f"/v2/repository/models/{name}/load", json=body))


def test_extensions_that_do_not_work_are_not_announced() -> None:
    """Without shared storage, several workers offer neither statistics nor loading; a public address without keys offers no loading."""
    app = create_app(Settings(workers=2))
    app.state.service.started = True
    several = TestClient(app, base_url="http://127.0.0.1")
    assert not {"statistics", "model_repository"} & set(several.get("/v2").json()["extensions"])
    refused(several.get("/v2/models/stats"), 409)
    refused(several.get("/v2/models/default/stats"), 409)
    refused(several.post("/v2/repository/models/default/unload"), 409)

    app = create_app(Settings(host="0.0.0.0"))
    network = TestClient(app)
    refused(network.post("/v2/models/default/infer"), 503)  # nothing has been started
    app.state.service.started = True
    assert "model_repository" not in network.get("/v2").json()["extensions"]
    refused(network.post("/v2/repository/models/default/load"), 403)
