"""Layers over HTTP: creating, replacing and removing them, their documents, and safetensors files in and out."""

import json
import math
import re
import struct
from collections.abc import Callable
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load

from attend.spec import LayerSpec

SAFETENSORS = "application/vnd.safetensors"
RNG = np.random.default_rng(20)
NAMES = {np.dtype(t): n for t, n in ((np.float64, "F64"), (np.float32, "F32"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16"))}
QUERY = np.random.default_rng(11).standard_normal((2, 3, 4)).round(3).tolist()


def packed(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """safetensors, written here by the format's own rules."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    return framed(json.dumps(header).encode(), data)


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def drawn(width: int, *shape: int) -> Any:
    return RNG.standard_normal(shape or (width, width)).astype(np.float32)


def bert(layers: int, width: int = 6) -> dict[str, Any]:
    """A checkpoint of that many layers, with a tensor that is not of attention."""
    tensors: dict[str, Any] = {"embeddings.word_embeddings.weight": drawn(width, 11, width)}
    for i in range(layers):
        for path in ("self.query", "self.key", "self.value", "output.dense"):
            tensors[f"encoder.layer.{i}.attention.{path}.weight"] = drawn(width)
            tensors[f"encoder.layer.{i}.attention.{path}.bias"] = drawn(width, width)
    return tensors


def put(http: httpx.Client, body: bytes, name: str = "filed", **query: str) -> httpx.Response:
    return http.put(f"/layers/{name}", content=body, params=query, headers={"Content-Type": SAFETENSORS})


def problem(answer: httpx.Response, status: int) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, str] = answer.json()["errors"][0]
    return found


def test_put_is_201_then_200_and_delete_is_204_then_404(http: httpx.Client, layers: dict[str, Any]) -> None:
    """PUT replies with the document of GET, which has steps beside it."""
    spec = {"d_model": 6, "num_heads": 2, "seed": 1}
    new = http.put("/layers/coming", json={"spec": spec})
    same = http.put("/layers/coming", json={"spec": spec})
    other = http.put("/layers/coming", json={"spec": {**spec, "seed": 2}})
    got = http.get("/layers/coming")
    document = got.json()
    document.pop("steps")
    listed = {layer["name"]: layer for layer in http.get("/layers").json()["layers"]}
    gone = http.delete("/layers/coming")

    assert [answer.status_code for answer in (new, same, other, got, gone)] == [201, 200, 200, 200, 204]
    assert "content-type" not in gone.headers
    assert new.json() == same.json() != other.json() == document == listed["coming"]
    assert gone.content == b""
    assert http.get("/layers/coming").status_code == http.delete("/layers/coming").status_code == 404
    assert http.post("/attend", json={"layer": "coming", "query": [[0] * 6]}).status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"softcap": 2.0, "alibi": True, "sinks": True, "num_kv_heads": 1},
        {"rope": {"theta": 100.0}, "qk_norm": {"kind": "rms"}, "window": {"left": 3}, "bias": False},
        {"differential": {}},
        {"projections": False},
    ],
    ids=str,
)
def test_get_of_one_layer_has_the_steps_of_its_program(http: httpx.Client, layers: dict[str, Any], fields: dict[str, Any]) -> None:
    """Their names and formulas, in order. The replies to PUT and to GET of all layers have none."""
    spec = {"d_model": 8, "num_heads": 2, **fields}
    put = http.put("/layers/stepped", json={"spec": spec})
    got, listed = http.get("/layers/stepped").json(), http.get("/layers").json()["layers"]
    http.delete("/layers/stepped")

    program = LayerSpec.model_validate(spec).program
    assert list(got["steps"].items()) == [(step.name, step.formula) for step in program if step.formula]
    assert {"softcap", "add_bias", "sinks", "rotate_query", "norm_key"} & {step.name for step in program} <= {*got["steps"]}
    assert put.is_success and "steps" not in put.json()
    assert listed and not any("steps" in layer for layer in listed)


def test_the_document_of_a_layer_has_spec_parameters_fingerprint_and_device(http: httpx.Client, layers: dict[str, Any]) -> None:
    """Spec with defaults filled in, parameters, fingerprint, device."""
    layer = http.get("/layers/cross").json()

    assert layer["name"] == "cross"
    assert (
        layer["spec"]
        | {
            "d_model": 4,
            "num_heads": 2,
            "key_dim": 3,
            "value_dim": 5,
            "bias": True,
            "scale": 1 / math.sqrt(2),
            "softcap": None,
            "seed": 4,
            "init": "xavier_uniform",
            "dtype": "float32",
        }
        == layer["spec"]
    )
    assert layer["parameters"] == 4 * 4 + 4 * 3 + 4 * 5 + 4 * 4 + 4 * 4
    assert (layer["state"], layer["device"]) == ("ready", "cpu")
    assert re.fullmatch(r"[0-9a-f]{64}", layer["fingerprint"])


def test_the_fingerprint_depends_on_spec_and_weights(http: httpx.Client, layers: dict[str, Any]) -> None:
    """Not on whether defaults are written out. It changes with seed, head width, dtype and scale."""
    spec = {"d_model": 4, "num_heads": 2, "seed": 3}

    def fingerprint(**fields: Any) -> str:
        return str(http.put("/layers/print", json={"spec": {**spec, **fields}}).json()["fingerprint"])

    same = fingerprint()
    assert same == layers["tiny"]["fingerprint"]
    assert same == fingerprint(
        key_dim=4, value_dim=4, bias=True, scale=1 / math.sqrt(2), softcap=None, init="xavier_uniform", dtype="float32"
    )
    assert same == fingerprint(softcap=0, scale=None)
    others = {
        fingerprint(seed=4),
        fingerprint(num_heads=1),
        fingerprint(dtype="float64"),
        fingerprint(scale=1),
        fingerprint(softcap=1),
        same,
    }
    assert len(others) == 6
    assert http.delete("/layers/print").status_code == 204


def test_a_replaced_layer_computes_with_its_new_weights(http: httpx.Client, layers: dict[str, Any]) -> None:
    """The reply names the fingerprint."""
    answers = []
    for seed in (1, 2, 1):
        made = http.put("/layers/turning", json={"spec": {"d_model": 4, "num_heads": 2, "seed": seed}}).json()
        answers.append(http.post("/attend", json={"layer": "turning", "query": QUERY}).json())
        assert answers[-1]["layer"] == {"name": "turning", "fingerprint": made["fingerprint"]}
    assert http.delete("/layers/turning").status_code == 204

    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize("name", ["a", "A.b_c-D", "9", "x" * 64])
def test_valid_layer_names_are_accepted(http: httpx.Client, layers: dict[str, Any], name: str) -> None:
    """Letters, digits, point, underscore, hyphen; at most 64."""
    assert http.put(f"/layers/{name}", json={"spec": {"d_model": 4, "num_heads": 2}}).status_code == 201
    assert http.post("/attend", json={"layer": name, "query": QUERY}).status_code == 200
    assert http.delete(f"/layers/{name}").status_code == 204


def test_an_unconfigured_server_has_the_layer_default(http: httpx.Client) -> None:
    """d_model 64, 8 heads, seed 0."""
    spec = http.get("/layers/default").json()["spec"]

    assert (spec["d_model"], spec["num_heads"], spec["seed"], spec["dtype"]) == (64, 8, 0, "float32")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_kv_heads": 1, "sinks": True, "qk_norm": {"kind": "rms"}, "head_dim": 5},
        {"output_gate": {"bias": True}, "latent": {"query_rank": 3, "key_value_rank": 5, "rope_key_dim": 1, "bias": True}},
        {"relative_scores": {"kind": "transformer_xl", "interleaved": True}},
        {"relative_scores": {"kind": "disentangled", "max_distance": 5, "position_to_content": True}},
        {"differential": {"lambda_init": 0.2}, "d_model": 12},
        {"grid_bias": {"height": 2, "width": 3, "class_token": True}},
        {"grid_bias": {"height": 2, "width": 3, "kind": "decomposed"}, "rope": {"axes": [0], "dims": 2, "requires_positions": True}},
    ],
)
def test_exported_weights_can_be_put_back_bit_for_bit(http: httpx.Client, dtype: str, more: dict[str, Any]) -> None:
    """Same fingerprint, which covers every bit. The file is equal except for `init` and `seed`."""
    spec = {"d_model": 6, "num_heads": 3, "seed": 5, "dtype": dtype, **more}
    made = http.put("/layers/drawn", json={"spec": spec}).json()
    file = http.get("/layers/drawn/weights")
    assert file.headers["content-type"] == SAFETENSORS
    assert file.headers["content-disposition"] == 'attachment; filename="drawn.safetensors"'
    assert int(file.headers["content-length"]) == len(file.content)
    head = http.head("/layers/drawn/weights")
    assert head.status_code == 200 and not head.content and head.headers["content-length"] == file.headers["content-length"]

    taken = put(http, file.content)
    again = put(http, http.get("/layers/filed/weights").content)

    assert (taken.status_code, again.status_code) == (201, 200)
    assert taken.json()["fingerprint"] == again.json()["fingerprint"] == made["fingerprint"]
    assert made["spec"]["init"] == "xavier_uniform" and made["spec"]["seed"] == 5
    assert taken.json() == again.json() and http.get("/layers/filed").json().items() >= again.json().items()
    assert taken.json()["spec"] == {**made["spec"], "init": None, "seed": None}
    for name in ("drawn", "filed"):
        assert http.delete(f"/layers/{name}").status_code == 204


def test_one_layer_is_read_from_a_checkpoint_by_its_prefix(http: httpx.Client) -> None:
    """It equals the layer whose tensors are given one by one."""
    tensors = bert(2)
    spec = {"d_model": 6, "num_heads": 2}
    taken = put(http, packed(tensors, {"format": "pt"}), prefix="encoder.layer.1", spec='{"num_heads": 2}')
    assert taken.status_code == 201, taken.text
    paths = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}
    weights = {
        f"{ours}.{kind}": tensors[f"encoder.layer.1.attention.{theirs}.{kind}"].tolist()
        for ours, theirs in paths.items()
        for kind in ("weight", "bias")
    }
    listed = http.put("/layers/listed", json={"spec": spec, "weights": weights})
    assert listed.json()["fingerprint"] == taken.json()["fingerprint"]
    assert put(http, packed(tensors), layout="bert", prefix="encoder.layer.1.attention", spec='{"num_heads": 2}').status_code == 200
    for name in ("filed", "listed"):
        http.delete(f"/layers/{name}")


def test_weights_of_an_unknown_layer_are_404(http: httpx.Client) -> None:
    assert "nobody" in problem(http.get("/layers/nobody/weights"), 404)["got"]


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


ONE = bert(1)
STEM = "encoder.layer.0.attention"
HEADS = '{"num_heads": 2}'
OURS = {"spec": '{"d_model": 2, "num_heads": 1, "bias": false}'}
PLAIN = {f"{name}.weight": np.eye(2, dtype=np.float32) for name in ("query", "key", "value", "output")}
REFUSALS: dict[str, tuple[bytes, dict[str, str], str, str]] = {
    "several layers": (packed(bert(3)), {"spec": HEADS}, "", "encoder.layer.2.attention as the query parameter prefix"),
    "no such prefix": (packed(bert(3)), {"spec": HEADS, "prefix": "encoder.layer.9"}, "", "encoder.layer.0.attention"),
    "no such layout": (packed(ONE), {"spec": HEADS, "layout": "berd"}, "", "as the query parameter layout"),
    "missing": (packed(without(ONE, f"{STEM}.self.key.weight")), {"spec": HEADS}, f"/{STEM}.self.key.weight", "a tensor"),
    "surplus": (packed(ONE | {f"{STEM}.self.odd": drawn(2)}), {"spec": HEADS}, f"/{STEM}.self.odd", "only what"),
    "shape": (packed(ONE | {f"{STEM}.self.key.bias": drawn(5, 5)}), {"spec": HEADS}, f"/{STEM}.self.key.bias", "6"),
    "heads unsaid": (packed(ONE), {}, "", "at /num_heads of the spec, a query parameter"),
    "heads that do not fit": (
        packed(ONE),
        {"spec": '{"num_heads": 4}'},
        "",
        "a divisor of 6, the queries' rows, at /num_heads of the spec",
    ),
    "unknown field": (
        packed(ONE),
        {"spec": '{"num_heads": 2, "heads": 2}'},
        "",
        "no field of that name, at /heads of",
    ),
    "ours, missing": (packed(without(PLAIN, "key.weight"), OURS), {}, "/key.weight", "[2, 2]"),
    "ours, surplus": (packed({**PLAIN, "key.bias": np.zeros(2, np.float32)}, OURS), {}, "/key.bias", "one of"),
    "ours, shape": (packed({**PLAIN, "key.weight": np.zeros((2, 3), np.float32)}, OURS), {}, "/key.weight", "[2, 2]"),
    "ours, misspelt": (packed(PLAIN, {"spec": '{"d_model": 2, "num_heads": 1, "heads": 1}'}), {}, "/__metadata__/spec/heads", "no field"),
    "ours, given twice": (packed(PLAIN, OURS), {"spec": HEADS}, "", "no query parameter spec"),
    "ours, not finite": (
        packed({**PLAIN, "key.weight": np.full((2, 2), np.nan, np.float32)}, OURS),
        {},
        "/key.weight/0/0",
        "finite",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_files_that_are_not_layers_are_refused_with_the_tensor_or_field(http: httpx.Client, case: str) -> None:
    """422, and no layer afterwards."""
    body, query, at, expected = REFUSALS[case]
    found = problem(put(http, body, **query), 422)
    assert found["at"] == at
    assert expected in found["expected"], found
    assert http.get("/layers/filed").status_code == 404


def entry(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HOSTILE: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "a header beyond the file": (struct.pack("<Q", 1 << 20) + b"{}", 400),
    "a header without end": (struct.pack("<Q", (1 << 64) - 1) + b"{}", 413),
    "overlap": (framed(json.dumps({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}).encode(), b"\0" * 12), 400),
    "a hole": (framed(json.dumps({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}).encode(), b"\0" * 12), 400),
    "data of no tensor": (framed(json.dumps({"a": entry(0, 4, [1])}).encode(), b"\0" * 8), 400),
    "one name twice": (
        framed(b'{"a":%s,"a":%s}' % (json.dumps(entry(0, 4, [1])).encode(), json.dumps(entry(4, 8, [1])).encode()), b"\0" * 8),
        400,
    ),
    "a shape beyond its data": (framed(json.dumps({"a": entry(0, 8, [1 << 40, 1 << 40])}).encode(), b"\0" * 8), 400),
    "a spec twice": (packed(PLAIN, {"spec": '{"d_model": 2, "d_model": 2, "num_heads": 1}'}), 400),
    "a spec of more than is allowed": (packed(PLAIN, {"spec": '{"d_model": 1000000, "num_heads": 1}'}), 413),
    "a pickle": (b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins", 400),
}
FOREIGN: dict[str, bytes] = {
    "a pickle": HOSTILE["a pickle"][0],
    "zip": b"PK\x03\x04" + b"\0" * 60,
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\0" * 60,
    "gzip": b"\x1f\x8b\x08" + b"\0" * 60,
    "JSON": b'{"spec": {"d_model": 4, "num_heads": 2}}',
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\n",
    "something else": b"hello, this is no checkpoint",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_format_of_a_file_that_is_not_safetensors_is_recognised(http: httpx.Client, kind: str) -> None:
    """Its first bytes are not reported as a header length."""
    found = problem(put(http, FOREIGN[kind], spec=HEADS), 400)
    assert "safetensors" in found["expected"]
    assert kind in found["got"]


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(http: httpx.Client, case: str) -> None:
    """No layer is added, and the server answers the next request."""
    body, status = HOSTILE[case]
    problem(put(http, body), status)
    assert http.get("/health/ready").status_code == 200
    assert http.get("/layers/filed").status_code == 404


def in_json(tensors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"spec": fields, "weights": {name: tensor.tolist() for name, tensor in tensors.items()}}


NAMES_OF_OTHERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "NumPy": ({f"W_{letter}": drawn(6) for letter in "qkvo"}, {}),
    "Dive into Deep Learning": ({f"W_{letter}.weight": drawn(6) for letter in "qkvo"}, {}),
    "one layer of BERT": (bert(2), {"prefix": "encoder.layer.1"}),
    "torch": (
        {"in_proj_weight": drawn(6, 18, 6), "in_proj_bias": drawn(6, 18), "out_proj.weight": drawn(6), "out_proj.bias": drawn(6, 6)},
        {},
    ),
    "BART": ({f"{name}_proj.weight": drawn(6) for name in ("q", "k", "v", "out")}, {"layout": "bart"}),
}


@pytest.mark.parametrize("case", NAMES_OF_OTHERS)
def test_weights_in_json_have_the_names_of_any_framework(http: httpx.Client, case: str) -> None:
    """The same layer as from a safetensors file of these names."""
    tensors, query = NAMES_OF_OTHERS[case]
    filed = put(http, packed(tensors), spec='{"num_heads": 2}', **query).json()

    given = http.put("/layers/filed", params=query, json=in_json(tensors, num_heads=2)).json()
    exact = http.put("/layers/filed", params=query, json=in_json(tensors, num_heads=2, dtype="float64")).json()

    assert given == filed and exact["spec"] == {**filed["spec"], "dtype": "float64"}
    http.delete("/layers/filed")


@pytest.mark.parametrize(
    ("body", "query", "at"),
    [
        (in_json({f"W_{letter}": drawn(6) for letter in "qkv"}, num_heads=2), {}, "/weights/W_o"),
        (in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}), {}, "/spec/num_heads"),
        (
            {"spec": {"num_heads": 2}, "weights": {f"W_{letter}": None if letter == "k" else [[1.0]] for letter in "qkvo"}},
            {},
            "/weights/W_k",
        ),
        (in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}, num_heads=2, bias=True), {}, "/spec/bias"),
        (in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}, num_heads=2, d_modle=6), {}, "/spec/d_modle"),
        (in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}, num_heads=2, dtype=""), {}, "/spec/dtype"),
        (in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}, num_heads=2), {"spec": "{}"}, ""),
        (in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}, num_heads=2), {"layout": "bert"}, ""),
        ({**in_json({f"W_{letter}": drawn(6) for letter in "qkvo"}, num_heads=2, d_model=6), "x": 1}, {}, "/x"),
        (in_json({f"{name}_weight": drawn(6) for name in ("query", "key")}, num_heads=2, d_model=6), {}, "/weights/query.weight"),
    ],
)
def test_weights_in_json_that_fit_no_layer_are_refused(http: httpx.Client, body: dict[str, Any], query: dict[str, str], at: str) -> None:
    found = http.put("/layers/filed", params=query, json=body)
    assert problem(found, 422)["at"] == at
    assert http.get("/layers/filed").status_code == 404


def test_the_refusal_of_a_misspelt_weight_suggests_its_name(http: httpx.Client) -> None:
    weights = {f"{name}.weight": drawn(4) for name in ("query", "key", "value")} | {"output_weight": drawn(4)}
    answer = http.put("/layers/filed", json=in_json(weights, d_model=4, num_heads=2, bias=False))
    assert '"output_weight" (did you mean output.weight?)' in {error["got"] for error in answer.json()["errors"]}


def weights_of(http: httpx.Client, **spec: Any) -> dict[str, Any]:
    """The weights in float64 of a layer that is created and removed."""
    made = http.put("/layers/gained", json={"spec": {"d_model": 6, "num_heads": 2, "seed": 4, "dtype": "float64", **spec}})
    assert made.is_success, made.text
    tensors: dict[str, Any] = load(http.get("/layers/gained/weights").content)
    assert http.delete("/layers/gained").status_code == 204
    return tensors


@pytest.mark.parametrize("init", ["xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"])
def test_a_gain_multiplies_what_is_drawn(http: httpx.Client, init: str) -> None:
    plain, gained = weights_of(http, init=init), weights_of(http, init=init, gain=2.5)
    assert plain.keys() == gained.keys()
    for name, tensor in plain.items():
        np.testing.assert_allclose(gained[name], 2.5 * tensor, rtol=1e-6)
    normed = weights_of(http, init=init, gain=2.5, qk_norm={"kind": "rms"})
    np.testing.assert_array_equal(normed["key_norm.weight"], np.ones(3))  # which is not drawn


def test_a_gain_is_part_of_the_spec_and_not_of_the_fingerprint(http: httpx.Client) -> None:
    """The fingerprint covers the weights. Without a gain it is 1, and it is 1 for a file of a layer."""
    spec = {"d_model": 4, "num_heads": 2, "seed": 3, "bias": False}
    plain, one, null, two = (
        http.put("/layers/gained", json={"spec": {**spec, **gain}}).json() for gain in ({}, {"gain": 1}, {"gain": None}, {"gain": 2})
    )
    assert plain == one == null and plain["spec"]["gain"] == 1
    assert two["spec"] == {**plain["spec"], "gain": 2} and two["fingerprint"] != plain["fingerprint"]
    again = put(http, http.get("/layers/gained/weights").content, "gained").json()
    assert again["fingerprint"] == two["fingerprint"] and again["spec"]["gain"] == 1
    http.delete("/layers/gained")


def test_a_spec_without_its_wrapper_is_refused_with_the_wrapper(http: httpx.Client) -> None:
    errors = http.put("/layers/bare", json={"d_model": 4, "embed_dim": 4}).json()["errors"]
    assert errors[0] == {"at": "/spec", "expected": 'an object such as {"d_model": 64, "num_heads": 8}', "got": "nothing"}
    assert [(error["at"], error["expected"]) for error in errors[1:]] == [
        (f"/{name}", 'no field of that name, which belongs inside "spec"') for name in ("d_model", "embed_dim")
    ]


def test_query_parameters_with_a_json_body_are_refused(http: httpx.Client) -> None:
    answer = http.put("/layers/filed", params={"layout": "bert"}, json={"spec": {"d_model": 4, "num_heads": 2}})
    found = problem(answer, 422)
    assert (found["at"], "with the query parameter layout" in found["expected"]) == ("", True)


@pytest.mark.parametrize("body", [packed(ONE), b'{"spec": {"d_model": 4, "num_heads": 2}}'])
def test_unknown_and_repeated_query_parameters_are_refused(http: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": SAFETENSORS if body == packed(ONE) else "application/json"}
    answer = http.put("/layers/filed", params={"dry/run": "1"}, content=body, headers=headers)
    assert problem(answer, 422) == {"at": "", "expected": "a query parameter among layout, prefix, spec", "got": '"dry/run"'}
    answer = http.put("/layers/filed", params=[("prefix", "a"), ("prefix", "b")], content=body, headers=headers)
    assert problem(answer, 422) == {"at": "", "expected": "the query parameter prefix once", "got": "it twice"}
    assert http.get("/layers/filed").status_code == 404


@pytest.mark.parametrize(
    ("spec", "status", "at"),
    [
        ("{", 400, ""),
        ("[1]", 422, ""),
        ('{"num_heads": NaN}', 400, "/num_heads"),
        ('{"num_heads": 2, "num_heads": 2}', 400, "/num_heads"),
    ],
)
def test_a_spec_that_is_not_an_object_is_refused_with_a_pointer(http: httpx.Client, spec: str, status: int, at: str) -> None:
    """In the file with a pointer, in the query with the place in the parameter."""
    assert problem(put(http, packed(PLAIN, {"spec": spec})), status)["at"] == f"/__metadata__/spec{at}"
    found = problem(put(http, packed(ONE), spec=spec), status)
    place = f"at {at} of the spec, a query parameter" if at else "as the query parameter spec"
    assert (found["at"], found["expected"].endswith(f" {place}")) == ("", True)


@pytest.mark.parametrize("seed", [None, 5])
def test_an_init_of_null_without_weights_is_the_default(http: httpx.Client, seed: int | None) -> None:
    """Generated clients send null for fields that are left out."""
    spec = {"d_model": 4, "num_heads": 2, "seed": seed}
    given = http.put("/layers/drawn", json={"spec": {**spec, "init": None}, "weights": None})
    assert given.is_success and given.json()["spec"]["init"] == "xavier_uniform"
    assert given.json() == http.put("/layers/drawn", json={"spec": {**spec, "seed": seed or 0}}).json()
    http.delete("/layers/drawn")


def test_given_weights_admit_seed_and_init_but_no_gain(http: httpx.Client) -> None:
    """The spec of another layer may have them, and the reply shows them as null. A gain would be ignored, so it is refused."""
    spec, weights = {"d_model": 2, "num_heads": 1, "bias": False}, {name: tensor.tolist() for name, tensor in PLAIN.items()}
    plain = http.put("/layers/filed", json={"spec": spec, "weights": weights}).json()
    assert (plain["spec"]["seed"], plain["spec"]["init"], plain["spec"]["gain"]) == (None, None, 1)
    for same in ({"seed": 7, "init": "torch_linear", "gain": 1.0}, {"seed": None, "init": None, "gain": None}, plain["spec"]):
        assert http.put("/layers/filed", json={"spec": {**spec, **same}, "weights": weights}).json() == plain
    refused = problem(put(http, packed(ONE), spec=json.dumps({"num_heads": 1, "gain": 2.0})), 422)
    assert refused["expected"] == "nothing, since the weights are given and none is drawn, at /gain of the spec, a query parameter"
    assert http.delete("/layers/filed").status_code == 204


@pytest.mark.parametrize("eps", [0, 1e-30, 1e-5, 0.01, 1])
def test_the_eps_of_a_norm_may_be_zero(http: httpx.Client, eps: float) -> None:
    """The oracle is the formula of RMSNorm in float64; queries and keys are not zero."""
    spec = {"d_model": 5, "num_heads": 1, "projections": False, "dtype": "float64", "qk_norm": {"eps": eps}}
    weights = {"query_norm.weight": [1, 2, 3, 4, 5], "key_norm.weight": [2, 1, 1, 1, 3]}
    assert http.put("/layers/filed", json={"spec": spec, "weights": weights}).is_success
    x = np.random.default_rng(3).standard_normal((3, 5))
    scores = http.post("/attend", json={"layer": "filed", "query": x.tolist(), "outputs": ["scores"]}).json()["scores"]
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    expected = (normed * weights["query_norm.weight"]) @ (normed * weights["key_norm.weight"]).T / np.sqrt(5)
    np.testing.assert_allclose(scores, [expected], rtol=1e-12)
    http.delete("/layers/filed")


def test_max_layer_bytes_applies_to_safetensors_of_put_only(start_here: Callable[..., str]) -> None:
    """max_body_bytes applies to all other bodies; the refusal names the exceeded setting."""
    with httpx.Client(base_url=start_here(max_body_bytes=1024, max_layer_bytes=4000)) as http:
        assert put(http, packed(ONE), spec=HEADS).status_code == 201
        assert "max_layer_bytes" in problem(put(http, packed(bert(4)), spec=HEADS), 413)["expected"]
        long = http.put("/layers/x", content=b" " * 2000, headers={"Content-Type": "application/json"})
        assert "max_body_bytes" in problem(long, 413)["expected"]


def test_layers_are_listed_in_the_order_of_their_numbers(start_here: Callable[..., str]) -> None:
    """In `GET /layers`, the index, and the repository of models."""
    names = [f"ll-{number}" for number in (1, 2, 10, 11, 100)]
    with httpx.Client(base_url=start_here()) as http:
        for name in sorted(names):
            assert http.put(f"/layers/{name}", json={"spec": {"d_model": 2, "num_heads": 1}}).is_success
        listed = [
            [layer["name"] for layer in http.get("/layers").json()["layers"]],
            http.get("/").json()["layers"],
            [model["name"] for model in http.post("/v2/repository/index", json={}).json()],
        ]
    for found in listed:
        assert [name for name in found if name in names] == names
