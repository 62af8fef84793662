"""Requests per second of attend, the time of each phase of a request, and the floor.

The floor is the same work without a server: decode, compute and encode in one process, one request after the other.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import cycle
from pathlib import Path
from typing import Any

from load import SERVER_CORE, SIZES, Payload, Size, payloads, print_table, serve_attend, wrk

PHASES = ("decode", "queue", "compute", "encode")
SAMPLE = re.compile(r'^attend_phase_seconds_(sum|count)\{[^}]*phase="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


def phase_totals(url: str) -> dict[str, tuple[float, float]]:
    """Phase -> seconds and calls since the server started."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    totals: dict[str, dict[str, float]] = {}
    for kind, phase, value in SAMPLE.findall(text):
        totals.setdefault(phase, {})[kind] = float(value)
    return {phase: (found["sum"], found["count"]) for phase, found in totals.items()}


def measure(size: Size, form: str, payload: Payload, seconds: float, port: int) -> list[dict[str, Any]]:
    floor = measure_floor_apart(size, form, payload, seconds)
    rows = []
    with serve_attend(port, size.shape[-1], size.num_heads) as server:
        url = f"{server.url}/attend"
        wrk(url, payload, 1, 1)  # warm-up
        for connections in size.connections:
            before = phase_totals(server.url)
            figures = wrk(url, payload, connections, seconds)
            after = phase_totals(server.url)
            row: dict[str, Any] = {"size": size.name, "form": form, "connections": connections, "req/s": figures.rate}
            row |= {"p50 ms": figures.p50_ms, "p99 ms": figures.p99_ms}
            for phase in PHASES:
                spent, calls = (now - then for now, then in zip(after[phase], before.get(phase, (0.0, 0.0)), strict=True))
                row[f"{phase} ms"] = spent / calls * 1e3 if calls else None
            rows.append({**row, "floor/s": floor, "of floor": figures.rate / floor, "bad": figures.bad})
    return rows


def measure_floor_apart(size: Size, form: str, payload: Payload, seconds: float) -> float:
    """The floor in requests per second, measured in a process on the server's core with one arithmetic thread."""
    command = ["taskset", "-c", SERVER_CORE, sys.executable, __file__, "--floor", size.name, form, *map(str, payload.paths)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([*command, "--seconds", str(seconds)], env=env, capture_output=True, text=True, check=True)
    return float(printed.stdout)


def measure_floor(size: Size, form: str, paths: list[str], seconds: float) -> float:
    import torch

    from attend.errors import AttendError
    from attend.serving.executor import compute_alone
    from attend.serving.request_type import ATTEND
    from attend.serving.requests import Request
    from attend.serving.service import open_service
    from attend.spec import LayerSpec
    from attend.wire.negotiation import CODECS, JSON, SAFETENSORS

    torch.set_num_threads(1)
    service = open_service("cpu")
    layer = service.registry.make("default", LayerSpec(d_model=size.shape[-1], num_heads=size.num_heads))
    service.registry.put(layer)
    codec = CODECS[SAFETENSORS if form == "st" else JSON]

    def answer(body: bytes) -> None:
        request = Request(body, codec=codec, reply_codec=codec)
        decoded, prepared = service.engine.decode_and_prepare(request, ATTEND)
        outcome = compute_alone(prepared, 0.0, service.clock)
        if isinstance(outcome, AttendError):
            raise outcome
        codec.encode(ATTEND.build_reply(prepared, outcome.result), prepared.fields.reply, decoded.reply_format)

    bodies = [Path(path).read_bytes() for path in paths]
    for body in bodies:
        answer(body)
    started = time.perf_counter()
    for count, body in enumerate(cycle(bodies), 1):
        answer(body)
        if (took := time.perf_counter() - started) >= seconds:
            return count / took
    raise AssertionError("there are bodies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--forms", default="json,st", help="json, st (safetensors)")
    parser.add_argument("--seconds", type=float, default=4, help="each row")
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--floor", nargs="+", help=argparse.SUPPRESS)  # size, form, bodies: prints the floor alone
    args = parser.parse_args()
    if args.floor:
        name, form, *paths = args.floor
        print(measure_floor(SIZES[name], form, paths, args.seconds))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in [SIZES[name] for name in args.sizes.split(",")]:
            wire, _ = payloads(size, Path(folder))
            for form in args.forms.split(","):
                rows += measure(size, form, wire[form], args.seconds, args.port)
    print_table(rows)


if __name__ == "__main__":
    main()
