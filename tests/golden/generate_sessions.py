"""Writes tests/golden/sessions: caches that a server exported, and its reply to the next step. Those there are of version 0.1.0's first
format, so do not write them again: `python generate_sessions.py URL` adds missing ones, from a server with --session-memory."""

import json
import sys
from pathlib import Path

import httpx
import numpy as np

FOLDER = Path(__file__).parent / "sessions"
SPECS = {
    "grouped": {"d_model": 24, "num_heads": 6, "num_kv_heads": 2, "rope": {}, "seed": 3},
    "latent": {
        "d_model": 20,
        "num_heads": 2,
        "head_dim": 6,
        "dtype": "bfloat16",
        "rope": {"dims": 4},
        "latent": {"key_value_rank": 10, "rope_key_dim": 4},
        "seed": 5,
    },
}


def main(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        for name, spec in SPECS.items():
            if (FOLDER / f"{name}.json").exists():
                continue
            rows = np.random.default_rng(7).standard_normal((23, spec["d_model"])).round(3).tolist()
            put = http.put(f"/layers/{name}", json={"spec": spec})
            put.raise_for_status()
            session = http.post("/sessions", json={"layer": name}).json()["id"]
            body = {"causal": True, "outputs": ["output"]}
            http.post(f"/sessions/{session}/attend", json={"query": rows[:22], **body}).raise_for_status()
            (FOLDER / f"{name}.safetensors").write_bytes(http.get(f"/sessions/{session}/cache").raise_for_status().content)
            step = http.post(f"/sessions/{session}/attend", json={"query": rows[22:], **body}).raise_for_status().json()
            case = {"spec": spec, "query": rows[22:], "output": step["output"]}
            (FOLDER / f"{name}.json").write_text(json.dumps(case) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
