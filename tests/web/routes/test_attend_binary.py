"""POST /attend with safetensors: in and out, compression, and the deadline of X-Request-Timeout.

`tests/web/test_numbers.py` compares the numbers of all forms with the reference. Refusals are those of the same request in JSON.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save

JSON, SAFETENSORS, PROBLEM = "application/json", "application/vnd.safetensors", "application/problem+json"
B, Q, K = 2, 3, 5  # for the layer `cross`: d_model 4, 2 heads, key_dim 3, value_dim 5
RNG = np.random.default_rng(21)
CROSS: dict[str, Any] = {
    "query": RNG.standard_normal((B, Q, 4)).astype(np.float32),
    "key": RNG.standard_normal((B, K, 3)).astype(np.float32),
    "value": RNG.standard_normal((B, K, 5)).astype(np.float32),
}
OUTPUTS = [
    "output",
    "attention_weights",
    "scores",
    "log_sum_exp",
    "query_projection",
    "key_projection",
    "value_projection",
    "head_outputs",
    "concatenated",
]
DTYPES: dict[str, Any] = {"F32": np.float32, "F64": np.float64}
Array = np.ndarray[Any, Any]
Post = Callable[..., httpx.Response]
Tensors = dict[str, Array]


def packed(tensors: dict[str, Any], members: dict[str, Any] | None = None) -> bytes:
    """A request: tensors by name, the other fields in the metadata, as the library of that name writes them."""
    metadata = None if members is None else {"request": json.dumps(members)}
    return save({name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in tensors.items()}, metadata)


def unpacked(answer: httpx.Response) -> tuple[Tensors, dict[str, Any]]:
    """A reply in safetensors: its tensors, and the other members."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == SAFETENSORS
    body = answer.content
    header = json.loads(body[8 : 8 + struct.unpack("<Q", body[:8])[0]])
    assert set(header["__metadata__"]) == {"reply"}
    parts = dict(deserialize(body))
    tensors = {name: np.frombuffer(part["data"], DTYPES[part["dtype"]]).reshape(part["shape"]) for name, part in parts.items()}
    return tensors, json.loads(header["__metadata__"]["reply"])


def refused(answer: httpx.Response, status: int, at: str = "") -> str:
    """Asserts a refusal at that pointer with these words. Returns its text."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    document = answer.json()
    if at:
        assert any(error["at"] == at or error["at"].startswith(f"{at}/") for error in document["errors"]), document["errors"]
    assert "Traceback" not in answer.text
    return str(document["detail"])


@pytest.fixture
def post(http: httpx.Client, layers: dict[str, Any]) -> Post:
    """POST /attend with a body of safetensors, answered with safetensors unless the headers differ."""

    def send(content: bytes, accept: str = SAFETENSORS, media: str = SAFETENSORS, path: str = "/attend", **headers: str) -> httpx.Response:
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        return http.post(path, content=content, headers={"Content-Type": media, "Accept": accept, **own})

    return send


@pytest.fixture
def cross(post: Post) -> Callable[..., httpx.Response]:
    """The request to `cross`, with these tensors besides, and these other members."""
    return lambda tensors=None, **members: post(packed({**CROSS, **(tensors or {})}, {"layer": "cross", **members}))


def nested(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors as the lists that JSON has, -inf as its word."""

    def plain(x: Any) -> Any:
        return [plain(item) for item in x] if isinstance(x, list) else "-inf" if x == -np.inf else x

    return {name: plain(np.asarray(array).tolist()) for name, array in tensors.items()}


# In and out


def test_a_field_may_be_a_tensor_or_json_in_the_metadata(post: Post) -> None:
    wanted, _ = unpacked(post(packed(CROSS, {"layer": "cross"})))
    for name in CROSS:
        others = {other: array for other, array in CROSS.items() if other != name}
        got, _ = unpacked(post(packed(others, {"layer": "cross", **nested({name: CROSS[name]})})))
        np.testing.assert_allclose(got["output"], wanted["output"], rtol=0, atol=1e-6)
    got, _ = unpacked(post(packed({}, {"layer": "cross", **nested(CROSS)})))
    np.testing.assert_allclose(got["output"], wanted["output"], rtol=0, atol=1e-6)


