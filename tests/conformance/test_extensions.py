"""Each extension that a server announces works; those that it does not announce are not tested."""

import gzip
import json
import zlib
from typing import Any

import pytest

from conformance.subject import LENGTH, Subject, agreed, outputs_of, refusal_of, skip_if_restricted


def needs(subject: Subject, extension: str) -> None:
    if extension not in subject.extensions:
        pytest.skip(f"{extension} is not announced")


@pytest.fixture
def binary(subject: Subject) -> Subject:
    needs(subject, "binary_tensor_data")
    return subject


# Binary tensor data


@pytest.mark.parametrize("in_json", [0, 1])
@pytest.mark.parametrize("out", [False, True])
def test_binary_contradiction_6_inputs_need_no_data(binary: Subject, in_json: int, out: bool) -> None:
    """All of them as bytes, or one in JSON beside the others; outputs either way; the numbers are the same."""
    if in_json and len(binary.inputs) < 2:
        pytest.skip("the model has one input, and so nothing beside it")
    body, headers = binary.binary({"parameters": {"binary_data_output": out}}, in_json)
    answer = binary.send(body, headers)

    one, other = outputs_of(answer), outputs_of(binary.infer())
    assert one.keys() == other.keys()
    assert all(agreed(one[name], other[name]) for name in one)
    assert (LENGTH.lower() in answer.headers) is out


@pytest.mark.parametrize("overall", [None, False, True])
@pytest.mark.parametrize("own", [None, False, True])
def test_binary_data_of_an_output_overrides_binary_data_output(binary: Subject, overall: bool | None, own: bool | None) -> None:
    name = binary.outputs[0]
    requested = {} if own is None else {"parameters": {"binary_data": own}}
    members: dict[str, Any] = {"outputs": [{"name": name, **requested}]}
    if overall is not None:
        members["parameters"] = {"binary_data_output": overall}

    answer = binary.send(*binary.binary(members))

    assert list(outputs_of(answer)) == [name]
    assert (LENGTH.lower() in answer.headers) is bool(overall if own is None else own)


@pytest.mark.parametrize("length", ["-1", "x", "1e3", str(10**9), str(10**20), "1.5"])
def test_binary_an_invalid_length_is_refused(binary: Subject, length: str) -> None:
    refusal_of(binary.send(binary.binary()[0], {LENGTH: length}))


@pytest.mark.parametrize("change", [-1, 1])
def test_binary_missing_and_surplus_bytes_are_refused(binary: Subject, change: int) -> None:
    body, headers = binary.binary()

    refusal_of(binary.send(body[:change] if change < 0 else body + b"\0", headers))


@pytest.mark.parametrize("size", [0, -4, 3, 10**12, "4"])
def test_binary_a_size_that_does_not_fit_the_shape_is_refused(binary: Subject, size: object) -> None:
    body, headers = binary.binary()
    head = json.loads(body[: int(headers[LENGTH])])
    head["inputs"][0]["parameters"]["binary_data_size"] = size
    text = json.dumps(head).encode()

    refusal_of(binary.send(text + body[int(headers[LENGTH]) :], {LENGTH: str(len(text))}))


def test_binary_data_and_a_size_together_are_refused(binary: Subject) -> None:
    body, headers = binary.binary()
    head = json.loads(body[: int(headers[LENGTH])])
    head["inputs"][0]["data"] = binary.inputs[0]["data"]
    text = json.dumps(head).encode()

    refusal_of(binary.send(text + body[int(headers[LENGTH]) :], {LENGTH: str(len(text))}))


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_binary_lengths_count_before_compression(binary: Subject, coding: str) -> None:
    body, headers = binary.binary({"parameters": {"binary_data_output": True}})
    packed = gzip.compress(body) if coding == "gzip" else zlib.compress(body)

    answer = binary.send(packed, {**headers, "Content-Encoding": coding, "Accept-Encoding": coding})

    assert outputs_of(answer).keys() == outputs_of(binary.infer()).keys()


# The others


