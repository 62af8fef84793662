"""Broken V2 bodies: refused in the protocol's form, never a 5xx, wrong numbers or a memory leak.

Most go directly through the codec, thousands per second; a sample of each kind goes over HTTP and gRPC to a server that must then answer a
valid request.
"""

import json
import re
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import RequestError
from attend.limits import WireLimits
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from attend.wire.v2.codec import CODEC
from support.server import Server
from support.v2 import in_bytes, in_json, read, refused

QUERY = np.random.default_rng(41).standard_normal((2, 3, 6)).astype(np.float32)
KEY = np.random.default_rng(43).standard_normal((2, 5, 6)).astype(np.float32)
KEEP = np.array([[1, 0, 1, 1, 1], [0, 1, 1, 0, 1]], np.bool_)
BODY, HEADERS = in_bytes({"id": "x", "parameters": {"causal": True, "query_offset": "end"}}, query=QUERY, key=KEY, attend_keys=KEEP)
SIZE = int(HEADERS["Inference-Header-Content-Length"])
INFER = "/v2/models/tiny/infer"


def parsed(body: bytes, length: str, model: str = "tiny") -> AttendRequest:
    """Decode and validate a body. Raises RequestError if it is invalid."""
    parameters = {"model": model, "header_length": length}
    return validate(AttendRequest, CODEC.decode(body, parameters, AttendRequest.tensor_kinds, WireLimits()).members)


def is_valid_request(request: AttendRequest) -> bool:
    return (
        np.array_equal(request.query, QUERY)
        and np.array_equal(request.key, KEY)
        and np.array_equal(request.attend_keys, KEEP)
        and (request.causal, request.query_offset, request.layer) == (True, "end", "tiny")
    )


def test_every_prefix_of_a_valid_body_is_refused() -> None:
    assert is_valid_request(parsed(BODY, str(SIZE)))
    for cut in range(len(BODY)):
        with pytest.raises(RequestError):
            parsed(BODY[:cut], str(SIZE))
        with pytest.raises(RequestError):
            parsed(BODY[:cut], "")


def test_bodies_with_equal_headers_have_their_own_numbers() -> None:
    """The parsed header is cached; the numbers are not."""
    options = {"parameters": {"select": '{"heads": [1]}'}}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        query, lengths = rng.standard_normal((2, 3, 6)).astype(np.float32), rng.integers(1, 4, (2, 1))
        body, headers = in_bytes(options, query=query, valid_lens=lengths)
        size = headers["Inference-Header-Content-Length"]
        request = parsed(body, size)
        np.testing.assert_array_equal(request.query, query)
        np.testing.assert_array_equal(request.valid_lens, lengths[:, 0])
        assert request.select is not None
        assert request.select.heads == [1]
        other = parsed(body, size, "other")
        assert (request.layer, other.layer) == ("tiny", "other")
        with pytest.raises(RequestError):
            parsed(body + b"\0", size)


def test_every_wrong_header_length_is_refused() -> None:
    for length in range(len(BODY) + 3):
        if length != SIZE:
            with pytest.raises(RequestError):
                parsed(BODY, str(length))


@pytest.mark.parametrize("length", ["-1", "+5", " ", "0x10", "1e2", "1.0", "NaN", "٣", "9" * 30, "1_0", str(2**63), "abc", "-0"])
def test_header_lengths_that_are_not_numbers_are_refused(v2: httpx.Client, length: str) -> None:
    with pytest.raises(RequestError):
        parsed(BODY, length)
    if length.isascii() and length.strip():
        refused(v2.post(INFER, content=BODY, headers={"Inference-Header-Content-Length": length}))


