"""The client with a real server: arrays in and out in every form, and refusals as the exceptions of the server."""

import asyncio
import base64
import copy
import inspect
import pickle
import runpy
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
import trustme

import attend
from attend import errors
from attend.client import AsyncClient, BadReply, Client, Retries, TimedOut, TopWeights, Unreachable, Untrusted, operations
from attend.client.connection import Attempts
from attend.client.responses import CLASSES
from attend.settings import Settings
from attend.spec import LayerSpec
from attend.web.app import create_app
from attend.web.errors import STATUSES, problem_document
from attend.web.requests import is_v2
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.figure import FigureRequest
from attend.wire.schemas.schema import LayerReference

SHAPE = {"d_model": 6, "num_heads": 2}
SPEC = {**SHAPE, "seed": 3}
RNG = np.random.default_rng(0)
SMALL = RNG.standard_normal((2, 3, 6)).astype(np.float32)
LARGE = RNG.standard_normal((4, 60, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def client(server) -> Iterator[Client]:
    """Restores the layers of the server, which other tests use."""
    with Client(server.url) as client:
        others = {layer.name for layer in client.layers()}
        for dtype in ("float32", "float64", "float16", "bfloat16"):
            client.put_layer(dtype, {**SPEC, "dtype": dtype})
        yield client
        for layer in client.layers():
            if layer.name not in others:
                client.delete_layer(layer.name)


# --- attend ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", [SMALL, LARGE], ids=["small", "large"])
def test_attend_returns_the_numbers_of_the_endpoint(client, http, query):
    result = client.attend(query, layer="float32", causal=True, reproducible=True)

    plain = http.post("/attend", json={"layer": "float32", "query": query.tolist(), "causal": True, "reproducible": True})
    document = plain.json()
    np.testing.assert_array_equal(result.output, np.array(document["output"], np.float32))
    np.testing.assert_array_equal(result.attention_weights, np.array(document["attention_weights"], np.float32))
    assert result.layer.model_dump() == document["layer"]


def with_gradient(x):
    return torch.tensor(x, requires_grad=True)


@pytest.mark.parametrize("as_given", [np.ndarray.tolist, torch.tensor, with_gradient, np.asfortranarray, lambda x: x.astype(">f4")])
def test_arrays_lists_and_tensors_are_accepted(client, as_given):
    expected = client.attend(SMALL, layer="float32", reproducible=True).output
    np.testing.assert_array_equal(client.attend(as_given(SMALL), layer="float32", reproducible=True).output, expected)


def test_torch_bfloat16_is_sent_as_bfloat16(client):
    halves = torch.tensor(SMALL).bfloat16()
    expected = client.attend(halves.float().numpy(), layer="float32", reproducible=True).output
    np.testing.assert_array_equal(client.attend(halves, layer="float32", reproducible=True).output, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_arrays_have_the_dtype_of_the_layer(client, dtype):
    expected = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    result = client.attend(SMALL, layer=dtype)
    assert {result.output.dtype, result.attention_weights.dtype} == {np.dtype(expected)}
    assert client.attend(SMALL, layer=dtype, reply={"datatype": "FP16"}).output.dtype == np.float16
    assert client.attend(SMALL, layer=dtype, reply={"decimals": 2}).output.dtype == np.dtype(expected)


@pytest.mark.parametrize("query", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_numbers_arrive_bit_for_bit(client, query, dtype):
    """A layer in float64 with weights 1: the value projection is the input itself."""
    identity = {f"{name}.weight": np.eye(6) for name in ("query", "key", "value", "output")}
    client.put_layer("identity", {**SHAPE, "bias": False, "dtype": "float64"}, identity)
    query = query.astype(dtype)

    projected = client.attend(query, layer="identity", outputs=["value_projection"]).value_projection

    np.testing.assert_array_equal(projected.transpose(0, 2, 1, 3).reshape(query.shape), query.astype(np.float64))


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_all_forms_of_reply_have_equal_arrays(client, form):
    outputs = ["output", "attention_weights", "scores", "log_sum_exp", "head_outputs"]
    fields = {"layer": "float32", "causal": True, "outputs": outputs, "reproducible": True}  # alignment may change the order of sums
    expected = client.attend(SMALL, **fields)
    result = client.attend(SMALL, **fields, reply={"form": form})
    assert list(result) == outputs and np.isneginf(result.scores).any()
    for name in outputs:
        np.testing.assert_array_equal(result[name].astype(np.float32), expected[name])


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_nonfinite_determines_how_overflow_is_returned(client, form):
    weights = {f"{name}.weight": np.eye(6) * (1e6 if name == "output" else 1) for name in ("query", "key", "value", "output")}
    client.put_layer("huge", {**SHAPE, "bias": False}, weights)
    row = np.array([[1.0, -1.0, 0, 0, 0, 0]])

    def output(nonfinite: str) -> list[float]:
        reply = {"form": form, "datatype": "FP16", "nonfinite": nonfinite}
        return client.attend(row, layer="huge", reply=reply).output[0, :3].astype(float).tolist()

    assert output("string") == [np.inf, -np.inf, 0]
    if form == "base64":
        assert output("null") == [np.inf, -np.inf, 0]
    else:
        assert np.isnan(output("null")[:2]).all()
    with pytest.raises(errors.InvalidRequest) as refused:
        output("error")
    assert refused.value.problems[0].at == "/reply/datatype"


def test_masks_biases_and_lengths_of_every_python_type_are_accepted(client):
    mask = np.tri(3, dtype=bool)
    fixed = {"layer": "float32", "reproducible": True}
    expected = client.attend(SMALL, **fixed, attend_mask=mask).attention_weights
    assert (expected[:, :, ~mask] == 0).all()
    bias = np.where(mask, 0, -np.inf)
    listed = [["-inf" if np.isinf(x) else x for x in row] for row in bias.tolist()]
    for fields in (
        {"attend_mask": mask.astype(np.int8)},
        {"attend_mask": mask.tolist()},
        {"block_mask": ~mask},
        {"block_mask": np.broadcast_to(~mask, (2, 2, 3, 3))},
        {"bias": bias},
        {"bias": listed},
        {"valid_lens": np.array([[1, 2, 3], [1, 2, 3]])},
        {"causal": np.True_, "query_offset": np.zeros(2, np.int32)},
        {"window": {"left": None, "right": np.int64(0)}, "query_offset": np.int64(0)},
    ):
        np.testing.assert_array_equal(client.attend(SMALL, **fixed, **fields).attention_weights, expected)


def test_none_leaves_a_field_out(client):
    result = client.attend(SMALL, layer="float32", attend_mask=None, causal=None, outputs=None, reply=None, reproducible=True)
    np.testing.assert_array_equal(result.output, client.attend(SMALL, layer="float32", reproducible=True).output)


def test_axes_of_length_zero_are_kept(client):
    result = client.attend(np.zeros((0, 3, 6)), layer="float32")
    assert result.output.shape == (0, 3, 6) and result.attention_weights.shape == (0, 2, 3, 3)
    assert client.attend(SMALL[0, :1], np.zeros((0, 6)), layer="float32", outputs=["scores"]).scores.shape == (2, 1, 0)


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_the_largest_weights_come_with_their_keys(client, form):
    fields = {"layer": "float32", "reproducible": True}
    full = client.attend(LARGE, **fields).attention_weights
    top = client.attend(LARGE, **fields, select={"top_k": 3}, reply={"form": form}).attention_weights
    assert isinstance(top, TopWeights) and top.keys.dtype == np.int64 and top.keys.shape == (4, 2, 60, 3)
    np.testing.assert_array_equal(np.take_along_axis(full, top.keys, -1), top.values.astype(np.float32))


def test_a_result_lists_its_outputs(client):
    result = client.attend(SMALL, layer="float32", block_keys=np.ones((2, 3)))
    assert result.fully_masked_rows == 12
    assert set(result.timing) == {"decode", "queue", "compute", "encode"} and min(result.timing.values()) >= 0
    assert len(result.request_id) == 16
    assert {**result}.keys() == {"output", "attention_weights"} and len(result) == 2
    assert repr(result) == "AttendResult(output [2, 3, 6], attention_weights [2, 2, 3, 3]; layer 'float32')"
    assert {"output", "attention_weights", "timing", "tensors"} <= set(dir(result))  # which a notebook completes
    result.output[0] = 0  # the caller may change it
    with pytest.raises(AttributeError, match=r"no 'scores' among the outputs output, attention_weights"):
        _ = result.scores
    with pytest.raises(KeyError, match=r"did you mean output\?"):
        result["outptu"]
    assert "scores" not in result and result.get("scores") is None


def test_the_package_lists_its_names():
    """Though they are imported when they are first used."""
    assert {*attend.__all__, "__version__"} <= {*dir(attend)}


def test_a_result_of_metrics_lists_their_names(client):
    result = client.analysis(SMALL[0], layer="float32", metrics=["entropy", "strongest_links"])
    assert repr(result) == "AnalysisResult(entropy, strongest_links; layer 'float32')"
    lines = str(result).splitlines()
    assert lines[0] == "layer 'float32'" and lines[1].startswith("entropy [")
    np.testing.assert_allclose([float(x) for x in lines[1][9:-1].split()], result["entropy"], atol=0.0006)
    links = zip(*(result["strongest_links"][part][1] for part in ("queries", "keys", "weights")), strict=True)
    assert lines[2] == "strongest_links" and lines[4] == "  head 1: " + ", ".join(f"{q}→{k} {x:.2f}" for q, k, x in [*links][:3])
    with pytest.raises(KeyError, match=r"no 'entropi' among the metrics entropy, strongest_links \(did you mean entropy\?\)"):
        result["entropi"]


def test_headers_are_sent_with_every_call(server):
    with Client(server.url, headers={"X-Request-Id": "mine-1"}) as client:
        assert client.attend(np.zeros((1, 64))).request_id == "mine-1"


def reference(layer):
    return LayerReference(name=layer.name, fingerprint=layer.fingerprint)


def test_the_result_of_words_can_be_passed_to_every_operation(client, http):
    """Tokens and vectors of /words are sent to /attend, as the page does."""
    words = client.words("The cat sat.", layer="float32")
    assert words.tokens == ["The", "cat", "sat", "."] and words.layer == reference(client.layer("float32"))
    reply = http.post("/words", json={"text": "The cat sat.", "layer": "float32"}).json()
    np.testing.assert_array_equal(words.vectors, np.frombuffer(base64.b64decode(reply["vectors"]["base64"]), np.float32).reshape(4, 6))
    assert (words.meaningful, words.note) == (reply["meaningful"], reply["note"])
    assert repr(words) == "WordsResult('The cat sat .'; vectors [4, 6] for layer 'float32')"

    result = client.attend(**words.request, causal=True)
    assert result.attention_weights.shape == (2, 4, 4) and result.tokens == {"query": words.tokens}
    assert b">cat</text>" in client.figure(**words.request, format="svg")
    assert client.analysis(**words.request, metrics=["strongest_links"])["strongest_links"]["key_words"]
    assert client.plan(**words.request).admitted
    client.put_layer("other-keys", {**SPEC, "key_dim": 5})
    assert client.words("The cat", layer="other-keys", part="key").vectors.shape == (2, 5)


@pytest.mark.parametrize(
    "vectors", [{"shape": [1, 2], "datatype": "FP99", "base64": ""}, {"shape": [1, 2], "datatype": "FP32", "base64": "AAA="}]
)
def test_invalid_vectors_are_a_bad_reply(vectors):
    words = {
        "layer": {"name": "x", "fingerprint": "y"},
        "tokens": ["a"],
        "vectors": vectors,
        "meaningful": False,
        "note": "",
        "options": {},
        "heads": [],
    }
    with pytest.raises(BadReply, match="POST /words"):
        answering(httpx.Response(200, json=words)).words("a")


# --- fields ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "model", "own"),
    [
        ("attend", AttendRequest, set()),
        ("analysis", AnalysisRequest, {"dropout", "output_gradient"}),  # which it refuses
        ("plan", AnalysisRequest, set()),
        ("figure", FigureRequest, {"kind", "format"}),
    ],
)
def test_each_field_is_a_typed_and_described_argument(method, model, own):
    function = getattr(Client, method)
    parameters = inspect.signature(function).parameters
    assert (parameters.keys() - {"self", "timeout"}) ^ model.model_fields.keys() == own
    assert not any(p.kind is p.VAR_KEYWORD or p.annotation in (p.empty, Any) for name, p in parameters.items() if name != "self")
    for name in parameters.keys() - {"self", "layer", "query", "key", "value", "timeout", "metrics", "figure"} - own:
        assert f"\n{name}: " in inspect.getdoc(function)
    assert inspect.getdoc(function) == inspect.getdoc(getattr(AsyncClient, method))


def test_the_types_of_the_fields_are_those_of_the_schemas():
    """Regenerate them with `python tests/client/generate_fields.py`."""
    script = runpy.run_path(str(Path(__file__).parent / "generate_fields.py"))
    assert script["FILE"].read_text() == script["write"]()


# --- plan and layers ------------------------------------------------------------------------------------------------------------------


def test_a_plan_sends_shapes_alone(client):
    plan = client.plan({"shape": [2, 9000, 6]}, layer="float32", outputs=["output"])
    assert plan.admitted and plan.outputs["output"].shape == [2, 9000, 6]
    assert client.plan(LARGE, layer="float32", causal=True).outputs["attention_weights"].shape == [4, 2, 60, 60]
    assert len(operations.plan(np.zeros((100, 100, 6))).body or b"") < 100
    with pytest.raises(errors.InvalidRequest):
        client.plan(np.zeros((2, 3, 7)), layer="float32")


@pytest.mark.parametrize(("file_format", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!DOCTYPE html>")])
def test_a_figure_is_the_bytes_of_a_picture(client, file_format, magic):
    words = {"query": [["a", "b", "c"], ["d", "e", "f"]]}
    drawn = client.figure(
        SMALL, layer="float32", kind="head", format=file_format, figure={"heads": [1], "item": 1}, causal=True, tokens=words
    )
    assert drawn.startswith(magic)
    assert repr(drawn) == str(drawn) == f"Picture({file_format.upper()}, {len(drawn)} bytes)"
    if file_format == "svg":
        assert b">d</text>" in drawn and b">a</text>" not in drawn
    with pytest.raises(errors.InvalidRequest, match="a head below 2"):
        client.figure(SMALL, layer="float32", kind="head", figure={"heads": [2]})


def test_layers_are_added_listed_and_removed(client):
    spec = LayerSpec(d_model=6, num_heads=3, seed=9)
    made = client.put_layer("made", spec)
    assert made.spec == spec and made.steps is None
    assert client.layer("made") == made.model_copy(update={"steps": {step.name: step.formula for step in spec.program}})
    assert made in client.layers()
    client.delete_layer("made")
    with pytest.raises(errors.LayerNotFound):
        client.layer("made")


def test_given_weights_are_returned(client):
    weights = {f"{name}.weight": RNG.standard_normal((6, 6)) for name in ("query", "key", "value", "output")}
    client.put_layer("mine", {**SHAPE, "bias": False, "dtype": "float64"}, weights)
    projected = client.attend(SMALL, layer="mine", outputs=["query_projection"]).query_projection
    expected = SMALL.astype(np.float64) @ weights["query.weight"].T
    np.testing.assert_allclose(projected.transpose(0, 2, 1, 3).reshape(2, 3, 6), expected, rtol=1e-12)


# --- refusals -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "kind", "at"),
    [
        (lambda c: c.attend(SMALL, layer="none"), errors.LayerNotFound, "/layer"),
        (lambda c: c.attend(SMALL[..., :5], layer="float32"), errors.InvalidRequest, "/query"),
        (lambda c: c.attend(SMALL * np.nan, layer="float32"), errors.InvalidRequest, "/query/0/0/0"),
        (lambda c: c.attend(LARGE * np.inf, layer="float32"), errors.InvalidRequest, "/query/0/0/0"),
        (lambda c: c.attend(SMALL > 0, layer="float32"), errors.InvalidRequest, "/query"),
        (lambda c: c.attend(np.zeros((2000, 100, 6)), layer="float32"), errors.TooLarge, ""),
        (lambda c: c.put_layer("x", {"d_model": 6}), errors.InvalidRequest, "/spec/num_heads"),
        (lambda c: c.put_layer("x", SHAPE, {"query.weight": np.eye(5)}), errors.InvalidRequest, "/weights/query.bias"),
    ],
)
def test_a_refusal_is_raised_as_the_exception_of_the_server(client, ask, kind, at):
    with pytest.raises(kind) as refused:
        ask(client)
    first = refused.value.problems[0]
    assert first.at == at and first.expected and first.got
    assert refused.value.__notes__[0].startswith("HTTP 4") and client.attend(SMALL, layer="float32")


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"query": [[1.0], [1.0, 2.0]]}, "/query"),
        ({"query": [["a"]]}, "/query"),
        ({"query": [[1j]]}, "/query"),
        ({"query": [[None, 1.0]]}, "/query"),
        ({"query": SMALL, "bias": [["inf?"]]}, "/bias"),
        ({"query": SMALL, "scale": float("nan")}, "/scale"),
        ({"query": SMALL, "dropout": {"p": np.float32("inf"), "seed": 1}}, "/dropout/p"),
        ({"query": SMALL, "outputs": {"output"}}, ""),
        ({"query": SMALL, "mask": [[1]]}, "/mask"),
        ({"query": SMALL, "no_such_field": 1}, "/no_such_field"),
    ],
)
def test_values_that_json_does_not_have_are_refused_before_they_are_sent(fields, at):
    """A NaN would be sent as null, which means the layer's own scale."""

    def unreached(request: httpx.Request) -> httpx.Response:
        raise AssertionError("sent")

    with Client(transport=httpx.MockTransport(unreached)) as client, pytest.raises(errors.InvalidRequest) as refused:
        client.attend(**fields)
    assert refused.value.problems[0].at == at


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda c: c.attend(SMALL, key_padding_mask=torch.ones(2, 3)), r"block_keys for the booleans of torch"),
        (lambda c: c.figure(SMALL, attn_mask=np.eye(3)), r"block_mask for the booleans of torch"),
        (lambda c: c.analysis(SMALL, is_causal=True), r"causal \(key j is visible to query i"),
        (lambda c: c.plan(SMALL, num_heads=2), r"belongs to the spec of a layer"),
        (lambda c: c.attend(SMALL, metrics=["entropy"]), r"POST /attend/analysis"),
        (lambda c: c.attend(Q=SMALL, K=SMALL), r"expected query, which is also the key .* at /Q; expected key, .* at /K"),
        (lambda c: c.analysis(hidden_states=SMALL), r"expected query, which is also the key"),
        (lambda c: c.attend(["the cat", "sat"]), r"expected numbers, got text, at /query"),
        (lambda c: c.attend(SMALL, mask=np.eye(3)), r"attend_mask, block_mask, attend_keys, block_keys, valid_lens or bias"),
        (lambda c: c.attend(SMALL, attn_mask=np.eye(3)), r"attend_mask for those of scaled_dot_product_attention"),
        (lambda c: c.attend(SMALL, casual=True), r"did you mean causal\?"),
        (lambda c: c.attend(SMALL, layer="flaot32"), r"did you mean float32\?"),
        (lambda c: c.attend(SMALL, layer="float32", outputs=["score"]), r"did you mean scores\?"),
        (lambda c: c.attend(SMALL, layer="float32", select={"head": [0]}), r"did you mean heads\?"),
        (lambda c: c.analysis(SMALL, layer="float32", metrics=["entropi"]), r"did you mean entropy\?"),
        (lambda c: c.figure(SMALL, layer="float32", figure={"colors": "cividis"}), r"did you mean colours\?"),
        (lambda c: c.put_layer("x", d_model=6, num_heads=2), r'which belongs inside "spec", got a field "d_model"'),
        (lambda c: c.put_layer("x", {"d_modle": 6, "num_heads": 2}), r"did you mean d_model\?"),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_one(client, ask, words):
    with pytest.raises(errors.RequestError, match=words):
        ask(client)


