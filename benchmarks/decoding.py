"""Microseconds of a decoding step: the layer's own, torch's fused attention on a preallocated cache, and HTTP with and without a session.

    python benchmarks/decoding.py [--turns N] [--keys 1024,8192,32768] [--http]

The step of `torch` has the same projections; it writes its row into a preallocated tensor and calls scaled_dot_product_attention on it.
Turns of all contenders are interleaved; the table has medians, the ratio to `torch`, and the bytes of keys and values that the layer's step
reads per second, as a share of what copying an array of that size reaches on the same threads. With `--http`, steps over HTTP in
safetensors, of a session and of `POST /attend` with the whole past.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows

from service.attention.cache import KeyValueCache, PagePool
from service.attention.call import Call
from service.attention.decoding import CachedStep, forward_steps
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks
from service.spec import LayerSpec

WIDTH, HEADS, HEAD_DIM = 512, 8, 64
CPU = torch.device("cpu")


class Contenders:
    """A layer with caches of `keys` rows, and torch's attention with the same weights and rows."""

    def __init__(self, kv_heads: int, keys: int, sessions: int) -> None:
        self.spec = LayerSpec(d_model=WIDTH, num_heads=HEADS, num_kv_heads=kv_heads)
        weights = {name: torch.randn(*shape) * 0.05 for name, shape in self.spec.weight_shapes().items()}
        self.layer, self.keys, self.kv_heads = MultiHeadAttention(self.spec, weights, CPU), keys, kv_heads
        self.row = torch.randn(1, 1, WIDTH)
        self.past = [tuple(torch.randn(1, kv_heads, keys + 1, HEAD_DIM) for _ in range(2)) for _ in range(sessions)]
        pool = PagePool(CPU)
        self.caches = [KeyValueCache(self.spec, pool, "") for _ in range(sessions)]
        for cache, (key, value) in zip(self.caches, self.past, strict=True):
            cache.reserve(keys + 1)
            cache.write(0, {"key": key[0, :, :keys], "value": value[0, :, :keys]})
        self.stream = torch.randn(2, kv_heads * (keys + 1) * HEAD_DIM)
        placeholder = torch.zeros(()).expand(1, keys + 1, WIDTH)
        masks = Masks(torch.tensor([[keys]]), keys + 1, right=0)
        self.call = Call(self.row, placeholder, placeholder, masks, self.spec.scale, frozenset({"output"}))

    def ours(self) -> None:
        """One step of every session, as one batch."""
        forward_steps(self.layer, [(CachedStep(cache, self.keys, self.row, self.row), self.call) for cache in self.caches])

    @torch.inference_mode()
    def torch(self) -> None:
        """As many steps, one after the other."""
        project = self.layer.projections.product
        for past in self.past:
            query = project(self.row, "query").view(1, 1, HEADS, HEAD_DIM).transpose(1, 2)
            for rows, name in zip(past, ("key", "value"), strict=True):
                rows[:, :, self.keys] = project(self.row, name).view(1, self.kv_heads, HEAD_DIM)
            heads = F.scaled_dot_product_attention(query, *past, enable_gqa=self.kv_heads < HEADS)
            project(heads.transpose(1, 2).reshape(1, 1, WIDTH), "output")

    def copy(self) -> None:
        """Reads as many bytes as one step of each session, and writes them."""
        for _ in self.caches:
            self.stream[0].copy_(self.stream[1])


def timed(contenders: dict[str, Callable[[], object]], turns: int, repeats: int) -> dict[str, float]:
    """Median microseconds of each, with interleaved turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            if turn:  # the first turn warms up
                seconds[name].append((time.perf_counter() - started) / repeats)
    return {name: 1e6 * median(times) for name, times in seconds.items()}


def in_process(keys: list[int], turns: int) -> None:
    print("| heads | keys | sessions | layer, µs a step | torch, µs a step | ratio | GB/s read | of copying |")
    print("|---|---|---|---|---|---|---|---|")
    for kv_heads in (HEADS, 2):
        for n in keys:
            for sessions in (1, 16) if n <= 8192 else (1,):
                made = Contenders(kv_heads, n, sessions)
                found = timed({"ours": made.ours, "torch": made.torch, "copy": made.copy}, turns, max(1, 4096 // n))
                size = 2 * kv_heads * (n + 1) * HEAD_DIM * 4 * sessions
                rate, copied = (size / found[name] / 1e3 for name in ("ours", "copy"))
                steps = [found[name] / sessions for name in ("ours", "torch")]
                case, times = f"{HEADS}/{kv_heads} | {n} | {sessions}", " | ".join(f"{step:.0f}" for step in steps)
                print(f"| {case} | {times} | {steps[0] / steps[1]:.2f} | {rate:.1f} | {rate / copied:.0%} |")


def over_http(keys: list[int], turns: int) -> None:
    import httpx
    from load import serve_attend

    from service.wire.safetensors import write_tensors

    def body(tensors: dict[str, Any], request: dict[str, Any]) -> bytes:
        return b"".join(bytes(piece) for piece in write_tensors(tensors, {"request": json.dumps(request)}))

    headers = {"Content-Type": "application/vnd.safetensors", "Accept": "application/vnd.safetensors"}
    fields = {"causal": True, "outputs": ["output"]}
    print("\n| keys | session, µs | whole past, µs | ratio |")
    print("|---|---|---|---|")
    with (
        serve_attend(8101, WIDTH, HEADS, f"attend serve --session-memory {1 << 30}") as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=600) as http,
    ):
        for n in keys:
            past = np.random.default_rng(0).standard_normal((n, WIDTH)).astype(np.float32)
            session = http.post("/sessions", content=b"{}", headers={"Content-Type": "application/json"}).json()["id"]
            http.post(f"/sessions/{session}/attend", content=body({"query": past}, fields)).raise_for_status()
            step = body({"query": past[:1]}, fields)
            whole = body({"query": past[:1], "key": past}, {**fields, "query_offset": "end"})
            sent = {"session": (f"/sessions/{session}/attend", step), "whole": ("/attend", whole)}
            calls = {name: partial(http.post, path, content=content) for name, (path, content) in sent.items()}
            assert all(call().is_success for call in calls.values())
            found = timed(calls, turns, 10)
            print(f"| {n} | {found['session']:.0f} | {found['whole']:.0f} | {found['whole'] / found['session']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--keys", default="1024,8192,32768")
    parser.add_argument("--http", action="store_true", help="over HTTP as well")
    given = parser.parse_args()
    keys = [int(n) for n in given.keys.split(",")]
    torch.manual_seed(0)
    in_process(keys, given.turns)
    if given.http:
        over_http(keys, given.turns)


if __name__ == "__main__":
    main()