@given(st.integers(0, len(BODY) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_only_what_it_encodes(place: int, byte: int) -> None:
    """In the JSON another option or no valid request; in the tensors that number only."""
    body = BODY[:place] + bytes([byte]) + BODY[place + 1 :]
    try:
        request = parsed(body, str(SIZE))
    except RequestError:
        return
    joined = b"".join(np.ascontiguousarray(array).tobytes() for array in (request.query, request.key, request.attend_keys))
    assert joined == body[SIZE:]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["query", "FP32", "BYTES"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    ("id",),
    ("parameters",),
    ("outputs",),
    ("inputs",),
    ("inputs", 0),
    *((("inputs", 0, name)) for name in ("name", "shape", "datatype", "data", "parameters")),
    *((("parameters", name)) for name in ("causal", "window", "select", "scale", "query_offset", "timeout", "binary_data_output", "reply")),
    ("outputs", 0),
    ("outputs", 0, "name"),
    ("outputs", 0, "parameters"),
]


def with_value(place: tuple[Any, ...], value: Any) -> bytes:
    """A valid request with one member replaced by `value`."""
    document: Any = {"id": "x", "parameters": {}, "inputs": in_json(query=QUERY), "outputs": [{"name": "output", "parameters": {}}]}
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return json.dumps(document).encode()


@given(st.sampled_from(PLACES), JSON_VALUES)
def test_random_values_anywhere_are_accepted_or_refused(place: tuple[Any, ...], value: Any) -> None:
    """Directly by the codec, with and without `data`, which another parser reads."""
    body = with_value(place, value)
    for text in (body, json.dumps({**json.loads(body), "inputs": value if place == ("inputs",) else []}).encode()):
        try:
            parsed(text, "")
        except RequestError as refusal:
            assert refusal.problems


@given(st.sampled_from(PLACES), JSON_VALUES)
def test_a_server_answers_or_refuses_random_values(v2: httpx.Client, place: tuple[Any, ...], value: Any) -> None:
    answer = v2.post(INFER, content=with_value(place, value))

    if answer.status_code == 200:
        assert "outputs" in answer.json()
    else:
        assert answer.status_code in (400, 413, 504), answer.text
        refused(answer, answer.status_code)


TOO_LARGE = [2**31 - 1] * 3, [65536] * 3


@pytest.mark.parametrize(
    "shape",
    [
        *TOO_LARGE,
        [2**31 - 1, 2**31 - 1, 0],
        [2**32 + 2, 3, 6],
        [2**62, 4, 6],
        [2**63, 2, 6],
        [2**64 + 2, 3, 6],
        [-2, -3, 6],
        [2.5, 3, 6],
        [True, 6, 6],
        ["2", 3, 6],
        [[2], 3, 6],
        [None],
        [],
        [36],
        [2, 3, 6, 1, 1, 1],
    ],
    ids=str,
)
@pytest.mark.parametrize("binary", [False, True])
def test_shapes_that_overflow_or_do_not_fit_the_data_are_refused(v2: httpx.Client, shape: Any, binary: bool) -> None:
    tensor: dict[str, Any] = {"name": "query", "shape": shape, "datatype": "FP32"}
    rest = QUERY.tobytes() if binary else b""
    tensor |= {"parameters": {"binary_data_size": QUERY.nbytes}} if binary else {"data": QUERY.ravel().tolist()}
    head = json.dumps({"inputs": [tensor]}).encode()

    answer = v2.post(INFER, content=head + rest, headers={"Inference-Header-Content-Length": str(len(head))})

    refused(answer, 413 if shape in TOO_LARGE else 400)


def test_malformed_bodies_over_http_and_grpc_do_not_leak_memory(v2: httpx.Client, v2_server: Server) -> None:
    """After the first hundred, memory does not grow, and the server answers as before."""
    address = next(str(event["address"]) for event in v2_server.events if event["event"] == "listening for gRPC")
    want = read(v2.post(INFER, content=BODY, headers=HEADERS)).arrays["output"]
    big, big_headers = in_bytes(None, query=np.zeros((40, 64, 64), np.float32))

    def resident() -> int:
        status = Path(f"/proc/{v2_server.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def send_malformed_bodies() -> None:
        for cut in range(0, len(BODY), 23):
            refused(v2.post(INFER, content=BODY[:cut], headers=HEADERS))
        for _ in range(20):
            refused(v2.post("/v2/models/default/infer", content=big[:-1], headers=big_headers))
        for body in (b"", b"\x0a", BODY, b"\x0a\x04tiny", b"\x0a\x04tiny\x2a\xff\xff\xff\xff\x0f", b"\x3a" * 64):
            with pytest.raises(grpc.RpcError) as caught:
                call(body)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(2):
            send_malformed_bodies()
        before = resident()
        for _ in range(6):
            send_malformed_bodies()
        assert resident() - before < 16 * 1024  # KiB; six rounds hold 120 bodies of 0.6 MB
    np.testing.assert_array_equal(read(v2.post(INFER, content=BODY, headers=HEADERS)).arrays["output"], want)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 + 5, 2**63, 10**30])
def test_a_length_beyond_32_bits_is_too_large(v2_server: Server, size: int) -> None:
    """It is refused by its header, before a byte of the body is read."""
    host, port = v2_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as reader:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())
        connection.shutdown(socket.SHUT_WR)
        status, rest = int(reader.readline().split()[1]), reader.read()
    assert not re.search(rb"-\d", rest.partition(b"\r\n\r\n")[2])
    assert status == (413 if size <= 2**63 else 400)
    if size < 2**63:
        assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"].startswith(f"expected a body of at most {1 << 20} bytes")