def test_a_call_without_a_query_is_a_type_error_as_of_any_function(client):
    with pytest.raises(TypeError, match="'query'"):
        client.attend(layer="float32")


@pytest.mark.parametrize("name", ["a b?c#d", "a/b", "-first", "", "x" * 65])
def test_a_name_that_no_layer_can_have_is_refused_before_it_is_sent(name):
    with Client(transport=httpx.MockTransport(lambda request: pytest.fail("sent"))) as client:
        for call in (lambda: client.put_layer(name, {"d_model": 4, "num_heads": 2}), lambda: client.layer(name)):
            with pytest.raises(errors.InvalidRequest, match="expected a layer name of at most 64 letters, digits, dots"):
                call()


def test_a_layer_is_copied_with_its_spec_and_weights(client):
    """A spec that the server returned has init, seed and gain, which do not apply to given weights."""
    made = client.put_layer("first", {"d_model": 6, "num_heads": 2, "seed": 7, "gain": 2.0})
    copy = client.put_layer("second", made.spec, client.layer_weights("first"))
    assert copy.fingerprint == made.fingerprint and (copy.spec.init, copy.spec.seed, copy.spec.gain) == (None, None, 1.0)
    for name in ("first", "second"):
        client.delete_layer(name)


def answering(*responses: httpx.Response) -> Client:
    """A client whose server sends these replies."""
    answers = iter(responses)
    return Client(transport=httpx.MockTransport(lambda request: next(answers)), retries=Retries(times=0))


