"""Outputs requested by name, rounding, and refusals of options given as JSON text."""

import json
import re
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.grpc_calls import address_of
from support.server import Server
from support.v2 import in_json, read, refused
from tritonclient.utils import InferenceServerException

QUERY = np.random.default_rng(53).standard_normal((2, 3, 6)).astype(np.float32)
INFER = "/v2/models/tiny/infer"
KEYS, VALUES = "attention_weights.keys", "attention_weights.values"


def body(*outputs: Any, **options: Any) -> dict[str, Any]:
    """A request for these outputs, each a name or a name and its `binary_data`, with options as JSON text."""
    wishes = [{"name": one} if isinstance(one, str) else {"name": one[0], "parameters": {"binary_data": one[1]}} for one in outputs]
    parameters = {name: value if isinstance(value, bool | str) else json.dumps(value) for name, value in options.items()}
    return {"inputs": in_json(query=QUERY), "outputs": wishes, "parameters": parameters}


@pytest.fixture(scope="module")
def want(v2: httpx.Client) -> dict[str, Any]:
    members = {"layer": "tiny", "query": QUERY.tolist(), "select": {"top_k": 2}}
    largest = v2.post("/attend", json=members, headers={"Content-Type": "application/json"}).json()["attention_weights"]
    return {KEYS: largest["keys"], VALUES: largest["values"]}


@pytest.mark.parametrize("overall", [False, True])
@pytest.mark.parametrize(
    "outputs",
    [(KEYS,), (VALUES,), (VALUES, KEYS), (VALUES, "output", KEYS), ((KEYS, True), (VALUES, False)), ((VALUES, True), KEYS)],
    ids=str,
)
def test_top_k_keys_and_values_can_be_requested_separately(
    v2: httpx.Client, want: dict[str, Any], outputs: tuple[Any, ...], overall: bool
) -> None:
    """In the requested order, each in JSON or in bytes."""
    reply = read(v2.post(INFER, json=body(*outputs, select={"top_k": 2}, binary_data_output=overall)))

    wishes = dict(one if isinstance(one, tuple) else (one, overall) for one in outputs)
    assert list(reply.arrays) == list(wishes)
    assert reply.binary == {name for name, binary in wishes.items() if binary}
    for name in {KEYS, VALUES} & set(wishes):
        np.testing.assert_allclose(reply.arrays[name], want[name], rtol=0, atol=1e-6)
    if KEYS in wishes:
        assert reply.arrays[KEYS].dtype == np.int64


@pytest.mark.parametrize(
    ("outputs", "select", "words"),
    [
        ((KEYS,), None, "select.top_k among the parameters.*at /outputs/0"),
        (("output", VALUES), {"heads": [0]}, "select.top_k among the parameters.*at /outputs/1"),
        ((KEYS,), {"top_k": 0}, "/select/top_k"),
        ((KEYS,), [1], "/outputs/0"),
        ((KEYS, KEYS), {"top_k": 1}, "twice.*/outputs/1"),
        (("attention_weights", KEYS), {"top_k": 1}, "twice.*/outputs/1"),
        ((KEYS, "attention_weights"), {"top_k": 1}, "twice.*/outputs/0"),
        ((KEYS, VALUES, "logits"), {"top_k": 1}, f"one of .*{KEYS}.*at /outputs/2"),
        (("output.keys",), {"top_k": 1}, "/outputs/0"),
        (("attention_weights.",), {"top_k": 1}, "/outputs/0"),
    ],
    ids=str,
)
def test_unknown_outputs_are_refused_with_a_pointer(v2: httpx.Client, outputs: tuple[str, ...], select: Any, words: str) -> None:
    error = refused(v2.post(INFER, json=body(*outputs, **({} if select is None else {"select": select}))))

    assert re.search(words, error), error


def test_outputs_that_need_parameters_are_not_in_the_metadata(v2: httpx.Client) -> None:
    """Load generators request all outputs of the metadata."""
    names = {tensor["name"] for tensor in v2.get("/v2/models/tiny").json()["outputs"]}
    assert "attention_weights" in names and not {KEYS, VALUES, "query_gradient", "key_gradient", "value_gradient"} & names


def test_outputs_and_options_over_grpc(v2_server: Server, want: dict[str, Any]) -> None:
    query = triton.InferInput("query", QUERY.shape, "FP32")
    query.set_data_from_numpy(QUERY)
    with triton.InferenceServerClient(address_of(v2_server)) as client:
        outputs = [triton.InferRequestedOutput(name) for name in (VALUES, KEYS)]
        reply = client.infer("tiny", [query], outputs=outputs, parameters={"select": '{"top_k": 2}'})
        assert [output.name for output in reply.get_response().outputs] == [VALUES, KEYS]
        np.testing.assert_array_equal(reply.as_numpy(KEYS), want[KEYS])
        np.testing.assert_allclose(reply.as_numpy(VALUES), want[VALUES], rtol=0, atol=1e-6)
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*select\.top_k") as caught:
            client.infer("tiny", [query], outputs=outputs)
        assert caught.value.status() == str(grpc.StatusCode.INVALID_ARGUMENT)
        for parameters, words in (
            ({"reply": '{"decimals": 2}'}, "text to round.*/parameters/reply/decimals"),
            ({"select": '{"top_k" 2}'}, "line 1 column 10.*/parameters/select"),
        ):
            with pytest.raises(InferenceServerException, match=words):
                client.infer("tiny", [query], parameters=parameters)


