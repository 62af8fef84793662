"""Outputs requested by name, rounding, options given as JSON text; pointers and values in refusals, over HTTP and gRPC."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.grpc_calls import address_of
from support.server import Server
from support.v2 import described, in_bytes, in_json, read, refused

QUERY = np.random.default_rng(53).standard_normal((2, 3, 6)).astype(np.float32)
INFER = "/v2/models/tiny/infer"
Array = np.ndarray[Any, Any]
KEYS, VALUES = "attention_weights.keys", "attention_weights.values"


def body(*outputs: Any, **options: Any) -> dict[str, Any]:
    """A request for these outputs, each a name or a name and its `binary_data`, with options as JSON text."""
    requested = [{"name": one} if isinstance(one, str) else {"name": one[0], "parameters": {"binary_data": one[1]}} for one in outputs]
    parameters = {name: value if isinstance(value, bool | str) else json.dumps(value) for name, value in options.items()}
    return {"inputs": in_json(query=QUERY), "outputs": requested, "parameters": parameters}


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

    requested = dict(one if isinstance(one, tuple) else (one, overall) for one in outputs)
    assert list(reply.arrays) == list(requested)
    assert reply.binary == {name for name, binary in requested.items() if binary}
    for name in {KEYS, VALUES} & set(requested):
        np.testing.assert_allclose(reply.arrays[name], want[name], rtol=0, atol=1e-6)
    if KEYS in requested:
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
        ((KEYS, VALUES, "logits"), {"top_k": 1}, "one of attention_weights, .*at /outputs/2"),
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


@pytest.fixture
def stub(v2_server: Server) -> Iterator[Any]:
    address = str(next(event["address"] for event in v2_server.events if event["event"] == "listening for gRPC"))
    with grpc.insecure_channel(address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def refused_by(stub: Any, message: Any, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=60)
    assert caught.value.code() is code, caught.value
    return str(caught.value.details())


def number(datatype: str, data: Any, name: str = "query", shape: Any = (1, 1, 6)) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype, "data": data}


def with_nan(array: Array, *index: int) -> Array:
    array = array.copy()
    array[index] = np.nan
    return array


# Text that no reply can hold


@pytest.mark.parametrize("member", ["id", "output", "flag", "parameter", "input"])
@pytest.mark.parametrize("inline", [True, False])
def test_a_lone_surrogate_is_refused_anywhere(v2: httpx.Client, member: str, inline: bool) -> None:
    """With numbers in the JSON and without them, which two parsers read."""
    half = "\ud800"
    numbers = {"data": QUERY.ravel().tolist()} if inline else {"parameters": {"binary_data_size": QUERY.nbytes}}
    tensor = described("query", QUERY, **numbers)
    members: dict[str, Any] = {
        "id": {"id": half},
        "output": {"outputs": [{"name": half}]},
        "flag": {"outputs": [{"name": "output", "parameters": {half: True}}]},
        "parameter": {"parameters": {half: half}},
        "input": {"inputs": [{**tensor, "name": half}]},
    }[member]
    head = json.dumps({"inputs": [tensor], **members}).encode()

    answer = v2.post(
        INFER, content=head + (b"" if inline else QUERY.tobytes()), headers={"Inference-Header-Content-Length": str(len(head))}
    )

    place = {"id": "/id", "output": "/outputs/0", "flag": "/outputs/0/parameters", "parameter": "/parameters", "input": "/inputs/0/name"}
    assert f"at {place[member]}" in refused(answer)


@pytest.mark.parametrize("text", ['{"\\ud800": 1}', '{"\\ud800": NaN}'])
def test_a_lone_surrogate_in_json_text_is_escaped_over_grpc(stub: Any, text: str) -> None:
    """gRPC strings cannot contain one. The JSON text of an option can, and the pointer repeats it."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(
        name="query", shape=[1, 1, 6], datatype="FP32", contents=service_pb2.InferTensorContents(fp32_contents=[1] * 6)
    )
    message = service_pb2.ModelInferRequest(model_name="tiny", inputs=[tensor], parameters={"select": {"string_param": text}})

    assert "at /parameters/select" in refused_by(stub, message)


# Places


