"""Every form of a request gives the numbers of the float64 reference: JSON, safetensors, the Open Inference Protocol over HTTP and gRPC."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from attend.attention.reference.forward import attend
from attend.spec import LayerSpec
from support.forms import FORMS, Refused, Reply, Sender, step_of, weights_of
from support.server import Server
from support.v2 import DTYPES

B, Q, K, HEADS = 2, 3, 5, 3
SPEC = {"d_model": 6, "num_heads": HEADS, "key_dim": 7, "value_dim": 11, "seed": 13}
RNG = np.random.default_rng(17)
TENSORS: dict[str, Any] = {
    "query": RNG.standard_normal((B, Q, 6)).astype(np.float32),
    "key": RNG.standard_normal((B, K, 7)).astype(np.float32),
    "value": RNG.standard_normal((B, K, 11)).astype(np.float32),
}
HEADS_OF_INPUTS = ["query_projection", "key_projection", "value_projection"]
OUTPUTS = ["output", "attention_weights", "scores", "log_sum_exp", *HEADS_OF_INPUTS, "head_outputs", "concatenated"]
BIAS = np.where(RNG.random((B, HEADS, Q, K)) < 0.2, -np.inf, RNG.standard_normal((B, HEADS, Q, K)))
FIELDS: dict[str, dict[str, Any]] = {  # arrays are sent as tensors, all else as the form has it
    "nothing else": {},
    "attend_mask": {"attend_mask": RNG.integers(0, 2, (B, HEADS, Q, K)).astype(np.bool_)},
    "block_mask": {"block_mask": RNG.integers(0, 2, (Q, K)).astype(np.uint8)},
    "attend_keys": {"attend_keys": RNG.integers(0, 2, (B, K)).astype(np.float32)},
    "block_keys": {"block_keys": RNG.integers(0, 2, (B, K)).astype(np.int64), "fully_masked": "uniform"},
    "segments": {"query_segments": np.array([[0, 1, 1], [-1, 0, 3]], np.int8), "key_segments": RNG.integers(-1, 2, (B, K))},
    "valid_lens": {"valid_lens": np.array([3, 0], np.int32)},
    "lengths per query": {"valid_lens": RNG.integers(0, K + 1, (B, Q)).astype(np.uint16)},
    "bias": {"bias": BIAS.astype(np.float32)},
    "bias of another datatype": {"bias": np.abs(BIAS[:, :1]).clip(0, 4)},
    "head_scale": {"head_scale": np.array([[0.5, 2.0, 1.0], [0.0, -1.0, 3.0]])},
    "offsets": {"query_offset": np.array([1, -1], np.int32), "window": {"left": 1, "right": 1}},
    "one offset": {"query_offset": 2, "causal": True},
    "dropout": {"dropout": {"p": 0.5, "seed": 3}},
    "scale and softcap": {"scale": 0.3, "softcap": 3},
    "replaced heads": {
        "pattern": RNG.random((1, HEADS, Q, K)),
        "pattern_rows": np.array([True, False, False]),
        "head_outputs": RNG.random((B, HEADS, 1, 2)),
        "head_output_rows": np.array([[False, True, False], [False, False, True]]),
    },
    "an average": {"select": {"average": True, "heads": [2, 1]}, "valid_lens": np.array([3, 0])},
    "the largest": {"select": {"heads": [2, 0], "queries": [2, 0], "top_k": 2}, "valid_lens": np.array([3, 1])},
    "more than all": {"select": {"top_k": K + 4, "average": True}},
    "everything": {
        "attend_mask": np.tri(Q, K, 1, dtype=np.bool_),
        "attend_keys": np.ones((B, K), np.int8),
        "bias": BIAS.astype(np.float32),
        "valid_lens": np.array([4, 5]),
        "causal": True,
        "query_offset": "end",
        "fully_masked": "uniform",
    },
}


@pytest.fixture(scope="module")
def layer(v2: httpx.Client) -> Iterator[dict[str, Any]]:
    """A layer whose inputs have different widths: the reply of PUT, with its weights."""
    made = v2.put("/layers/cross", content=json.dumps({"spec": SPEC}))
    assert made.status_code == 201, made.text
    yield {**made.json(), "weights": weights_of(v2, "cross")}
    assert v2.delete("/layers/cross").status_code == 204


@pytest.fixture(params=FORMS)
def send(request: pytest.FixtureRequest, v2_server: Server) -> Iterator[Sender]:
    with httpx.Client(base_url=v2_server.url, timeout=60) as http:
        yield Sender(request.param, v2_server, http)


def selected(weights: Any, select: dict[str, Any]) -> dict[str, Any]:
    """What `select` leaves of weights [b, h, q, k], by the name of its tensor."""
    heads, queries = (select.get(name, slice(None)) for name in ("heads", "queries"))
    weights = weights[:, heads][:, :, queries]
    weights = weights.mean(1) if select.get("average") else weights
    if "top_k" not in select:
        return {"attention_weights": weights}
    keys = np.argsort(-weights, axis=-1, kind="stable")[..., : select["top_k"]]
    return {"attention_weights.keys": keys, "attention_weights.values": np.take_along_axis(weights, keys, -1)}


def assert_close(reply: Reply, spec: LayerSpec, weights: dict[str, Any], request: dict[str, Any], bound: float) -> None:
    """The outputs of a reply are those of the reference, within `bound` of the largest."""
    select = request.get("select", {})
    want = attend(spec, weights, **{name: field for name, field in request.items() if name != "select"})
    assert reply.fully_masked_rows == want.fully_masked.sum()
    chosen = selected(want.attention_weights, select) if select else {}
    for name, got in reply.arrays.items():
        expected = np.asarray(chosen[name] if name in chosen else getattr(want, name))
        largest = np.abs(expected, where=np.isfinite(expected), out=np.ones_like(expected)).max(initial=1.0)
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=bound * largest, err_msg=name)


@pytest.mark.parametrize("case", FIELDS)
def test_every_field_in_every_form(send: Sender, layer: dict[str, Any], case: str) -> None:
    fields = FIELDS[case]
    tensors = TENSORS | {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}

    reply = send("cross", tensors, OUTPUTS, **{name: value for name, value in fields.items() if not isinstance(value, np.ndarray)})

    names = {f"attention_weights.{part}" for part in ("keys", "values")} if "top_k" in fields.get("select", {}) else {"attention_weights"}
    assert reply.arrays.keys() == {*OUTPUTS} - {"attention_weights"} | names and reply.fingerprint == layer["fingerprint"]
    assert {name: array.dtype for name, array in reply.arrays.items()} == {
        name: np.dtype(np.int64 if name.endswith(".keys") else np.float32) for name in reply.arrays
    }
    assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], TENSORS | fields, 5e-6)


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BOOL"])
def test_every_datatype_in_every_form(send: Sender, layer: dict[str, Any], datatype: str) -> None:
    """Numbers that all datatypes can represent, for inputs and a mask, whose other numbers are refused."""
    tensors = {name: RNG.integers(0, 9, array.shape).astype(DTYPES[datatype]) for name, array in TENSORS.items()}
    tensors["block_mask"] = np.eye(Q, K, 1).astype(DTYPES[datatype])

    reply = send("cross", tensors, OUTPUTS)

    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], wide, 5e-6)
    tensors["block_mask"][1, 2] = 3
    with pytest.raises(Refused, match="block_mask"):
        send("cross", tensors, OUTPUTS)


@pytest.mark.parametrize(("name", "datatype"), [("brain", "BF16"), ("half", "FP16"), ("exact", "FP64")])
def test_replies_have_the_datatype_of_the_layer(send: Sender, v2: httpx.Client, name: str, datatype: str) -> None:
    query = RNG.standard_normal((B, Q, 6)).astype(DTYPES[datatype])
    spec = LayerSpec.model_validate(v2.get(f"/layers/{name}").json()["spec"])

    reply = send(name, {"query": query}, OUTPUTS)

    assert {array.dtype for array in reply.arrays.values()} == {np.dtype(DTYPES[datatype])}
    assert_close(reply, spec, weights_of(v2, name), {"query": query.astype(np.float64)}, 8 * step_of(query))


def test_replies_have_the_requested_datatype(send: Sender, layer: dict[str, Any]) -> None:
    """Rounded once, from the computed number."""
    computed = send("cross", TENSORS, OUTPUTS, reproducible=True)
    for datatype in ("FP16", "BF16", "FP32", "FP64"):
        reply = send("cross", TENSORS, OUTPUTS, reproducible=True, reply={"datatype": datatype})

        for name, array in reply.arrays.items():
            assert array.dtype == DTYPES[datatype]
            np.testing.assert_array_equal(array, computed.arrays[name].astype(array.dtype), err_msg=name)


def test_overflow_is_refused_unless_nonfinite_allows_it(send: Sender, layer: dict[str, Any]) -> None:
    """Of float16. Infinity is itself or its word, or null in text; the refusal names an output and an index."""
    tensors, outputs = {**TENSORS, "query": TENSORS["query"] * 1e6}, HEADS_OF_INPUTS[:1]
    projection = attend(LayerSpec.model_validate(SPEC), layer["weights"], **tensors).query_projection
    with np.errstate(over="ignore"):
        expected = projection.astype(np.float16)
    first = np.argwhere(np.isinf(expected))[0].tolist()

    for nonfinite in (None, "string", "null"):
        reply = {"datatype": "FP16"} | ({"nonfinite": nonfinite} if nonfinite else {})
        if nonfinite is None:
            with pytest.raises(Refused, match=re.escape(f"query_projection{first} = ") + "-?inf.*/reply/datatype"):
                send("cross", tensors, outputs, reply=reply)
            continue
        [got] = send("cross", tensors, outputs, reply=reply).arrays.values()
        null = np.isinf(expected) & (nonfinite == "null" and send.form in ("json", "v2 json"))
        np.testing.assert_allclose(got.astype(np.float64), np.where(null, np.nan, expected.astype(np.float64)), rtol=2**-10)


def test_axes_of_length_zero_in_every_form(send: Sender, layer: dict[str, Any]) -> None:
    """In fields and outputs. Without keys every row is fully masked."""
    for b, q, k in ((0, Q, K), (B, 0, K), (B, Q, 0), (0, 0, 0)):
        tensors = {name: array[:b, : q if name == "query" else k] for name, array in TENSORS.items()}
        fields = {
            "attend_mask": np.ones((b, HEADS, q, k), np.bool_),
            "attend_keys": np.ones((b, k), np.uint8),
            "valid_lens": np.zeros(b, np.int64),
            "bias": np.zeros((b, 1, q, k), np.float32),
            "head_scale": np.ones((b, HEADS), np.float32),
        }
        members = {"causal": True, "query_offset": "end"}

        reply = send("cross", {**tensors, **fields}, OUTPUTS, **members)

        assert reply.fully_masked_rows == b * HEADS * q
        assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], {**tensors, **fields, **members}, 5e-6)


def test_an_unbatched_request_gets_an_unbatched_reply(send: Sender, layer: dict[str, Any]) -> None:
    """An axis of one query stays."""
    tensors = {name: array[1] for name, array in TENSORS.items()}
    tensors |= {"query": tensors["query"][:1], "head_scale": np.array([0.5, 2.0, -1.0]), "block_keys": np.array([0, 1, 0, 0, 1])}

    reply = send("cross", tensors, OUTPUTS)

    assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], tensors, 5e-6)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bodies_and_replies_may_be_compressed_in_every_form(send: Sender, layer: dict[str, Any], coding: str) -> None:
    """A length in a header is the one before compression."""
    send.coding = coding

    reply = send("cross", TENSORS, OUTPUTS)

    assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], TENSORS, 5e-6)