# Rounding


@pytest.mark.parametrize(
    "outputs",
    [(), ("output", "attention_weights"), ("output", ("attention_weights", True)), (("output", False), ("log_sum_exp", True))],
    ids=str,
)
def test_decimals_round_outputs_in_json_but_not_in_bytes(v2: httpx.Client, outputs: tuple[Any, ...]) -> None:
    """As with safetensors."""
    exact = read(v2.post(INFER, json=body(*outputs)))
    reply = read(v2.post(INFER, json=body(*outputs, reply={"decimals": 2})))

    for name, array in reply.arrays.items():
        wanted = exact.arrays[name] if name in reply.binary else np.round(exact.arrays[name], 2)
        np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "options"),
    [
        ((), {"binary_data_output": True}),
        (("output", "scores"), {"binary_data_output": True}),
        ((("output", True),), {}),
        (((VALUES, True), (KEYS, False)), {"select": {"top_k": 1}}),
    ],
    ids=str,
)
def test_decimals_without_an_output_in_json_are_refused(v2: httpx.Client, outputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    error = refused(v2.post(INFER, json=body(*outputs, **options, reply={"decimals": 2})))

    assert "text to round" in error and "/parameters/reply/decimals" in error
    read(v2.post(INFER, json=body(*outputs, **options, reply={"decimals": None})))


# Options as JSON text


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("window", "{", ("the end of the text", "line 1 column 2", "/parameters/window")),
        ("select", '{"heads": [0,\n 1,]}', ("line 2 column", "/parameters/select")),
        ("reply", "", ("the end of the text", "/parameters/reply")),
        ("dropout", '{"p": 0.1, "seed": 1} x', ("'x' at line 1 column 23", "/parameters/dropout")),
        ("dropout", '{"p": NaN, "seed": 1}', ("NaN", "/parameters/dropout/p")),
        ("dropout", '{"p": 1e999, "seed": 1}', ("finite", "/parameters/dropout/p")),
        ("window", '{"left": 1, "left": 2}', ("twice", "/parameters/window/left")),
        ("tokens", '{"query": ["\ud800"]}', ("UTF-8", "/parameters/tokens")),
        ("tokens", r'{"query": ["\ud800"]}', ("a token of Unicode text", "/tokens/query/0")),
        ("tokens", "[" * 100_000, ("depth", "/parameters/tokens")),
        ("query_offset", "[1, 2", ("the end of the text", "/parameters/query_offset")),
        ("select", "3", ("an object", "/select")),
    ],
)
def test_an_option_with_malformed_json_is_refused_with_name_and_place(
    v2: httpx.Client, option: str, text: str, words: tuple[str, ...]
) -> None:
    answer = v2.post(INFER, content=json.dumps({"inputs": in_json(query=QUERY), "parameters": {option: text}}))

    error = refused(answer, 413 if "depth" in words else 400)
    assert all(word in error for word in words), error
    assert "header" not in error


def test_malformed_json_in_repository_requests_is_refused_with_its_place(v2: httpx.Client) -> None:
    config = {"parameters": {"config": '{"d_model": 4 "num_heads": 2}'}}
    error = refused(v2.post("/v2/repository/models/x/load", json=config))
    assert "line 1 column 15" in error and "/parameters/config" in error
    assert "line 1 column 11" in refused(v2.post("/v2/repository/index", content=b'{"ready": }'))


# Numbers that JSON cannot write


@pytest.mark.parametrize("binary", [False, True], ids=["json", "bytes"])
@pytest.mark.parametrize("policy", ["error", "null", "string"])
def test_overflow_follows_nonfinite_and_is_never_a_bare_token(v2: httpx.Client, policy: str, binary: bool) -> None:
    """Ones of a million as FP16. Bytes contain infinity; by default it is refused with output and index."""
    request = body(("value_projection", binary), reply={"datatype": "FP16", "nonfinite": policy})
    request["inputs"] = in_json(query=np.full((1, 1, 6), 1e6, np.float32))
    answer = v2.post(INFER, json=request)

    if policy == "error":
        assert re.search(r"value_projection\[0, \d, 0, \d\] = -?inf", refused(answer))
    elif binary:
        assert np.isinf(read(answer).arrays["value_projection"]).any()
    else:
        [output] = json.loads(answer.content, parse_constant=lambda word: pytest.fail(f"a bare {word}"))["outputs"]
        odd = {word for word in output["data"] if not isinstance(word, float)}
        assert odd and odd <= ({None} if policy == "null" else {"inf", "-inf"})