def test_a_body_of_tensors_without_metadata_uses_the_defaults(post: Post) -> None:
    """Other metadata entries are ignored."""
    query = RNG.standard_normal((2, 64)).astype(np.float32)
    for body in (save({"query": query}), save({"query": query}, {"format": "pt"})):
        tensors, rest = unpacked(post(body))
        assert rest["layer"]["name"] == "default"
        assert {name: array.shape for name, array in tensors.items()} == {"output": (2, 64), "attention_weights": (8, 2, 2)}


def test_form_and_decimals_do_not_affect_safetensors(cross: Callable[..., httpx.Response]) -> None:
    wanted, _ = unpacked(cross())
    for reply in ({"form": "flat"}, {"form": "base64"}, {"decimals": 1}, {"form": "flat", "decimals": 0}):
        tensors, _ = unpacked(cross(reply=reply))
        for name, array in wanted.items():
            np.testing.assert_allclose(tensors[name], array, rtol=0, atol=1e-6)


# Edges


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("query", np.full((B, Q, 4), np.nan, np.float32)),
        ("query", np.full((B, Q, 4), 1e39)),
        ("key", np.full((B, K, 3), -np.inf, np.float16)),
        ("value", np.full((B, K, 5), np.inf)),
        ("bias", np.full((Q, K), np.nan)),
        ("bias", np.full((Q, K), np.inf, np.float32)),
        ("head_scale", np.array([1.0, np.nan])),
        ("valid_lens", np.array([1.0, np.nan])),
        ("valid_lens", np.array([np.inf, 1.0], np.float32)),
        ("valid_lens", np.array([1e300, 1.0])),
        ("valid_lens", np.array([2**64 - 1, 1], np.uint64)),
        ("valid_lens", np.array([-1, 1])),
        ("valid_lens", np.array([6, 1])),
        ("valid_lens", np.array([0.5, 1])),
        ("valid_lens", np.array([True, False])),
        ("attend_keys", np.full((B, K), np.nan)),
        ("block_mask", np.full((Q, K), -1, np.int8)),
        ("query", np.ones((B, Q, 4), np.bool_)),
        ("query_offset", np.array([1.5, 0.0])),
        ("query_offset", np.array([[1, 2]])),
        ("query_offset", np.array([False, True])),
        ("query_offset", np.array([2**31, 0])),
        ("query_offset", np.array([2**64 - 1, 0], np.uint64)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype} {value.reshape(-1)[0]}",
)
def test_nonfinite_numbers_in_requests_are_refused(cross: Callable[..., httpx.Response], name: str, array: Array) -> None:
    """At their field, also in integer datatypes."""
    words = refused(cross({name: array}, causal=name == "query_offset"), 422)
    assert f"/{name}" in words and ("an integer of 32 bits" in words) == (name == "query_offset")


def test_one_number_among_many_that_is_not_finite_is_refused(post: Post) -> None:
    """With its place, also where there are more than FEW_FLAGS numbers."""
    query = np.ones((1031, 64), np.float32)
    query[1013, 37] = np.inf
    words = refused(post(packed({"query": query}, {"outputs": ["output"]})), 422, "/query/1013/37")
    assert "inf" in words


OTHERS = ["layer", "causal", "window", "fully_masked", "dropout", "outputs", "select", "reply", "reproducible", "tokens", "mask", "foo", ""]


@pytest.mark.parametrize("name", [*OTHERS, "scale", "softcap"])
@pytest.mark.parametrize(
    "array",
    [np.array(1.0), np.array([1.0]), np.array([1, 0]), np.array(True), np.zeros((0, 2))],
    ids=["float", "one", "two", "bool", "empty"],
)
def test_tensors_under_names_of_other_fields_are_refused(cross: Callable[..., httpx.Response], name: str, array: Array) -> None:
    """Fields that are not tensors must be JSON."""
    refused(cross({name: array}), 422, f"/{name}")


