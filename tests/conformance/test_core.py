"""The core of the Open Inference Protocol over HTTP, version 2.

Six places of its specification contradict one another; each has a test here that names the choice made:

1. The prose shows {"live": …} as the body of ready, too; servers send anything or nothing. The status decides; a body that is JSON
   must not contradict it.
2. `model_name` is required in a reply, and missing from the specification's own example. It is required.
3. The example declares shape [3] and gives one element. Shape and data agree.
4. BF16 is in the prose and not in the table of datatypes. It is a datatype.
5. The server's metadata is at `v2` in the prose and at `/v2/` in the OpenAPI document. Both answer.
6. The OpenAPI document requires `data` of every input, which the binary extension leaves out. It is required only if
   the input has no binary data (`test_extensions.py` has the other half).
"""

import json
import math

import httpx
import pytest

from conformance.subject import Subject, agreed, flat, nested, outputs_of, refusal_of

SIZES = {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16"}


def test_server_metadata(subject: Subject) -> None:
    document = subject.http.get("/v2").json()

    assert isinstance(document["name"], str) and isinstance(document["version"], str)
    assert all(isinstance(name, str) for name in document["extensions"])


@pytest.mark.parametrize("which", ["live", "ready"])
def test_the_status_reports_the_health(subject: Subject, which: str) -> None:
    assert subject.http.get(f"/v2/health/{which}").status_code == 200


@pytest.mark.parametrize("which", ["live", "ready"])
def test_contradiction_1_the_body_of_health_does_not_contradict_the_status(subject: Subject, which: str) -> None:
    answer = subject.http.get(f"/v2/health/{which}")

    assert not answer.content or answer.json().get(which, True) is True


def test_model_readiness(subject: Subject) -> None:
    assert subject.http.get(f"{subject.path}/ready").status_code == 200
    assert subject.http.get("/v2/models/there-is-none/ready").status_code >= 400


def test_model_metadata(subject: Subject) -> None:
    assert subject.metadata["name"] == subject.model
    assert isinstance(subject.metadata["platform"], str)
    for tensor in [*subject.metadata["inputs"], *subject.metadata["outputs"]]:
        assert isinstance(tensor["name"], str)
        assert all(type(length) is int and length >= -1 for length in tensor["shape"])


def test_contradiction_4_datatypes_are_those_of_the_table_or_bf16(subject: Subject) -> None:
    assert {tensor["datatype"] for tensor in [*subject.metadata["inputs"], *subject.metadata["outputs"]]} <= SIZES


def test_announced_versions_exist(subject: Subject) -> None:
    for version in subject.metadata.get("versions") or []:
        path = f"{subject.path}/versions/{version}"
        assert subject.http.get(path).json()["name"] == subject.model
        assert subject.http.get(f"{path}/ready").status_code == 200
        assert outputs_of(subject.http.post(f"{path}/infer", json={"inputs": subject.inputs}))


def test_contradiction_5_a_slash_at_the_end_changes_nothing(subject: Subject) -> None:
    """A redirect to the path without a slash is allowed, too."""
    assert subject.http.get("/v2/", follow_redirects=True).json() == subject.http.get("/v2").json()


def test_numbers_may_be_flat_or_nested(subject: Subject) -> None:
    deep = [{**tensor, "data": nested(tensor["data"], tensor["shape"])} for tensor in subject.inputs]
    one, other = outputs_of(subject.infer()), outputs_of(subject.infer({"inputs": deep}))

    assert one.keys() == other.keys()
    assert all(agreed(one[name], other[name]) for name in one)


def test_contradiction_2_a_reply_names_its_model(subject: Subject) -> None:
    assert subject.infer().json()["model_name"] == subject.model


def test_contradiction_3_shape_and_data_of_outputs_agree(subject: Subject) -> None:
    for output in subject.infer().json()["outputs"]:
        assert len(flat(output["data"])) == math.prod(output["shape"])


def test_outputs_are_as_announced(subject: Subject) -> None:
    if not (announced := {tensor["name"]: tensor for tensor in subject.metadata["outputs"]}):
        pytest.skip("the model announces no outputs")
    for output in subject.infer().json()["outputs"]:
        assert output["datatype"] == announced[output["name"]]["datatype"]
        assert len(output["shape"]) == len(announced[output["name"]]["shape"])
        assert all(want in (-1, got) for want, got in zip(announced[output["name"]]["shape"], output["shape"], strict=True))


def test_a_reply_repeats_the_id_of_the_request(subject: Subject) -> None:
    assert subject.infer({"id": "an id", "inputs": subject.inputs}).json()["id"] == "an id"


def test_a_reply_has_only_the_requested_outputs(subject: Subject) -> None:
    name = subject.outputs[-1]

    assert list(outputs_of(subject.infer({"inputs": subject.inputs, "outputs": [{"name": name}]}))) == [name]


def test_the_order_of_inputs_does_not_matter(subject: Subject) -> None:
    if len(subject.inputs) < 2:
        pytest.skip("the model has one input")
    one, other = outputs_of(subject.infer()), outputs_of(subject.infer({"inputs": subject.inputs[::-1]}))

    assert all(agreed(one[name], other[name]) for name in one)


@pytest.mark.parametrize("content_type", ["", "application/json", "application/octet-stream", "application/x-www-form-urlencoded"])
def test_the_content_type_is_ignored(subject: Subject, content_type: str) -> None:
    """Triton's client sends none; curl sends a form's type."""
    assert outputs_of(subject.infer(**({"Content_Type": content_type} if content_type else {})))


def with_invalid_input(subject: Subject, **changes: object) -> dict[str, object]:
    """A valid request, except for these members of its first input; None removes one."""
    first = {name: value for name, value in {**subject.inputs[0], **changes}.items() if value is not None}
    return {"inputs": [first, *subject.inputs[1:]]}


INVALID_BODIES = [b"", b"{", b"[]", b"{}", b'{"inputs": []}', b'{"inputs": 1}', b"\xff"]
INVALID_INPUTS: list[dict[str, object]] = [
    {"name": None},
    {"shape": None},
    {"datatype": None},
    {"data": None},
    {"name": "there-is-none"},
    {"datatype": "FP8"},
    {"shape": [-1]},
    {"shape": [2**31, 2**31, 2**31]},
    {"shape": "2"},
    {"data": [1.0]},
    {"data": {}},
    {"data": ["x"]},
]


@pytest.mark.parametrize("body", INVALID_BODIES)
def test_a_body_that_is_not_a_request_is_refused(subject: Subject, body: bytes) -> None:
    refusal_of(subject.infer(body))


@pytest.mark.parametrize("changes", INVALID_INPUTS, ids=json.dumps)
def test_an_invalid_input_is_refused(subject: Subject, changes: dict[str, object]) -> None:
    """Also if `data` is missing and there is no binary data (contradiction 6)."""
    refusal_of(subject.infer(with_invalid_input(subject, **changes)))


def test_the_status_of_a_refusal_is_4xx(subject: Subject) -> None:
    """The specification says most commonly 400; 5xx would mean a fault of the server."""
    answers = [subject.infer(body) for body in INVALID_BODIES] + [
        subject.infer(with_invalid_input(subject, **changes)) for changes in INVALID_INPUTS
    ]

    assert [answer.text for answer in answers if not 400 <= answer.status_code < 500] == []


def test_one_element_too_many_is_refused(subject: Subject) -> None:
    """The surplus element is not ignored."""
    refusal_of(subject.infer(with_invalid_input(subject, data=[*subject.inputs[0]["data"], 1.0])))


def test_an_output_that_does_not_exist_is_refused(subject: Subject) -> None:
    refusal_of(subject.infer({"inputs": subject.inputs, "outputs": [{"name": "there-is-none"}]}))


@pytest.mark.parametrize(
    "path", ["/v2/models/none", "/v2/models/none/versions/1", "{model}/versions/77", "/v2/models/none/infer", "/v2/none"]
)
def test_an_unknown_path_is_refused_in_the_protocols_form(subject: Subject, path: str) -> None:
    path = path.format(model=subject.path)
    answer = subject.http.post(path, json={"inputs": subject.inputs}) if path.endswith("infer") else subject.http.get(path)

    refusal_of(answer)


def test_a_refusal_leaves_the_connection_usable(subject: Subject) -> None:
    with httpx.Client(base_url=subject.http.base_url, limits=httpx.Limits(max_connections=1)) as http:
        for _ in range(3):
            refusal_of(http.post(f"{subject.path}/infer", content=b"{" + b" " * 100_000))
            assert outputs_of(http.post(f"{subject.path}/infer", json={"inputs": subject.inputs}))
