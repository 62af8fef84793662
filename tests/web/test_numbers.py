"""Every form of a request gives the numbers of the float64 reference: JSON, safetensors, the Open Inference Protocol over HTTP and gRPC."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from attend.attention.reference.forward import attend
from attend.spec import LayerSpec
from support.forms import FORMS, Reply, Sender, step_of, weights_of
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
OUTPUTS = ["output", "attention_weights", "log_sum_exp", "head_outputs"]
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
    "scale and softcap": {"scale": 0.3, "softcap": 1.5},
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


def assert_close(reply: Reply, spec: LayerSpec, weights: dict[str, Any], request: dict[str, Any], bound: float) -> None:
    """The outputs of a reply are those of the reference, within `bound` of the largest."""
    want = attend(spec, weights, **request)
    assert reply.fully_masked_rows == want.fully_masked.sum()
    for name, got in reply.arrays.items():
        expected = np.asarray(getattr(want, name))
        largest = np.abs(expected, where=np.isfinite(expected), out=np.ones_like(expected)).max(initial=1.0)
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=bound * largest, err_msg=name)


@pytest.mark.parametrize("case", FIELDS)
def test_every_field_in_every_form(send: Sender, layer: dict[str, Any], case: str) -> None:
    fields = FIELDS[case]
    tensors = TENSORS | {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}

    reply = send("cross", tensors, OUTPUTS, **{name: value for name, value in fields.items() if not isinstance(value, np.ndarray)})

    assert reply.arrays.keys() == set(OUTPUTS) and reply.fingerprint == layer["fingerprint"]
    assert {array.dtype for array in reply.arrays.values()} == {np.dtype(np.float32)}
    assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], TENSORS | fields, 5e-6)


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BOOL"])
def test_every_datatype_in_every_form(send: Sender, layer: dict[str, Any], datatype: str) -> None:
    """Numbers that all datatypes can represent, for inputs and a mask."""
    tensors = {name: RNG.integers(0, 9, array.shape).astype(DTYPES[datatype]) for name, array in TENSORS.items()}
    tensors["block_mask"] = np.eye(Q, K, 1).astype(DTYPES[datatype])

    reply = send("cross", tensors, OUTPUTS)

    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    assert_close(reply, LayerSpec.model_validate(SPEC), layer["weights"], wide, 5e-6)


@pytest.mark.parametrize(("name", "datatype"), [("brain", "BF16"), ("half", "FP16"), ("exact", "FP64")])
def test_replies_have_the_datatype_of_the_layer(send: Sender, v2: httpx.Client, name: str, datatype: str) -> None:
    query = RNG.standard_normal((B, Q, 6)).astype(DTYPES[datatype])
    spec = LayerSpec.model_validate(v2.get(f"/layers/{name}").json()["spec"])

    reply = send(name, {"query": query}, OUTPUTS[:2])

    assert {array.dtype for array in reply.arrays.values()} == {np.dtype(DTYPES[datatype])}
    assert_close(reply, spec, weights_of(v2, name), {"query": query.astype(np.float64)}, 8 * step_of(query))
