"""Requests and replies encoded by one side and decoded by the other, without a server."""

import numpy as np
import pytest

from attend.errors import InvalidRequest, MalformedBody
from attend.limits import WireLimits
from attend.tensors import DATATYPES, datatype_of
from attend.wire.client_codec import decode_json_reply, encode_json_request
from attend.wire.codec import Reply
from attend.wire.json.reader import decode
from attend.wire.json.writer import encode
from attend.wire.schemas.attend import AttendRequest, ReplyOptions
from attend.wire.schemas.layers import PutLayer

FLOATS = ["FP16", "BF16", "FP32", "FP64"]


def numbers(datatype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(DATATYPES[datatype].numpy)


@pytest.mark.parametrize("form", ["flat", "base64"])
@pytest.mark.parametrize("datatype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0, 3), (1,)])
def test_a_reply_with_shapes_is_decoded_exactly(form, datatype, shape):
    scores = numbers(datatype, *shape)
    scores.reshape(-1)[:1] = -np.inf
    keys = np.arange(scores.size).reshape(shape)
    reply = Reply({"name": "x", "fingerprint": "y"}, 3, datatype, {"scores": scores, "attention_weights": {"keys": keys, "values": -keys}})
    reply.tensors["attention_weights"]["values"] = numbers(datatype, *shape)

    head, tensors = decode_json_reply(b"".join(encode(reply, ReplyOptions(form=form))[1]))

    assert (head.layer.model_dump(), head.fully_masked_rows) == (reply.layer, 3)
    pairs = [
        (tensors["scores"], scores),
        *((tensors["attention_weights"][p], reply.tensors["attention_weights"][p]) for p in ("keys", "values")),
    ]
    for got, sent in pairs:
        assert datatype_of(got) == datatype_of(sent) and got.flags.writeable
        np.testing.assert_array_equal(got, sent)


@pytest.mark.parametrize("datatype", FLOATS)
def test_nested_lists_are_decoded_exactly(datatype):
    output = numbers(datatype, 2, 3, 4)
    reply = Reply({"name": "x", "fingerprint": "y"}, 0, datatype, {"output": output})
    read = decode_json_reply(b"".join(encode(reply, ReplyOptions())[1]))[1]["output"]
    assert read.dtype == np.float64
    np.testing.assert_array_equal(read.astype(output.dtype), output)


@pytest.mark.parametrize(
    ("text", "expected"), [('["-inf", 1]', -np.inf), ('["inf", 1]', np.inf), ('["nan", 1]', np.nan), ("[null, 1]", np.nan)]
)
def test_strings_and_nulls_are_decoded_as_nonfinite_floats(text, expected):
    body = f'{{"layer": {{"name": "x", "fingerprint": "y"}}, "fully_masked_rows": 0, "scores": {text}}}'.encode()
    np.testing.assert_array_equal(decode_json_reply(body)[1]["scores"], [expected, 1])


def test_a_string_that_is_not_a_number_is_refused():
    with pytest.raises(MalformedBody) as refused:
        decode_json_reply(b'{"layer": {"name": "x", "fingerprint": "y"}, "fully_masked_rows": 0, "scores": ["many"]}')
    assert refused.value.problems[0].at == "/scores"


def sent(field: str, value: object) -> tuple[bytes, np.ndarray]:
    body = encode_json_request({field: value}, AttendRequest.tensor_kinds)
    return body, decode(body, {}, AttendRequest.tensor_kinds, WireLimits()).members[field]


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_a_tensor_of_any_datatype_arrives_exactly(datatype):
    array = (np.random.default_rng(2).standard_normal((2, 511)) * 100).astype(DATATYPES[datatype].numpy)
    body, got = sent("attend_mask" if datatype == "BOOL" else "query", array)
    assert b"base64" in body and got.dtype == array.dtype
    np.testing.assert_array_equal(got.astype(np.float64), array.astype(np.float64))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_lists_cannot_represent_are_base64(value):
    body, got = sent("bias", np.array([[value, 1.0]]))
    assert b"base64" in body
    np.testing.assert_array_equal(got, [[value, 1.0]])


def test_a_scalar_remains_a_scalar():
    _, got = sent("valid_lens", np.int64(3))
    assert got.shape == () and got == 3


def test_a_mapping_is_passed_on_unchanged():
    body = encode_json_request({"query": {"shape": [2, 3], "datatype": "FP32", "data": np.arange(6)}}, AttendRequest.tensor_kinds)
    np.testing.assert_array_equal(decode(body, {}, AttendRequest.tensor_kinds, WireLimits()).members["query"], np.arange(6).reshape(2, 3))


def test_weights_are_encoded_as_tensors_under_their_names():
    weights = {"query.weight": np.eye(3), "query.bias": np.zeros(3)}
    body = encode_json_request({"spec": {}, "weights": weights}, PutLayer.tensor_kinds)
    got = decode(body, {}, PutLayer.tensor_kinds, WireLimits()).members["weights"]
    np.testing.assert_array_equal(got["query.weight"], np.eye(3))
    with pytest.raises(InvalidRequest) as refused:
        encode_json_request({"weights": {"a/b": [1j]}}, PutLayer.tensor_kinds)
    assert refused.value.problems[0].at == "/weights/a~1b"
