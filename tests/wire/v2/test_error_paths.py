"""Pointers and values in refusals: places in the V2 body that was sent, over HTTP and gRPC."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from support.server import Server
from support.v2 import described, in_bytes, in_json, refused
from tritonclient.grpc import service_pb2, service_pb2_grpc

QUERY = np.random.default_rng(59).standard_normal((2, 3, 6)).astype(np.float32)
INFER = "/v2/models/tiny/infer"
Array = np.ndarray[Any, Any]


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


@pytest.mark.parametrize("member", ["id", "output", "wish", "parameter", "input"])
@pytest.mark.parametrize("inline", [True, False])
def test_a_lone_surrogate_is_refused_anywhere(v2: httpx.Client, member: str, inline: bool) -> None:
    """With numbers in the JSON and without them, which two parsers read."""
    half = "\ud800"
    numbers = {"data": QUERY.ravel().tolist()} if inline else {"parameters": {"binary_data_size": QUERY.nbytes}}
    tensor = described("query", QUERY, **numbers)
    members: dict[str, Any] = {
        "id": {"id": half},
        "output": {"outputs": [{"name": half}]},
        "wish": {"outputs": [{"name": "output", "parameters": {half: True}}]},
        "parameter": {"parameters": {half: half}},
        "input": {"inputs": [{**tensor, "name": half}]},
    }[member]
    head = json.dumps({"inputs": [tensor], **members}).encode()

    answer = v2.post(
        INFER, content=head + (b"" if inline else QUERY.tobytes()), headers={"Inference-Header-Content-Length": str(len(head))}
    )

    place = {"id": "/id", "output": "/outputs/0", "wish": "/outputs/0/parameters", "parameter": "/parameters", "input": "/inputs/0/name"}
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
