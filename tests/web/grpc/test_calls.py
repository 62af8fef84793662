"""GRPCInferenceService through Triton's client, and through bare messages that this client cannot send."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from attend.web.grpc.descriptors import DESCRIPTOR
from support.grpc_calls import GOOD, INVALID, KEY, NOT_FOUND, QUERY, SERVICE, Array, address_of, entry, request, tensor
from support.server import Server
from support.v2 import in_json, read


@pytest.fixture
def client(v2_server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(address_of(v2_server)) as made:
        yield made


@pytest.fixture
def channel(v2_server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address_of(v2_server)) as made:
        yield made


@pytest.fixture(scope="module")
def want(v2: httpx.Client) -> dict[str, Array]:
    """The answer over HTTP."""
    return read(v2.post("/v2/models/tiny/infer", json={"inputs": in_json(query=QUERY, key=KEY)})).arrays


def test_metadata_and_config_equal_those_over_http(client: Any, v2: httpx.Client) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("tiny") and not client.is_model_ready("none") and not client.is_model_ready("tiny", "2")
    assert list(client.get_server_metadata().extensions) == v2.get("/v2").json()["extensions"]
    metadata = client.get_model_metadata("tiny", "1", as_json=True)
    assert [tensor["name"] for tensor in metadata["outputs"]] == [tensor["name"] for tensor in v2.get("/v2/models/tiny").json()["outputs"]]
    config = client.get_model_config("tiny").config
    want = v2.get("/v2/models/tiny/config").json()
    assert (config.name, config.max_batch_size, config.platform) == (want["name"], want["max_batch_size"], want["platform"])
    assert [tensor.optional for tensor in config.input] == [tensor["optional"] for tensor in want["input"]]
    assert [list(tensor.dims) for tensor in config.output] == [tensor["dims"] for tensor in want["output"]]
    assert not config.model_transaction_policy.decoupled


def field(number: int, kind: int, payload: bytes) -> bytes:
    """A field in the wire format, with a field number below 16 and a length below 16,384."""
    length = bytes([len(payload) & 127 | 128, len(payload) >> 7]) if kind == 2 else b""
    return bytes([number << 3 | kind]) + length + payload


def typed(contents: bytes, datatype: str = "INT32") -> bytes:
    """A request of two rows of six numbers, whose contents are these fields."""
    inputs = field(1, 2, b"query") + field(2, 2, datatype.encode()) + field(3, 2, bytes([2, 6])) + contents
    return field(1, 2, b"tiny") + field(5, 2, inputs)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("encoding", ["packed", "one by one", "in pieces"])
def test_typed_numbers_may_be_packed_split_or_single(channel: grpc.Channel, v2: httpx.Client, encoding: str, negative: bool) -> None:
    """Protobuf allows a packed field in several pieces, and unpacked numbers."""
    numbers = [0, 1, 127, 3, 5, 6, 300, 70000, 2**31 - 1, 9, 2, 4]
    numbers = [-number for number in numbers] if negative else numbers
    written = [service_pb2.InferTensorContents(int_contents=[number]).SerializeToString()[2:] for number in numbers]
    contents = {
        "packed": field(5, 2, field(2, 2, b"".join(written))),
        "one by one": field(5, 2, b"".join(field(2, 0, one) for one in written)),
        "in pieces": field(5, 2, field(2, 2, b"".join(written[:5])) + field(2, 2, b"".join(written[5:7])))
        + field(5, 2, field(2, 2, b"".join(written[7:]))),
    }[encoding]

    body = typed(contents) + request("tiny", parameters={"reproducible": {"bool_param": True}}).SerializeToString()

    got = service_pb2.ModelInferResponse.FromString(channel.unary_unary(f"/{SERVICE}/ModelInfer")(body))

    inputs = in_json(query=np.array(numbers, np.int32).reshape(2, 6))
    want = read(v2.post("/v2/models/tiny/infer", json={"inputs": inputs, "parameters": {"reproducible": True}}))
    np.testing.assert_array_equal(np.frombuffer(got.raw_output_contents[0], np.float32), want.arrays["output"].ravel())


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (field(5, 2, field(2, 2, b"\x80" * 11 + b"\0")), "packed numbers"),
        (field(5, 2, field(2, 2, b"\x01\x80")), "packed numbers"),
        (field(5, 2, field(6, 2, b"\0" * 47)), "int_contents alone for INT32, got another field"),
        (field(5, 2, b"\x12\x7f"), "ModelInferRequest"),
        (field(5, 2, b"\x13"), "ModelInferRequest"),
    ],
)
def test_malformed_typed_contents_are_refused(channel: grpc.Channel, contents: bytes, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(typed(contents))
    assert caught.value.code() is INVALID


def test_floats_of_an_incomplete_size_are_refused(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError, match="packed numbers"):
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(typed(field(5, 2, field(6, 2, bytes(47))), "FP32"))


def test_a_message_with_too_many_fields_is_refused_before_it_is_parsed(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError, match="at most 16384 fields") as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(field(1, 2, b"tiny") + b"\x2a\0" * 200_000)
    assert caught.value.code() is INVALID


BARE = entry("query", [1, 1, 6])
REFUSED: dict[str, tuple[Any, grpc.StatusCode, str]] = {
    "no inputs": (request("tiny"), INVALID, "/inputs"),
    "an unknown model": (request("none", GOOD), NOT_FOUND, "none"),
    "an unknown version": (request("tiny", GOOD, model_version="2"), NOT_FOUND, "version 1"),
    "too few numbers": (request("tiny", entry("query", [1, 1, 6], fp32_contents=[1])), INVALID, "expected 6 values"),
    "no numbers": (request("tiny", BARE), INVALID, "expected 6 values"),
    "too few bytes": (request("tiny", BARE, raw_input_contents=[bytes(23)]), INVALID, "expected 24 bytes"),
    "too many pieces": (request("tiny", BARE, raw_input_contents=[bytes(24)] * 2), INVALID, "raw_input_contents"),
    "raw and typed": (request("tiny", GOOD, raw_input_contents=[bytes(24)]), INVALID, "both"),
    "the wrong field": (request("tiny", entry("query", [1, 1, 6], fp64_contents=[1] * 6)), INVALID, "fp64_contents"),
    "FP16 typed": (request("tiny", entry("query", [1, 1, 6], "FP16", fp32_contents=[1] * 6)), INVALID, "raw_input_contents"),
    "out of range": (request("tiny", entry("query", [1, 1, 6], "INT8", int_contents=[300] * 6)), INVALID, "INT8"),
    "not finite": (request("tiny", entry("query", [1, 1, 6], fp32_contents=[np.nan] * 6)), INVALID, "finite"),
    "BYTES": (request("tiny", entry("query", [1], "BYTES", bytes_contents=[b"a"])), INVALID, "BYTES"),
    "a negative length": (request("tiny", entry("query", [-1], fp32_contents=[1])), INVALID, "/inputs/0/shape/0"),
    "a shape that overflows": (request("tiny", entry("query", [2**31 - 1] * 4)), INVALID, "2^48"),
    "an input twice": (request("tiny", GOOD, GOOD), INVALID, "twice"),
    "an unknown output": (request("tiny", GOOD, outputs=[{"name": "logits"}]), INVALID, "/outputs/0"),
    "classification": (
        request("tiny", GOOD, outputs=[{"name": "output", "parameters": {"classification": {"int64_param": 1}}}]),
        INVALID,
        "classification",
    ),
    "an unknown parameter of an input": (
        request("tiny", entry("query", [1, 1, 6], parameters={"scale": {"int64_param": 1}}, fp32_contents=[0.5] * 6)),
        INVALID,
        'expected no field of that name, got a field "scale", at /inputs/0/parameters/scale',
    ),
    "a parameter without a value": (request("tiny", GOOD, parameters={"causal": {}}), INVALID, "value"),
    "an unknown parameter": (request("tiny", GOOD, parameters={"colour": {"int64_param": 1}}), INVALID, "colour"),
    "a stream's last word": (
        request("tiny", GOOD, parameters={"triton_enable_empty_final_response": {"string_param": "yes"}}),
        INVALID,
        "triton_enable_empty_final_response",
    ),
    "an input parameter": (request("tiny", GOOD, parameters={"query": {"string_param": "[]"}}), INVALID, "/parameters/query"),
    "half a pair as a name": (
        request("tiny", GOOD, parameters={"tokens": {"string_param": r'{"\ud800": 1, "\ud800": 1}'}}),
        INVALID,
        r"/tokens/\ud800",
    ),
    "too late": (request("tiny", GOOD, parameters={"timeout": {"int64_param": 1}}), grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_have_the_text_of_http_and_a_grpc_code(channel: grpc.Channel, case: str) -> None:
    message, code, words = REFUSED[case]

    with pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)

    assert caught.value.code() is code
    assert words in caught.value.details()


@pytest.mark.parametrize("empty", [False, True])
def test_the_parameter_for_an_empty_final_response_is_accepted(channel: grpc.Channel, want: dict[str, Array], empty: bool) -> None:
    """perf_analyzer sends it with every request, also outside of streams."""
    inputs = [entry("query", list(QUERY.shape)), entry("key", list(KEY.shape))]
    parameters = {"triton_enable_empty_final_response": {"bool_param": empty}}

    reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
        request("tiny", *inputs, parameters=parameters, raw_input_contents=[QUERY.tobytes(), KEY.tobytes()])
    )

    got = np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(reply.outputs[0].shape)
    np.testing.assert_allclose(got, want["output"], rtol=0, atol=1e-6)


def test_parameters_that_client_libraries_add_are_ignored(channel: grpc.Channel, want: dict[str, Array]) -> None:
    """KServe's client sends sizes and `binary_data`, MLServer's codecs send `content_type`."""
    codec, size = {"content_type": {"string_param": "np"}}, {"binary_data_size": {"int64_param": QUERY.nbytes}}
    inputs = [entry("query", list(QUERY.shape), parameters={**codec, **size}), entry("key", list(KEY.shape))]
    outputs = [{"name": "output", "parameters": {**codec, "binary_data": {"bool_param": True}}}]

    reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
        request("tiny", *inputs, outputs=outputs, parameters=codec, raw_input_contents=[QUERY.tobytes(), KEY.tobytes()])
    )

    got = np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(reply.outputs[0].shape)
    np.testing.assert_allclose(got, want["output"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("character", ["a", "%", "\n", "ü", "€", "😀"])
def test_a_long_refusal_in_any_script_is_truncated_to_fit_a_header(channel: grpc.Channel, character: str) -> None:
    """Percent-encoding takes up to twelve bytes for a character."""
    parameters = {"select": {"string_param": json.dumps({character * 5000: 1}, ensure_ascii=False)}}

    with pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request("tiny", GOOD, parameters=parameters))

    assert caught.value.code() is INVALID
    assert f"/select/{character if character != chr(10) else ''}" in caught.value.details()


def test_invalid_messages_are_refused_and_too_large_ones_are_not_read(channel: grpc.Channel) -> None:
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")

    for body, code in ((b"\xff" * 9, grpc.StatusCode.INVALID_ARGUMENT), (bytes(2 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED)):
        with pytest.raises(grpc.RpcError) as caught:
            call(body)
        assert caught.value.code() is code


def test_every_call_is_counted_and_logged(client: Any, v2: httpx.Client, v2_server: Server) -> None:
    client.is_server_live()

    assert f'attend_requests_total{{endpoint="{SERVICE}/ServerLive",status="OK"}}' in v2.get("/metrics").text
    assert {"method": f"{SERVICE}/ServerLive", "status": "OK"}.items() <= next(
        event.items() for event in reversed(v2_server.events) if event.get("method") == f"{SERVICE}/ServerLive"
    )


def test_the_log_line_of_an_inference_has_the_fields_of_http(channel: grpc.Channel, v2: httpx.Client, v2_server: Server) -> None:
    infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
    query = entry("query", [2, 3, 6])
    _, call = infer.with_call(request("tiny", query, raw_input_contents=[QUERY.tobytes()]), metadata=[("x-request-id", "mine-1")])
    v2.post("/v2/models/tiny/infer", json={"inputs": in_json(query=QUERY)}, headers={"x-request-id": "mine-2"})
    with pytest.raises(grpc.RpcError) as refused:
        infer(request("tiny", query), metadata=[("x-request-id", "not one")])

    over_grpc, over_http = (next(event for event in v2_server.events if event.get("request_id") == name) for name in ("mine-1", "mine-2"))
    assert ("x-request-id", "mine-1") in [tuple(pair) for pair in call.trailing_metadata()]
    for name in ("layer", "query", "keys", "outputs", "operations", "batch"):
        assert over_grpc[name] == over_http[name], name
    assert over_grpc["compute_ms"] > 0 and over_grpc.keys() >= {"decode_ms", "queue_ms", "encode_ms", "ms", "key"}
    drawn = dict(refused.value.trailing_metadata())["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", drawn)
    assert any(event.get("request_id") == drawn and event["status"] == "INVALID_ARGUMENT" for event in v2_server.events)


def test_unknown_methods_are_unimplemented(client: Any) -> None:
    for call in (client.get_trace_settings, client.get_log_settings, client.get_system_shared_memory_status):
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            call()


def test_repository_and_statistics(client: Any, v2: httpx.Client) -> None:
    client.load_model("over-grpc", config=json.dumps({"d_model": 6, "num_heads": 2}))
    try:
        assert ("over-grpc", "1", "READY") in [(m.name, m.version, m.state) for m in client.get_model_repository_index().models]
        client.infer("over-grpc", [tensor("query", QUERY)])
        [statistics] = client.get_inference_statistics("over-grpc").model_stats
        assert (statistics.inference_count, statistics.execution_count, statistics.inference_stats.success.count) == (2, 1, 1)
        assert len(client.get_inference_statistics().model_stats) > 1
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*/parameters/config"):
            client.load_model("x", config="{}")
        client.unload_model("over-grpc")
        assert not client.is_model_ready("over-grpc")
        index = client.get_model_repository_index().models
        assert ("over-grpc", "UNAVAILABLE", "unloaded") in [(m.name, m.state, m.reason) for m in index]
        with pytest.raises(InferenceServerException, match="FAILED_PRECONDITION"):
            client.infer("over-grpc", [tensor("query", QUERY)])
        client.load_model("over-grpc")
        client.infer("over-grpc", [tensor("query", QUERY)])
    finally:
        v2.delete("/layers/over-grpc")
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.unload_model("over-grpc")


def test_concurrent_asynchronous_calls_get_their_own_results(client: Any, want: dict[str, Array]) -> None:
    """Calls of different lengths."""
    done, replies = threading.Event(), []

    def take(result: Any, error: Any) -> None:
        replies.append(error or result)
        if len(replies) == 24:
            done.set()

    for i in range(24):
        client.async_infer("tiny", [tensor("query", QUERY), tensor("key", KEY[:, : 1 + i % 5])], take, request_id=str(i))
    assert done.wait(60)

    for reply in replies:
        keys = 1 + int(reply.get_response().id) % 5
        assert reply.as_numpy("attention_weights").shape == (2, 3, 3, keys)
        if keys == 5:
            np.testing.assert_allclose(reply.as_numpy("output"), want["output"], rtol=0, atol=1e-6)


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == health_pb2.HealthCheckResponse.SERVING
    assert next(iter(health.Watch(health_pb2.HealthCheckRequest()))).status == health_pb2.HealthCheckResponse.SERVING

    reflected = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(reflected.get_services())
    [message] = [m for m in reflected.FindFileContainingSymbol(SERVICE).message_type if m.name == "ModelInferRequest"]
    assert {field.name: field.number for field in message.field}["raw_input_contents"] == 7


def test_cancelled_and_expired_calls_are_not_computed_and_a_drain_answers_the_rest(start: Callable[..., Server]) -> None:
    """Three calls wait. One is cancelled, one reaches its deadline, and the last is answered although the server is stopping."""
    server = start("--grpc-port", "0", "--batch-delay", "1")
    with grpc.insecure_channel(address_of(server)) as channel, httpx.Client(base_url=server.url) as http:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        inputs = entry("query", [1, 1, 64], fp32_contents=[0.5] * 64)
        good, with_timeout = request("default", inputs), request("default", inputs, parameters={"timeout": {"int64_param": 100_000}})

        def expire() -> None:
            """A call that reaches its deadline at the server, which has then received all earlier calls of this connection."""
            with pytest.raises(grpc.RpcError, match="the caller's deadline"):
                stub.ModelInfer(with_timeout)

        leaving, staying = stub.ModelInfer.future(good), stub.ModelInfer.future(good)
        expire()
        leaving.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(good, timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(staying.result(60).outputs) == 2
        assert re.search(r"^attend_abandoned_calls_total [12]", http.get("/metrics").text, re.MULTILINE)

        staying = stub.ModelInfer.future(good)
        expire()
        server.process.terminate()
        assert len(staying.result(60).outputs) == 2
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(good, timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    server.process.wait(30)


def grpc_type(field: Any) -> str:
    """The name of a field's type in a descriptor: DOUBLE, FLOAT, …"""
    return str(next(name for name, value in vars(type(field)).items() if name.startswith("TYPE_") and value == field.type)).removeprefix(
        "TYPE_"
    )


def test_message_definitions_equal_those_of_tritons_client() -> None:
    """Every field has the same number and type; there are no others."""
    file = FileDescriptorProto()
    DESCRIPTOR.CopyToProto(file)
    ours = json_format.MessageToDict(file)
    pool = service_pb2.DESCRIPTOR.pool
    compared = 0

    def compare(message: dict[str, Any], package: str) -> None:
        nonlocal compared
        published_message = pool.FindMessageTypeByName(f"{package}.{message['name']}")
        for field in message.get("field", []):
            published = published_message.fields_by_name[field["name"]]
            assert published.number == field["number"], field
            assert f"TYPE_{grpc_type(published)}" == field["type"], field
            compared += 1
        for inner in message.get("nestedType", []):
            compare(inner, f"{package}.{message['name']}")

    for message in ours["messageType"]:
        compare(message, "inference")
    methods = pool.FindServiceByName(SERVICE).methods_by_name
    for method in ours["service"][0]["method"]:
        assert (f".{methods[method['name']].input_type.full_name}") == method["inputType"]
    assert compared > 100