@pytest.mark.parametrize("name", ["query", "key", "value", "valid_lens"])
def test_a_field_as_tensor_and_in_the_metadata_is_refused(post: Post, name: str) -> None:
    """Even if both are equal."""
    tensors = {**CROSS, "valid_lens": np.array([1, 2])}
    words = refused(post(packed(tensors, {"layer": "cross", **nested({name: tensors[name]})})), 422, f"/{name}")
    assert "both" in words


def body_with_header(header: str, data: bytes = b"") -> bytes:
    """A body with exactly this header."""
    return struct.pack("<Q", len(header)) + header.encode() + data


MALFORMED: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "short": (b"{}", 400),
    "JSON": (b'{"query": [[1, 2, 3, 4]]}', 400),
    "broken off": (packed(CROSS)[:-1], 400),
    "too long": (packed(CROSS) + b"\0", 400),
    "huge header": (b"\xff" * 8 + b"{" * 56, 413),
    "list": (body_with_header("[]"), 400),
    "cut": (body_with_header('{"query":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'), 400),
    "a tensor twice": (body_with_header('{"query":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"query":[]}'), 400),
    "an unknown dtype": (body_with_header('{"query":{"dtype":"F8_E4M3","shape":[0,1],"data_offsets":[0,0]}}'), 422),
    "half JSON": (save({}, {"request": "{"}), 400),
    "a field twice": (save({}, {"request": '{"query": [[1]], "query": [[1]]}'}), 400),
    "a list in it": (save({}, {"request": "[]"}), 422),
    "nothing in it": (save({}, {"request": "{}"}), 422),
    "rank 5": (save({"query": np.ones((1, 1, 1, 1, 1))}), 422),
    "rank 1": (save({"query": np.ones(4)}), 422),
    "half a pair": (body_with_header('{"__metadata__":{"request":"{\\"layer\\": \\"\\ud800\\"}"}}'), 400),
    "half a pair as a name": (body_with_header('{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), 422),
}


@pytest.mark.parametrize(("body", "status"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_bodies_are_refused(post: Post, assert_still_answers: Callable[[], None], body: bytes, status: int) -> None:
    """With a problem document, whatever `Accept` is; the server answers the next request."""
    refused(post(body), status)
    assert_still_answers()


def test_randomly_changed_bodies_never_give_a_5xx(post: Post, assert_still_answers: Callable[[], None]) -> None:
    whole = packed({**CROSS, "valid_lens": np.array([2, 1], np.int32)}, {"layer": "cross", "causal": True, "query_offset": 0})
    rng, statuses = np.random.default_rng(4), set()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(200):
        body = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            body[rng.integers(8, header if rng.random() < 0.8 else len(body))] = rng.integers(256)
        answer = post(bytes(body))
        assert answer.status_code < 500, bytes(body)
        statuses.add(answer.status_code)
    assert {200, 400, 422} <= statuses
    assert_still_answers()


def test_unaligned_tensors_are_read(post: Post) -> None:
    wanted, _ = unpacked(post(packed({"query": CROSS["query"]}, {"layer": "same"})))
    data = CROSS["query"].tobytes()
    entries = {
        "attend_mask": {"dtype": "U8", "shape": [1, 3], "data_offsets": [0, 3]},
        "query": {"dtype": "F32", "shape": [B, Q, 4], "data_offsets": [3, 3 + len(data)]},
    }
    text = json.dumps({"__metadata__": {"request": '{"layer": "same"}'}, **entries}).encode()
    tensors, _ = unpacked(post(struct.pack("<Q", len(text)) + text + b"\1\1\1" + data))
    np.testing.assert_allclose(tensors["output"], wanted["output"], rtol=0, atol=1e-6)


def test_a_large_reply_is_complete(post: Post) -> None:
    """Megabytes in many pieces: the announced length, and every number."""
    query = RNG.standard_normal((1, 500, 4)).astype(np.float32)
    answer = post(packed({"query": query}, {"layer": "exact"}))
    tensors, _ = unpacked(answer)
    assert int(answer.headers["content-length"]) == len(answer.content) > 4_000_000
    weights = tensors["attention_weights"]
    assert weights.dtype == np.float64
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-12)
    heads = query.astype(np.float64).reshape(1, 500, 2, 2).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(tensors["output"], (weights @ heads).transpose(0, 2, 1, 3).reshape(1, 500, 4), atol=1e-12)


def test_a_plan_of_a_safetensors_body_is_the_same_json(post: Post) -> None:
    members = {"layer": "cross", "outputs": OUTPUTS}
    binary = post(packed(CROSS, members), accept=JSON, path="/attend/plan")
    text = post(json.dumps({**members, **nested(CROSS)}).encode(), accept=JSON, media=JSON, path="/attend/plan")
    assert binary.status_code == text.status_code == 200
    assert binary.json() == text.json()


# Negotiation


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", JSON),
        (f"{SAFETENSORS}, {JSON}", JSON),
        (f"{SAFETENSORS}, */*;q=0.5", SAFETENSORS),
        (f"{JSON};q=0.5, {SAFETENSORS}", SAFETENSORS),
        (f"text/html, {SAFETENSORS};q=0.1", SAFETENSORS),
    ],
)
def test_accept_chooses_the_media_type_of_the_reply(post: Post, accept: str, expected: str) -> None:
    """Whatever the type of the request."""
    for body, media in ((packed(CROSS, {"layer": "cross"}), SAFETENSORS), (json.dumps({"layer": "cross", **nested(CROSS)}).encode(), JSON)):
        answer = post(body, accept=accept, media=media)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == expected