@pytest.mark.parametrize("kind", sorted(STATUSES, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_exception_of_the_server_is_raised_by_the_client(kind):
    found = (errors.Problem("/query", "this", "that"),)
    body = problem_document(STATUSES[kind][0], kind.title, "the detail", "id-7", found)
    response = httpx.Response(STATUSES[kind][0], content=body, headers={"X-Request-Id": "id-7", "Retry-After": "9"})
    with pytest.raises(kind) as raised:
        answering(response).layers()
    assert type(raised.value) is kind and raised.value.detail == "the detail" and raised.value.problems == found
    assert raised.value.__notes__ == [f"HTTP {STATUSES[kind][0]}, request id id-7"]
    if isinstance(raised.value, errors.Overloaded):
        assert raised.value.retry_after == 9


def test_each_exception_has_its_own_title():
    """The client selects the class by the title."""
    assert set(CLASSES.values()) >= set(STATUSES)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, BadReply),
        (404, errors.RequestError),
        (429, errors.CapacityError),
        (502, errors.ServiceFault),
        (503, errors.CapacityError),
    ],
)
def test_the_status_selects_the_exception_for_a_proxys_page(status, kind):
    with pytest.raises(kind, match=f"HTTP {status} .*: <h1>Sorry</h1>") as raised:
        answering(httpx.Response(status, html="<h1>Sorry</h1>\n")).attend(SMALL)
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b'{"layer": 1, "fully_masked_rows": 0}', b'{"layer": {"name": "x"}, "fully_masked_rows": 0}']
    + [
        b'{"layer": {"name": "x", "fingerprint": "y"}, "fully_masked_rows": 0, "output": ' + tensor + b"}"
        for tensor in (
            b'"text"',
            b"[[1], [1, 2]]",
            b'{"shape": [2], "datatype": "FP99", "data": [1, 2]}',
            b'{"shape": [3], "datatype": "FP32", "data": [1, 2]}',
            b'{"shape": [1], "datatype": "FP32", "base64": "AAA="}',
            b'{"shape": [1], "datatype": "FP32"}',
        )
    ],
)
def test_an_unreadable_reply_is_a_bad_reply(body):
    with pytest.raises(BadReply):
        answering(httpx.Response(200, content=body)).attend(SMALL)


