"""Microseconds of a decoding step: the layer's own, other libraries' on a preallocated cache, and HTTP with and without a session.

    python benchmarks/decoding.py [--turns N] [--keys 1024,8192,32768] [--onnxruntime] [--http]

The step of `torch` has the same projections; it writes its row into preallocated tensors and calls scaled_dot_product_attention on them.
That of ONNX Runtime (packages onnx and onnxruntime) does the same with GroupQueryAttention. Both compute one session after the other; the
layer computes the sessions as one batch. Outputs are compared, and turns of all contenders are interleaved. The table has medians, and the
bytes of keys and values that the layer's step reads per second, as a share of the bytes that a copy of 256 MB reads and writes on the same
threads. With `--http`, the rate of steps over HTTP in safetensors, of sessions and of `POST /attend` with the whole past; the server has
one thread.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from attend.attention.cache import KeyValueCache, PagePool
from attend.attention.call import Call, CallOptions
from attend.attention.decoding import CachedForwardPass, forward_cached
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.spec import LayerSpec

WIDTH, HEADS, HEAD_DIM = 512, 8, 64
CPU = torch.device("cpu")
STREAM = torch.randn(2, 1 << 26)
TOLERANCE = 1e-5  # of an output from torch's
SESSIONS = 16  # at once, in every second row
STEP_SECONDS, WHOLE_SECONDS = 1, 4  # of a row over HTTP in a turn; in more, a session would grow too much


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
        masks = Masks(torch.tensor([[keys]]), keys + 1, right=0)
        options = CallOptions(1, 1, keys + 1, frozenset({"output"}), self.spec.scale, self_attention=True, keys_as_values=True)
        self.call = Call(options, self.row, self.row, self.row, masks)

    def ours(self) -> Tensor:
        """One step of every session, as one batch. The output of the last one."""
        steps = [(CachedForwardPass(cache, self.keys), self.call) for cache in self.caches]
        return forward_cached(self.layer, steps)[-1].tensors["output"]

    @torch.inference_mode()
    def torch(self) -> Tensor:
        """As many steps, one after the other."""
        project = self.layer.arithmetic.project
        for past in self.past:
            query = project(self.row, "query").view(1, 1, HEADS, HEAD_DIM).transpose(1, 2)
            for rows, name in zip(past, ("key", "value"), strict=True):
                rows[:, :, self.keys] = project(self.row, name).view(1, self.kv_heads, HEAD_DIM)
            heads = F.scaled_dot_product_attention(query, *past, enable_gqa=self.kv_heads < HEADS)
            output = project(heads.transpose(1, 2).reshape(1, 1, WIDTH), "output")
        return output

    def onnxruntime(self) -> Callable[[], Tensor]:
        """A function that does the same with ONNX Runtime."""
        from contenders.onnx_layer import step

        weights = {name: tensor.numpy() for name, tensor in self.layer.weights.items()}
        row, threads = self.row.numpy(), torch.get_num_threads()
        steps = [step(weights, HEADS, row, (key.numpy(), value.numpy()), threads) for key, value in self.past]
        return lambda: [torch.from_numpy(run()) for run in steps][-1]


def copy() -> None:
    """Reads and writes 256 MB."""
    STREAM[0].copy_(STREAM[1])


def timed(contenders: dict[str, Callable[[], object]], turns: int, repeats: int) -> dict[str, float]:
    """Median microseconds of each, with interleaved turns. Each is first equally often: the first one loads shared data."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders.items())
    for turn in range(turns + 1):
        order.append(order.pop(0))
        for name, run in order:
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            if turn:  # the first turn warms up
                seconds[name].append((time.perf_counter() - started) / repeats)
    return {name: 1e6 * median(times) for name, times in seconds.items()}