def test_model_configuration(subject: Subject) -> None:
    """Its tensors are those of the metadata, without the batch axis if the model batches."""
    needs(subject, "model_configuration")
    config = subject.http.get(f"{subject.path}/config").json()

    assert config["name"] == subject.model
    batches = config["max_batch_size"] > 0
    for side in ("input", "output"):  # an input and an output may have the same name
        shapes = {tensor["name"]: tensor["shape"] for tensor in subject.metadata[f"{side}s"]}
        for tensor in config[side]:
            wanted = shapes[tensor["name"]][1 if batches else 0 :]
            assert wanted, "a tensor with only a batch axis, which a configuration cannot describe"
            assert [int(length) for length in tensor["dims"]] == wanted
            assert tensor["data_type"].startswith("TYPE_")
    refusal_of(subject.http.get("/v2/models/there-is-none/config"))


def test_outputs_by_default_are_those_of_the_configuration(subject: Subject) -> None:
    """The specification says all outputs. If a model has expensive ones, its configuration names the outputs by default."""
    needs(subject, "model_configuration")
    config = subject.http.get(f"{subject.path}/config").json()

    assert set(outputs_of(subject.infer())) == {tensor["name"] for tensor in config["output"]}


def test_statistics_grow_with_every_call(subject: Subject) -> None:
    needs(subject, "statistics")

    def counted() -> tuple[int, int, int]:
        answer = subject.http.get(f"{subject.path}/stats")
        skip_if_restricted(answer)
        [statistics] = answer.json()["model_stats"]
        assert statistics["name"] == subject.model
        for name in ("queue", "compute_input", "compute_infer", "compute_output", "fail"):
            assert {"count", "ns"} <= set(statistics["inference_stats"][name])
        return (
            int(statistics["inference_count"]),
            int(statistics["execution_count"]),
            int(statistics["inference_stats"]["success"]["count"]),
        )

    before = counted()
    outputs_of(subject.infer())
    after = counted()

    assert after[0] > before[0] and after[1] > before[1] and after[2] == before[2] + 1
    everyone = subject.http.get("/v2/models/stats").json()["model_stats"]
    assert subject.model in {statistics["name"] for statistics in everyone}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": true}'])
def test_model_repository_index(subject: Subject, body: bytes) -> None:
    """The reply is a list; Triton's client sends an empty body."""
    needs(subject, "model_repository")
    answer = subject.http.post("/v2/repository/index", content=body)
    skip_if_restricted(answer)

    assert subject.model in [entry["name"] for entry in answer.json() if entry.get("state", "READY") == "READY"]


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_model_repository_refuses_unknown_models(subject: Subject, verb: str) -> None:
    needs(subject, "model_repository")
    refusal_of(subject.http.post(f"/v2/repository/models/there-is-none/{verb}"))


def test_schedule_policy(subject: Subject) -> None:
    """A timeout that is not reached and a priority change no answer."""
    needs(subject, "schedule_policy")
    for parameters in ({"timeout": 60_000_000}, {"priority": 0}):
        assert outputs_of(subject.infer({"inputs": subject.inputs, "parameters": parameters}))


@pytest.mark.parametrize(
    ("extension", "path"),
    [
        ("system_shared_memory", "/v2/systemsharedmemory/status"),
        ("cuda_shared_memory", "/v2/cudasharedmemory/status"),
        ("trace", "/v2/trace/setting"),
        ("logging", "/v2/logging"),
    ],
)
def test_extensions_work_if_and_only_if_they_are_announced(subject: Subject, extension: str, path: str) -> None:
    answer = subject.http.get(path)
    skip_if_restricted(answer)

    if extension in subject.extensions:
        assert answer.status_code == 200
    else:
        refusal_of(answer)


def test_classification_works_if_and_only_if_it_is_announced(subject: Subject) -> None:
    requested = [{"name": subject.outputs[0], "parameters": {"classification": 1}}]
    answer = subject.infer({"inputs": subject.inputs, "outputs": requested})

    if "classification" in subject.extensions:
        assert answer.json()["outputs"][0]["datatype"] == "BYTES"
    else:
        refusal_of(answer)