def test_an_unsupported_accept_is_406_and_an_unsupported_body_415(post: Post) -> None:
    refused(post(packed(CROSS, {"layer": "cross"}), accept="text/html"), 406)
    refused(post(packed(CROSS, {"layer": "cross"}), media="application/octet-stream"), 415)


def test_safetensors_replies_have_request_id_and_server_timing(post: Post) -> None:
    answer = post(packed(CROSS, {"layer": "cross"}), X_Request_Id="abc-1")
    assert answer.headers["x-request-id"] == "abc-1"
    assert [part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")] == ["decode", "queue", "compute", "encode"]
    assert "content-encoding" not in answer.headers


# Compression


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_decompression_bomb_is_refused(post: Post, assert_still_answers: Callable[[], None], coding: str) -> None:
    """A hundred megabytes of spaces in a hundred kilobytes, with a limit of four: 413 with the setting."""
    bomb = {"gzip": gzip.compress, "deflate": zlib.compress}[coding](b" " * 100_000_000)
    assert "max_body_bytes" in refused(post(bomb, media=JSON, Content_Encoding=coding), 413)
    assert_still_answers()


def test_invalid_compressed_bodies_are_400_and_unknown_codings_415(post: Post) -> None:
    body = packed(CROSS, {"layer": "cross"})
    refused(post(gzip.compress(body)[:-3], Content_Encoding="gzip"), 400)
    refused(post(body, Content_Encoding="gzip"), 400)
    refused(post(zlib.compress(body), Content_Encoding="gzip"), 400)
    refused(post(body, Content_Encoding="br"), 415)
    refused(post(gzip.compress(body), Content_Encoding="gzip, br"), 415)


def raw_reply(client: httpx.Client, accept_encoding: str | None, accept: str = JSON, **headers: str) -> tuple[httpx.Response, bytes]:
    """A reply, and its bytes as they were sent, before decompression."""
    request = client.build_request("POST", "/attend", json={"query": [[0.5] * 64] * 8}, headers={"Accept": accept, **headers})
    del request.headers["Accept-Encoding"]
    if accept_encoding is not None:
        request.headers["Accept-Encoding"] = accept_encoding
    answer = client.send(request, stream=True)
    try:
        return answer, b"".join(answer.iter_raw())
    finally:
        answer.close()


def decompressed(answer: httpx.Response, content: bytes) -> bytes:
    """The reply as it was before it was compressed, if it was."""
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(content)
    coding = answer.headers.get("content-encoding", "")
    return {"gzip": gzip.decompress, "deflate": zlib.decompress, "": bytes}[coding](content)


def test_errors_are_not_compressed(http: httpx.Client, layers: dict[str, Any]) -> None:
    answer = http.post("/attend", json={"query": []}, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in answer.headers
    refused(answer, 422)


# Deadlines


@pytest.mark.parametrize("timeout", ["1e-9", "0.000000001"])
def test_a_passed_deadline_is_504(post: Post, assert_still_answers: Callable[[], None], timeout: str) -> None:
    """The detail names the header."""
    assert "X-Request-Timeout" in refused(post(packed(CROSS, {"layer": "cross"}), X_Request_Timeout=timeout), 504)
    assert "X-Request-Timeout" in refused(
        post(json.dumps({"layer": "cross", **nested(CROSS)}).encode(), media=JSON, X_Request_Timeout=timeout), 504
    )
    assert_still_answers()


@pytest.mark.parametrize("timeout", ["60", "60.5", "1e3", "0.5e2", "+60"])
def test_a_request_within_its_deadline_is_answered(post: Post, timeout: str) -> None:
    unpacked(post(packed(CROSS, {"layer": "cross"}), X_Request_Timeout=timeout))


@pytest.mark.parametrize("timeout", ["", "0", "-1", "-0.0", "soon", "10s", "nan", "inf", "-inf", "1e400", "1e9", "0x10", "1,5", "9" * 5000])
def test_an_invalid_deadline_is_422(post: Post, timeout: str) -> None:
    """A long value is not echoed."""
    words = refused(post(packed(CROSS, {"layer": "cross"}), X_Request_Timeout=timeout), 422)
    assert "X-Request-Timeout of a positive number of seconds, less than 1e9" in words
    assert len(words) < 260


# A server of one's own


def test_settings_compress_replies_and_set_a_default_deadline(start_here: Callable[..., str]) -> None:
    """`--compress-replies` and `--request-timeout`."""
    with httpx.Client(base_url=start_here(compress_replies=True, request_timeout=1e-9), timeout=60) as client:
        patient = {"X-Request-Timeout": "60"}
        _, content = raw_reply(client, None, **patient)
        for accept_encoding, coding in (
            (None, ""),
            ("identity", ""),
            ("br", ""),
            ("gzip;q=0", ""),
            ("gzip", "gzip"),
            ("gzip, deflate, br, zstd", "gzip"),
            ("br, deflate", "deflate"),
        ):
            for accept in (JSON, SAFETENSORS):
                answer, other = raw_reply(client, accept_encoding, accept, **patient)
                assert answer.headers.get("content-encoding", "") == coding, accept_encoding
                whole = decompressed(answer, other)
                if accept == JSON:
                    assert json.loads(whole) == json.loads(content)
                else:
                    assert set(dict(deserialize(whole))) == {"output", "attention_weights"}

        assert "deadline" in refused(client.post("/attend", json={"query": [[0.5] * 64]}), 504)
        assert client.get("/health/ready").status_code == 200


def test_a_client_that_is_still_sending_receives_the_refusal(http: httpx.Client) -> None:
    """A large body to a missing page, and one refused by its headers: a reply, not a reset connection."""
    body = bytes(3_000_000)

    assert http.post("/nowhere", content=body).status_code == 404
    assert http.post("/attend", content=body, headers={"Content-Type": "image/png"}).status_code == 415
    assert http.post("/attend", content=bytes(40_000_000)).status_code == 413
