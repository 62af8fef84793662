"""ONNX's own cases of its operator Attention with a past: the past is imported, and a step gives its output and its present. Each item of a
batch is a session."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

FILE = Path(__file__).parents[2] / "golden" / "caches" / "onnx_past.safetensors"
HEADERS = {"content-type": "application/vnd.safetensors", "accept": "application/vnd.safetensors"}
PRODUCTS, CAPPED, BIASED, WEIGHTS = range(4)  # modes, which say what qk_matmul_output is
TOLERANCES = {"float32": 2e-6, "float16": 1e-3}  # of the largest value; ONNX computes cases of float16 in float16

with safe_open(FILE, "numpy") as opened:
    ATTRIBUTES: dict[str, dict[str, Any]] = json.loads(opened.metadata()["attributes"])
    TENSORS = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dictionary


def rows(x: Any) -> Any:
    """[n, heads * d] of [heads, n, d]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_step_equals_a_case_of_onnx_with_a_past(http: httpx.Client, name: str) -> None:
    case = {key.rpartition(".")[2]: x for key, x in TENSORS.items() if key.rpartition(".")[0] == name}
    options, dtype = ATTRIBUTES[name], str(case["Q"].dtype)
    (_, heads, _, head_dim), (_, kv_heads, _, value_head_dim) = case["Q"].shape, case["past_value"].shape
    spec = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim, "dtype": dtype}
    made = http.put("/layers/onnx", json={"spec": {**spec, "d_model": heads * head_dim, "projections": False}})
    assert made.is_success, made.text
    for i in range(len(case["Q"])):
        check_item(http, {key: x[i] if x.ndim == 4 else x for key, x in case.items()}, options, TOLERANCES[dtype])
    http.delete("/layers/onnx")


def check_item(http: httpx.Client, item: dict[str, Any], options: dict[str, Any], tolerance: float) -> None:
    session, past = http.post("/sessions", json={"layer": "onnx"}).json(), item["past_key"].shape[1]
    metadata = {"fingerprint": session["layer"]["fingerprint"], "length": str(past)}
    content, path = save({"key": item["past_key"], "value": item["past_value"]}, metadata), f"/sessions/{session['id']}"
    assert http.put(f"{path}/cache", content=content, headers=HEADERS).json()["length"] == past

    mode = options.get("qk_matmul_output_mode", PRODUCTS) if "qk_matmul_output" in item else None
    output = "attention_weights" if mode == WEIGHTS else "scores"
    tensors = {"query": rows(item["Q"]), "key": rows(item["K"]), "value": rows(item["V"])}
    if (mask := item.get("attn_mask")) is not None:
        tensors["bias" if mask.dtype.kind == "f" else "attend_mask"] = mask
    request: dict[str, Any] = {"causal": bool(options.get("is_causal")), "outputs": ["concatenated", output]}
    if "left_window_size" in options:
        request["window"] = {"left": options["left_window_size"]}
    softcap = {"softcap": options["softcap"]} if "softcap" in options else {}
    given = attend(http, path, tensors, request | softcap)
    np.testing.assert_allclose(given["concatenated"], rows(item["Y"]), rtol=0, atol=tolerance * np.abs(item["Y"]).max())
    if mode in (PRODUCTS, CAPPED):  # scores without masks
        look = {"append": False, "query_offset": past, "outputs": ["scores"]}
        given = attend(http, path, {"query": tensors["query"]}, look | (softcap if mode == CAPPED else {}))
    if mode is not None:
        np.testing.assert_allclose(given[output], item["qk_matmul_output"], rtol=0, atol=1e-6 * max(1.0, finite(given[output])))
    present = load(http.get(f"{path}/cache").content)
    for ours, new in (("key", "K"), ("value", "V")):
        np.testing.assert_array_equal(present[ours], np.concatenate((item[f"past_{ours}"], item[new]), axis=1))
    http.delete(path)


def attend(http: httpx.Client, path: str, tensors: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(f"{path}/attend", content=save(tensors, {"request": json.dumps(request)}), headers=HEADERS)
    assert reply.status_code == 200, reply.text
    return load(reply.content)


def finite(x: Any) -> float:
    """The largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max())
