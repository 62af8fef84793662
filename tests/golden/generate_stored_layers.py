"""Layers of every kind, stored by a server with --layers-dir, and its answers to a call of each. Run once, for 0.1.0 at commit 50b54c2:

    attend serve --layers-dir tests/golden/stored/layers --port 8000 &
    python tests/golden/generate_stored_layers.py http://localhost:8000

`tests/serving/layers/test_store.py` loads them in today's server.
"""

import json
import sys
from pathlib import Path

import httpx
import numpy as np
from safetensors import deserialize

ROPE = {"theta": 500.0, "dims": 2, "scaling": {"type": "llama3", "factor": 4.0, "original_max_position": 16}}
NARROW = {"d_model": 12, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "qk_norm": {"kind": "rms"}}
SEEDED = {
    "seeded": {"d_model": 8, "num_heads": 2, "seed": 5},
    "textbook": {"d_model": 6, "num_heads": 3, "init": "numpy_normal", "seed": 6, "dtype": "float64"},
    "torch": {"d_model": 8, "num_heads": 2, "key_dim": 5, "value_dim": 7, "init": "torch_mha", "seed": 7},
}
UPLOADED = {
    "widths": {"d_model": 6, "num_heads": 2, "key_dim": 5, "value_dim": 7, "value_head_dim": 4, "output_dim": 3},
    "biases": {"d_model": 6, "num_heads": 2, "bias": {"query": True, "key": False, "value": True, "output": False}},
    "grouped": {**NARROW, "rope": ROPE, "bias": False, "window": {"left": 3, "right": 1}},
    "alibi": {"d_model": 8, "num_heads": 4, "alibi": True, "softcap": 5.0, "scale": 0.3, "sinks": True, "dtype": "float16"},
    "buckets": {"d_model": 6, "num_heads": 3, "relative_bias": {"buckets": 8, "max_distance": 16}, "scale": 1.0, "bias": False},
    "unprojected": {"d_model": 6, "num_heads": 2, "projections": False, "qk_norm": {"kind": "layer", "eps": 1e-5}},
}


def numbers(seed: int, *shape: int) -> list[object]:
    """Normal numbers of three decimals, as nested lists."""
    return np.random.RandomState(seed).normal(0, 0.5, shape).round(3).tolist()


def request(layer: dict[str, object]) -> dict[str, object]:
    """A causal call with numbers of its own for each input, in the widths that the layer takes."""
    spec = layer["spec"]
    heads, kv_heads, wide, value = (spec[name] for name in ("num_heads", "num_kv_heads", "head_dim", "value_head_dim"))
    widths = (
        (spec["d_model"], spec["key_dim"], spec["value_dim"]) if spec["projections"] else (heads * wide, kv_heads * wide, kv_heads * value)
    )
    inputs = {
        name: numbers(seed, n, width)
        for seed, (name, n, width) in enumerate(zip(("query", "key", "value"), (3, 5, 5), widths, strict=True))
    }
    return {"layer": layer["name"], **inputs, "causal": True, "query_offset": 2}


def main(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        for name, spec in {**SEEDED, **UPLOADED}.items():
            http.put(f"/layers/{name}", json={"spec": spec}).raise_for_status()
        for seed, (name, spec) in enumerate(UPLOADED.items()):  # each weight replaced by one that no seed gives
            drawn = deserialize(http.get(f"/layers/{name}/weights").content)
            weights = {weight: numbers(seed, *tensor["shape"]) for weight, tensor in drawn}
            http.put(f"/layers/{name}", json={"spec": spec, "weights": weights}).raise_for_status()
        answers = []
        for name in {**SEEDED, **UPLOADED}:
            layer = http.get(f"/layers/{name}").json()
            body = request(layer)
            reply = http.post("/attend", json=body).raise_for_status().json()
            answers.append({"layer": layer, "request": body, "reply": {part: reply[part] for part in ("output", "attention_weights")}})
    path = Path(__file__).parent / "stored" / "answers.json"
    path.write_text(json.dumps(answers, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