@pytest.mark.parametrize(
    ("parameters", "at"),
    [
        ({"scale": "x"}, "/parameters/scale"),
        ({"causal": "x"}, "/parameters/causal"),
        ({"select": '{"heads": [7]}'}, "/parameters/select/heads/0"),
        ({"select": '{"heads": "x"}'}, "/parameters/select/heads"),
        ({"reply": '{"decimals": -1}'}, "/parameters/reply/decimals"),
        ({"tokens": '{"query": ["a"]}'}, "/parameters/tokens/query"),
        ({"query_offset": "x"}, "/parameters/query_offset"),
    ],
)
def test_pointers_to_options_are_below_parameters(v2: httpx.Client, stub: Any, parameters: dict[str, Any], at: str) -> None:
    assert refused(v2.post(INFER, json={"inputs": in_json(query=QUERY), "parameters": parameters})).endswith(f", at {at}")

    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="query", shape=QUERY.shape, datatype="FP32")
    said = {name: {"string_param": value} for name, value in parameters.items()}
    message = service_pb2.ModelInferRequest(model_name="tiny", inputs=[tensor], parameters=said, raw_input_contents=[QUERY.tobytes()])
    assert refused_by(stub, message).endswith(f", at {at}")


def test_pointers_to_elements_follow_the_form_of_the_data(v2: httpx.Client, stub: Any) -> None:
    """Flat or nested. Bytes have no pointer, so the index is in the text. A column may stand for [b]."""
    flags = np.zeros((2, 3), np.int64)
    flags[1, 2] = 2
    sent = described("query", QUERY)
    lengths = np.array([[1], [9]])
    tensors: list[tuple[list[dict[str, Any]], str]] = [
        (in_json(query=QUERY, block_keys=flags), "got 2 in block_keys, at /inputs/1/data/5"),
        ([*in_json(query=QUERY), described("block_keys", flags, data=flags.tolist())], "at /inputs/1/data/1/2"),
        ([described("valid_lens", lengths, data=[1, 9]), *in_json(query=QUERY)], "at /inputs/0/data/1"),
        ([described("valid_lens", lengths, data=[[1], [9]]), *in_json(query=QUERY)], "at /inputs/0/data/1/0"),
        ([{**sent, "shape": [2, 3, 5], "data": [1] * 30}], "expected 6 values per query"),
        (in_json(query=QUERY, attend_mask=np.ones((7, 7), np.int64)), "got shape [7, 7] in attend_mask, at /inputs/1"),
    ]
    for inputs, words in tensors:
        assert words in refused(v2.post(INFER, json={"inputs": inputs})), words

    body, headers = in_bytes(None, query=with_nan(QUERY, 1, 0, 4))
    words = "got nan as element [1, 0, 4] of query, at /inputs/0"
    assert refused(v2.post(INFER, content=body, headers=headers)).endswith(words)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="query", shape=QUERY.shape, datatype="FP32")
    raw = service_pb2.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[with_nan(QUERY, 1, 0, 4).tobytes()])
    assert refused_by(stub, raw).endswith(words)
    tensor.contents.fp32_contents.extend(with_nan(QUERY, 1, 0, 4).ravel().tolist())
    typed = service_pb2.ModelInferRequest(model_name="tiny", inputs=[tensor])
    assert refused_by(stub, typed).endswith("got nan in query, at /inputs/0/contents/fp32_contents/22")


def test_pointers_to_unknown_members_and_missing_inputs(v2: httpx.Client) -> None:
    """A member with the name of a field is not below parameters; a missing query is reported at the inputs."""
    assert refused(v2.post(INFER, json={"query": 1, "inputs": in_json(query=QUERY)})).endswith("at /query")
    error = refused(v2.post(INFER, json={"inputs": in_json(key=QUERY)}))
    assert error == "expected an input called query, got key, at /inputs"
    assert refused(v2.post(INFER, json={"inputs": in_json(query=QUERY), "outputs": 7})).endswith("at /outputs")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/none"),
        ("GET", "/v2/models/none/ready"),
        ("GET", "/v2/models/none/config"),
        ("GET", "/v2/models/none/stats"),
        ("POST", "/v2/models/none/infer"),
        ("POST", "/v2/repository/models/none/load"),
        ("POST", "/v2/repository/models/none/unload"),
    ],
)
def test_an_unknown_model_in_the_path_has_no_pointer(v2: httpx.Client, method: str, path: str) -> None:
    assert refused(v2.request(method, path), 404).endswith('got "none"')