def in_process(keys: list[int], turns: int, with_onnxruntime: bool) -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| heads | keys | sessions | layer, µs a step | torch | ONNX Runtime | layer / torch | GB/s read | of copying |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kv_heads in (HEADS, 2):
        for n in keys:
            for sessions in (1, SESSIONS) if n <= 8192 else (1,):
                made = Contenders(kv_heads, n, sessions)
                contenders = {"ours": made.ours, "torch": made.torch}
                if with_onnxruntime:
                    contenders["onnxruntime"] = made.onnxruntime()
                wanted = made.torch()
                assert all((run() - wanted).abs().max() <= TOLERANCE * wanted.abs().max() for run in contenders.values())
                found = timed(contenders, turns, max(2, 8192 // n)) | timed({"copy": copy}, 3, 1)
                rate = 2 * kv_heads * (n + 1) * HEAD_DIM * 4 * sessions / found["ours"] / 1e3
                copied = 2 * STREAM[0].nbytes / found["copy"] / 1e3
                times = [f"{found[name] / sessions:.0f}" if name in found else "" for name in ("ours", "torch", "onnxruntime")]
                ratio = found["ours"] / found["torch"]
                case = " | ".join((f"{HEADS}/{kv_heads}", str(n), str(sessions), *times))
                print(f"| {case} | {ratio:.2f} | {rate:.1f} | {rate / copied:.0%} |", flush=True)


def over_http(keys: list[int], turns: int, port: int) -> None:
    """Steps per second of one caller and of SESSIONS at once, each with a session, and with the whole past in each request."""
    from load import SAFETENSORS, Payload, encode, serve_attend, wrk

    fields = {"causal": True, "outputs": ["output"]}
    print("\n| keys | callers | session, steps/s | whole past, steps/s | ratio |")
    print("|---|---|---|---|---|")
    with serve_attend(port, WIDTH, HEADS, f"attend serve --session-memory {1 << 32}") as server, TemporaryDirectory() as folder:

        def post(path: str, body: bytes, media_type: str = SAFETENSORS) -> bytes:
            sent = {"Content-Type": media_type, "Accept": media_type}
            with urlopen(Request(f"{server.url}{path}", body, sent), timeout=600) as reply:
                return bytes(reply.read())

        def payload(name: str, body: bytes, headers: dict[str, str]) -> Payload:
            path = Path(folder, name)
            path.write_bytes(body)
            return Payload([path], headers)

        for n in keys:
            past = np.random.default_rng(0).standard_normal((n, WIDTH)).astype(np.float32)
            step = payload("step", *encode("st", {"query": past[:1]}, fields))
            whole = payload("whole", *encode("st", {"query": past[:1], "key": past}, {**fields, "query_offset": "end"}))
            for callers in (1, SESSIONS) if n <= 8192 else (1,):
                rates: dict[str, list[float]] = {"session": [], "whole": []}
                for _ in range(turns):  # with new sessions, since they grow
                    ids = [json.loads(post("/sessions", b"{}", "application/json"))["id"] for _ in range(callers)]
                    paths = [f"/sessions/{id}/attend" for id in ids]
                    for path in paths:
                        post(path, encode("st", {"query": past}, fields)[0])
                    for name, sent, to, seconds in (("session", step, paths, STEP_SECONDS), ("whole", whole, ["/attend"], WHOLE_SECONDS)):
                        figures = wrk(server.url, sent, callers, seconds, to)
                        assert not figures.bad, f"{figures.bad} requests of {name} failed"
                        rates[name].append(figures.rate)
                    for id in ids:
                        with urlopen(Request(f"{server.url}/sessions/{id}", method="DELETE"), timeout=600):
                            pass
                session, sent_whole = median(rates["session"]), median(rates["whole"])
                print(f"| {n} | {callers} | {session:.0f} | {sent_whole:.1f} | {session / sent_whole:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--keys", default="1024,8192,32768")
    parser.add_argument("--onnxruntime", action="store_true", help="ONNX Runtime as well")
    parser.add_argument("--http", action="store_true", help="over HTTP as well, which needs wrk")
    parser.add_argument("--port", type=int, default=8101)
    given = parser.parse_args()
    keys = [int(n) for n in given.keys.split(",")]
    torch.manual_seed(0)
    in_process(keys, given.turns, given.onnxruntime)
    if given.http:
        over_http(keys, given.turns, given.port)


if __name__ == "__main__":
    main()
