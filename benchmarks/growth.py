"""Time per byte and peak memory of attend as bodies grow from 1 KB to 100 MB.

The batch grows and its items stay 128 queries of 512 numbers, and the output alone is requested: so the work per byte is the same in every
row, and only the server's overhead can grow. Every row has a new server, so that its peak is that of the row.
"""

import argparse
import http.client
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from load import Server, encode, print_table, random_arrays, serve_attend

KB, MB = 1_000, 1_000_000
BODY_BYTES = (KB, 10 * KB, 100 * KB, MB, 10 * MB, 100 * MB)
QUERIES, D_MODEL, NUM_HEADS = 128, 512, 8
NARROW = 64  # d_model of bodies that could not hold one row of D_MODEL numbers
OUTPUT_ALONE = {"outputs": ["output"]}
LEAST = 3  # requests of a row


def shape_for(size: int, form: str) -> tuple[int, int, int]:
    """The shape [batch, queries, d_model] of a query whose body has about `size` bytes."""
    for d_model in (D_MODEL, NARROW):
        body, _ = encode(form, random_arrays((1, 8, d_model), np.random.default_rng(0), ("query",)), OUTPUT_ALONE)
        if size >= len(body) / 8:
            break
    rows = max(1, round(size * 8 / len(body)))
    return (1, rows, d_model) if rows < QUERIES else (round(rows / QUERIES), QUERIES, d_model)


def resident(process: int, peak: bool = False) -> int:
    """Resident memory of a process in bytes; with `peak`, its maximum since the last call without `peak`."""
    status = Path(f"/proc/{process}/status")
    found = re.search(rf"^Vm{'HWM' if peak else 'RSS'}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    if not peak:
        status.with_name("clear_refs").write_text("5")  # resets the peak
    assert found is not None
    return int(found[1]) * 1024


def measure(server: Server, shape: tuple[int, int, int], form: str, seconds: float) -> dict[str, object]:
    rng, address = np.random.default_rng(0), urlsplit(server.url)
    posts = [encode(form, random_arrays(shape, rng, ("query",)), OUTPUT_ALONE) for _ in range(2)]
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
    times: list[float] = []
    idle, began = resident(server.process.pid), time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < LEAST + 1:
        body, headers = posts[len(times) % 2]
        started = time.perf_counter()
        connection.request("POST", "/attend", body, headers)
        reply = connection.getresponse()
        reply.read()
        times.append(time.perf_counter() - started)
        if reply.status != 200:
            raise SystemExit(f"a body of {len(body)} bytes was answered with {reply.status}")
    peak = resident(server.process.pid, peak=True) - idle
    size, median = len(posts[0][0]), float(np.median(times[1:]))
    return {
        "form": form,
        "body kB": size / KB,
        "shape": "x".join(map(str, shape)),
        "ms": median * 1e3,
        "ns a byte": median * 1e9 / size,
        "peak MB": peak / MB,
        "of body": peak / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="json,st", help="json, st (safetensors)")
    parser.add_argument("--largest", type=float, default=100, help="largest body in MB")
    parser.add_argument("--seconds", type=float, default=4, help="each row")
    parser.add_argument("--port", type=int, default=8101)
    args = parser.parse_args()
    rows = []
    for form in args.forms.split(","):
        for size in [size for size in BODY_BYTES if size <= args.largest * MB]:
            shape = shape_for(size, form)
            with serve_attend(args.port, shape[-1], NUM_HEADS) as server:
                rows.append(measure(server, shape, form, args.seconds))
    print_table(rows)


if __name__ == "__main__":
    main()