def test_an_unknown_model_over_grpc_points_to_model_name(stub: Any) -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="query", shape=QUERY.shape, datatype="FP32")
    message = service_pb2.ModelInferRequest(model_name="none", inputs=[tensor], raw_input_contents=[QUERY.tobytes()])
    assert refused_by(stub, message, grpc.StatusCode.NOT_FOUND).endswith('got "none", at /model_name')


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("querry", 'expected one of attend_keys, attend_mask, bias, .*got "querry" \\(did you mean query\\?\\)'),
        ("key_padding_mask", 'expected block_keys .*got "key_padding_mask"'),
        ("tokens", "expected tokens among the parameters"),
        ("causal", "expected causal among the parameters"),
        ("outputs", "expected one of attend_keys, attend_mask"),
    ],
)
def test_an_unknown_input_is_refused_with_the_known_names(v2: httpx.Client, stub: Any, name: str, words: str) -> None:
    datatype = {"tokens": "BYTES", "causal": "BOOL"}.get(name, "FP32")
    inputs = [*in_json(query=QUERY), number(datatype, [1], name, [1])]
    errors = [refused(v2.post(INFER, json={"inputs": inputs}))]
    tensors = [
        service_pb2.ModelInferRequest.InferInputTensor(name="query", shape=QUERY.shape, datatype="FP32"),
        service_pb2.ModelInferRequest.InferInputTensor(name=name, shape=[1], datatype=datatype),
    ]
    message = service_pb2.ModelInferRequest(model_name="tiny", inputs=tensors, raw_input_contents=[QUERY.tobytes(), b"\0\0\0\0"])
    errors.append(refused_by(stub, message))

    for error in errors:
        assert re.search(words, error) and error.endswith("at /inputs/1/name"), error


# Values


@pytest.mark.parametrize("nested", [False, True])
def test_mask_values_other_than_0_and_1_are_refused_with_their_place(v2: httpx.Client, nested: bool) -> None:
    keys: list[Any] = [1, True, 0, 2, False, 1]
    mask = number("BOOL", [keys] if nested else keys, "attend_keys", (1, 6))
    error = refused(v2.post(INFER, json={"inputs": [number("FP32", [0.5] * 6), mask]}))
    assert error.endswith(f"0 or 1 for BOOL, got 2, at /inputs/1/data/{'0/' if nested else ''}3"), error


@pytest.mark.parametrize("name", ["query", "bias", "valid_lens", "output_gradient"])
def test_the_datatype_bool_is_refused_for_tensors_of_numbers(v2: httpx.Client, name: str) -> None:
    """The datatype is wrong, whatever the data."""
    for data in ([1] * 6, [True] * 6, [2] * 6):
        error = refused(v2.post(INFER, json={"inputs": [number("BOOL", data, name)]}))
        assert error.endswith('FP64, got "BOOL", at /inputs/0/datatype'), error


@pytest.mark.parametrize(("member", "words"), [("datatype", "got nothing"), ("shape", "got nothing")])
def test_a_missing_member_is_reported_as_nothing_not_as_null(v2: httpx.Client, member: str, words: str) -> None:
    entry = number("FP32", [0.5] * 6)
    del entry[member]
    assert f"{words}, at /inputs/0/{member}" in refused(v2.post(INFER, json={"inputs": [entry]}))
    assert f"got null, at /inputs/0/{member}" in refused(v2.post(INFER, json={"inputs": [{**entry, member: None}]}))


def test_a_repeated_key_is_refused_with_its_name(v2: httpx.Client) -> None:
    entry = json.dumps(number("FP32", [0.5] * 6))
    for text, at in (
        (f'{{"inputs": [{entry}], "inputs": []}}', "/inputs"),
        (f'{{"inputs": [{entry[:-1]}, "data": [1]}}]}}', "/inputs/0/data"),
        (f'{{"inputs": [{entry[:-1]}, "n\\u0061me": "key"}}]}}', "/inputs/0/name"),
        (f'{{"inputs": [{entry}], "parameters": {{"causal": true, "causal": true}}}}', "/parameters/causal"),
    ):
        assert refused(v2.post(INFER, content=text)).endswith(f'each key once, got "{at.split("/")[-1]}" twice, at {at}')