def test_a_document_of_another_version_is_a_bad_reply():
    with pytest.raises(BadReply, match=r"older than the server.*/layers/0/colour"):
        answering(httpx.Response(200, json={"layers": [{"colour": "red"}]})).layers()


# --- connections ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[tuple[str, socket.socket]]:
    """The URL of a socket that listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", listening


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_an_absent_server_is_unreachable():
    url = closed_port()
    with Client(url) as client:
        with pytest.raises(Unreachable, match=url):
            client.layers()
        assert not client.ready()


def test_a_server_that_never_answers_times_out(silent):
    with Client(silent[0], timeout=0.1) as client, pytest.raises(TimedOut, match="in time"):
        client.layers()


def test_a_server_that_closes_the_connection_is_unreachable(silent):
    url, listening = silent

    def hang_up() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1)

    thread = threading.Thread(target=hang_up)
    thread.start()
    with Client(url, retries=Retries(times=0)) as client, pytest.raises(Unreachable):
        client.layers()
    thread.join()


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://x:port"])
def test_an_invalid_url_is_unreachable(url):
    with pytest.raises(Unreachable, match="expected a URL such as"):
        Client(url).layers()


def test_ready_is_whether_the_server_has_loaded_its_layers(client):
    assert client.ready()
    assert not answering(httpx.Response(503, json={"ready": False})).ready()
    with pytest.raises(errors.RequestError):
        answering(httpx.Response(404)).ready()


# --- time, certificates, processes ----------------------------------------------------------------------------------------------------

ARGUMENTS = {  # of every method, what it is called with
    "attend": (SMALL,),
    "analysis": (SMALL,),
    "plan": (SMALL,),
    "figure": (SMALL,),
    "words": ("a text",),
    "layers": (),
    "layer": ("x",),
    "vocabulary": (),
    "put_layer": ("x", SPEC),
    "put_layer_file": ("x", b""),
    "put_layer_from": ("x", "folder", 0),
    "layer_file": ("x",),
    "layer_weights": ("x",),
    "circuits": ("x",),
    "delete_layer": ("x",),
    "tokens": ("{}", "a text"),
    "about": (),
    "metrics": (),
    "live": (),
    "started": (),
    "ready": (),
    "session": (),
    "sessions": (),
}
SESSION_ARGUMENTS = {
    "attend": (SMALL[:1],),
    "info": (),
    "truncate": (1,),
    "fork": (),
    "export": (),
    "load": (b"",),
    "delete": (),
}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("method", ARGUMENTS)
def test_every_method_takes_a_timeout(kind, method, monkeypatch):
    """Without it the client's applies; None is no limit."""
    waited = []
    folder = SimpleNamespace(layer=lambda *_: (SimpleNamespace(part=""), {}), config_text="")
    monkeypatch.setattr(operations, "ModelFolder", lambda _: folder)
    monkeypatch.setattr("attend.client.client.Attempts", partial(Attempts, clock=lambda: 0.0))

    def handle(request):
        waited.append(request.extensions["timeout"]["read"])
        return httpx.Response(404)

    async def later(request):
        return handle(request)

    async def awaited(result):
        return await result

    client = kind(timeout=7.0, transport=httpx.MockTransport(handle if kind is Client else later))
    for given in ({"timeout": 2.5}, {"timeout": None}, {}):
        with pytest.raises(errors.AttendError):
            reply = getattr(client, method)(*ARGUMENTS[method], **given)
            asyncio.run(awaited(reply))
    assert waited == [2.5, None, 7.0]
    assert {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"} == {*ARGUMENTS, "perform", "close"}


def test_every_documented_endpoint_has_a_method():
    """Of the client or of its sessions; those of the Open Inference Protocol have clients of their own."""
    table = create_app(Settings()).table
    asked = set()
    info = {"id": "some", "layer": {"name": "x", "fingerprint": "0"}, "length": 0, "capacity": None, "bytes": 0, "idle_seconds": 9}

    def handle(request):
        endpoints, _ = table.find(request.url.path)
        asked.add((request.method, endpoints[request.method].path))
        starts = (request.method, request.url.path) == ("POST", "/sessions")
        return httpx.Response(201, json={**info, "expires_at": ""}) if starts else httpx.Response(404)

    client = Client(transport=httpx.MockTransport(handle))
    session = client.session()
    missing = {"put_layer_from"}  # reads a folder; its request is that of put_layer_file
    for found, arguments in ((client, ARGUMENTS), (session, SESSION_ARGUMENTS)):
        for name in arguments.keys() - missing:
            with suppress(errors.AttendError):
                getattr(found, name)(*arguments[name])
    documented = {(endpoint.method, endpoint.path) for endpoint in table if endpoint.documented and not is_v2(endpoint.path)}
    assert asked == documented


def test_the_timeout_of_a_call_replaces_that_of_the_client(silent):
    with Client(silent[0], timeout=None) as client, pytest.raises(TimedOut, match="in time"):
        client.attend(SMALL, timeout=0.1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate authority, and the flags of a server that shows a certificate of it."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    certificate, files = authority.issue_cert("127.0.0.1"), {name: folder / f"{name}.pem" for name in ("ca", "chain", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    certificate.cert_chain_pems[0].write_to_path(files["chain"])
    certificate.private_key_pem.write_to_path(files["key"])
    return files


def test_a_certificate_is_verified_with_the_given_authority(start, authority):
    url = start("--tls-cert", str(authority["chain"]), "--tls-key", str(authority["key"])).url
    for verify in (authority["ca"], str(authority["ca"]), ssl.create_default_context(cafile=authority["ca"])):
        with Client(url, verify=verify) as client:
            assert client.ready()

    async def ask():
        async with AsyncClient(url, verify=authority["ca"]) as client:
            return await client.ready()

    assert asyncio.run(ask())
    with Client(url, retries=Retries(first=1e9)) as client, pytest.raises(Untrusted, match="unable to get local issuer"):
        client.layers()  # and at once


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_without_certificates_is_refused_by_name(tmp_path, kind, text):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OSError, match=rf"expected a file or folder of certificates in PEM format, got {path}: "):
        kind(verify=path)


def test_a_client_is_pickled_without_its_key(server, monkeypatch):
    secrets = {"X-API-Key": "secret-2", "authorization": "secret-3"}
    client = Client(server.url, timeout=9, api_key="secret-1", headers={**secrets, "X-Request-Id": "mine"}, retries=2)
    pickled = pickle.dumps(client)
    assert b"secret" not in pickled
    monkeypatch.setenv("ATTEND_API_KEY", "found-there")
    with pickle.loads(pickled) as again:
        assert (again.base_url, again.timeout, again.retries) == (client.base_url, 9, client.retries)
        assert again.http.headers["authorization"] == "Bearer found-there" and "x-api-key" not in again.http.headers
        assert again.attend(np.zeros((1, 64))).request_id == "mine"
    with pickle.loads(pickle.dumps(Client(server.url))) as open_to_all:
        assert "authorization" not in open_to_all.http.headers
    assert copy.deepcopy(client) is client


@pytest.mark.parametrize("given", [{"transport": httpx.MockTransport(print)}, {"verify": ssl.create_default_context()}])
def test_a_client_with_a_transport_cannot_be_pickled(given):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Client(**given))


def test_a_forked_process_opens_its_own_connections(server):
    """With the parent's, each could read the other's replies."""
    code = f"""
import os
import numpy as np
from attend.client import Client

def ask(client, width, times):
    for n in range(1, times):
        assert client.attend(np.zeros((n, 64)), outputs=["output"]).output.shape == (n, width)

with Client({server.url!r}) as client:
    ask(client, 64, 3)
    opened = client.http
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            ask(client, 64, 40)
            os._exit(0 if client.http is not opened else 3)
        children.append(child)
    ask(client, 64, 40)
    assert client.http is opened
    print([os.waitpid(child, 0)[1] for child in children])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[0, 0, 0, 0]\n", "")
