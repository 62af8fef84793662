"""ONNX's own cases of its operator Attention with a past: the past is imported, and a step gives its output and its present."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

FILE = Path(__file__).parents[2] / "golden" / "caches" / "onnx_past.safetensors"
SAFETENSORS = "application/vnd.safetensors"
WEIGHTS = 3  # the mode in which qk_matmul_output is the attention weights; in others it is scores before masks or caps

with safe_open(FILE, "numpy") as opened:
    ATTRIBUTES: dict[str, dict[str, Any]] = json.loads(opened.metadata()["attributes"])
    TENSORS = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dictionary


def rows(x: Any) -> Any:
    """[n, heads * d] of [heads, n, d]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_case_with_a_past(http: httpx.Client, name: str) -> None:
    case = {key.rpartition(".")[2]: x for key, x in TENSORS.items() if key.rpartition(".")[0] == name}
    options = ATTRIBUTES[name]
    (heads, _, head_dim), (kv_heads, past, value_head_dim) = case["Q"].shape, case["past_value"].shape
    spec = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}
    made = http.put("/layers/onnx", json={"spec": {**spec, "d_model": heads * head_dim, "projections": False}})
    assert made.is_success, made.text
    session = http.post("/sessions", json={"layer": "onnx"}).json()
    metadata = {"fingerprint": session["layer"]["fingerprint"], "length": str(past)}
    content = save({"key": case["past_key"], "value": case["past_value"]}, metadata)
    path, headers = f"/sessions/{session['id']}", {"content-type": SAFETENSORS, "accept": SAFETENSORS}
    assert http.put(f"{path}/cache", content=content, headers=headers).json()["length"] == past

    tensors = {"query": rows(case["Q"]), "key": rows(case["K"]), "value": rows(case["V"])}
    if (mask := case.get("attn_mask")) is not None:
        tensors["bias" if mask.dtype.kind == "f" else "attend_mask"] = mask
    has_weights = options.get("qk_matmul_output_mode") == WEIGHTS
    outputs = ["concatenated", *(["attention_weights"] if has_weights else [])]
    request: dict[str, Any] = {"causal": bool(options.get("is_causal")), "outputs": outputs}
    if "left_window_size" in options:
        request["window"] = {"left": options["left_window_size"]}
    if "softcap" in options:
        request["softcap"] = options["softcap"]
    reply = http.post(f"{path}/attend", content=save(tensors, {"request": json.dumps(request)}), headers=headers)
    assert reply.status_code == 200, reply.text

    given, present = load(reply.content), load(http.get(f"{path}/cache").content)
    np.testing.assert_allclose(given["concatenated"], rows(case["Y"]), rtol=0, atol=2e-6 * np.abs(case["Y"]).max())
    if has_weights:
        np.testing.assert_allclose(given["attention_weights"], case["qk_matmul_output"], rtol=0, atol=1e-6)
    for ours, theirs in (("key", "present_key"), ("value", "present_value")):
        np.testing.assert_array_equal(present[ours], case[theirs])
    http.delete(path)
    http.delete("/layers/onnx")