@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("INT8", 300, "a whole number from -128 to 127 for INT8, got 300"),
        ("INT8", 1.5, "a whole number from -128 to 127 for INT8, got 1.5"),
        ("UINT8", -1, "a whole number from 0 to 255 for UINT8, got -1"),
        ("INT64", 2**63, "to 9223372036854775807 for INT64, got 9223372036854775808"),
        ("INT64", 10**30, f"for INT64, got {10**30}"),
        ("UINT64", 2**64, "for UINT64, got 18446744073709551616"),
        ("UINT64", -(2**60), f"for UINT64, got {-(2**60)}"),
        ("FP32", 1e39, "a number that is finite in FP32, got 1e+39"),
        ("FP16", 70000, "a number that is finite in FP16, got 70000"),
        ("BF16", 3.4e38 * 1.1, "a number that is finite in BF16, got"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_number_outside_of_its_datatype_is_refused_with_its_place(
    v2: httpx.Client, datatype: str, value: Any, words: str, nested: bool
) -> None:
    data: list[Any] = [1, 1, 1, value, 1, 1]

    error = refused(v2.post(INFER, json={"inputs": [number(datatype, [[data]] if nested else data)]}))

    assert words in error and error.endswith(f"at /inputs/0/data/{'0/0/' if nested else ''}3"), error


@pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1, -(2**63) + 1])
@pytest.mark.parametrize("name", ["valid_lens", "query_offset"])
def test_a_refused_integer_of_64_bits_is_shown_exactly(v2: httpx.Client, name: str, value: int) -> None:
    """float64 would round them."""
    inputs = [*in_json(query=QUERY), number("INT64", [1, value], name, [2])]

    assert str(value) in refused(v2.post(INFER, json={"inputs": inputs}))


def test_a_bias_may_be_minus_infinity_in_any_float_datatype(v2: httpx.Client) -> None:
    bias = number("FP16", ["-inf", 0, 0] * 3, "bias", [3, 3])
    assert v2.post(INFER, json={"inputs": [*in_json(query=QUERY), bias]}).status_code == 200
    for datatype in ("INT8", "INT64"):
        error = refused(v2.post(INFER, json={"inputs": [*in_json(query=QUERY), {**bias, "datatype": datatype}]}))
        assert "-inf" in error and error.endswith("at /inputs/1/data/0")


def test_refusals_of_typed_contents_and_bytes_have_the_value(v2: httpx.Client, stub: Any) -> None:
    contents = service_pb2.InferTensorContents(int_contents=[1, 1, 1, 1, 300, 1])
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="query", shape=[1, 1, 6], datatype="INT8", contents=contents)
    message = service_pb2.ModelInferRequest(model_name="tiny", inputs=[tensor])
    assert refused_by(stub, message).endswith("for INT8, got 300, at /inputs/0/contents/int_contents/4")

    body, headers = in_bytes(None, query=QUERY, block_keys=np.zeros((2, 3), np.bool_))
    assert refused(v2.post(INFER, content=body[:-1] + b"\7", headers=headers)).endswith("got 7 as byte 5, at /inputs/1")


@pytest.mark.parametrize("value", [10**30, -5, 0.5, "1s"])
def test_a_timeout_out_of_bounds_is_refused_with_the_bounds(v2: httpx.Client, value: Any) -> None:
    error = refused(v2.post(INFER, json={"inputs": in_json(query=QUERY), "parameters": {"timeout": value}}))

    assert "a whole number of microseconds from 0 to 18446744073709551615" in error and error.endswith("at /parameters/timeout")


# Headers and lists of names


def test_different_header_lengths_are_refused(v2: httpx.Client) -> None:
    """A proxy may have used the other one."""
    body, headers = in_bytes(None, query=QUERY)
    length = headers["Inference-Header-Content-Length"]
    for first, second in ((length, str(int(length) - 1)), (str(int(length) - 1), length), ("", length), (length, "")):
        answer = v2.post(INFER, content=body, headers=[("Inference-Header-Content-Length", value) for value in (first, second)])
        assert "one Inference-Header-Content-Length" in refused(answer)
    same = [("Inference-Header-Content-Length", length)] * 2
    assert v2.post(INFER, content=body, headers=same).status_code == 200


def test_the_list_of_model_names_in_a_refusal_is_shortened(start_here: Callable[..., str]) -> None:
    with httpx.Client(base_url=start_here()) as http:
        spec = {"parameters": {"config": json.dumps({"d_model": 4, "num_heads": 2})}}
        for i in range(7):
            assert http.post(f"/v2/repository/models/m{i}/load", json=spec).status_code == 200
        whole = "(default, m0, m1, m2, m3, m4, m5, m6)"
        assert whole in refused(http.get("/v2/models/none"), 404)
        for i in range(7, 9):
            assert http.post(f"/v2/repository/models/m{i}/load", json=spec).status_code == 200
        assert f"{whole[:-1]}, and 2 more)" in refused(http.get("/v2/models/none"), 404)
