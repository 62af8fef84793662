"""How long GET /health/live takes on a separate connection while four others post 8 MB of JSON each."""

import argparse
import http.client
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from load import Size, payloads, print_table, serve_attend, wrk

SIZE = Size("health", (4, 105, 512), 8, (4,))  # three tensors, 8 MB of JSON together
PAUSE = 0.003  # seconds between a reply and the next check


def check_until(done: threading.Event, url: str) -> list[float]:
    """Seconds that each check took."""
    address, times = urlsplit(url), []
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    while not done.wait(PAUSE):
        started = time.perf_counter()
        connection.request("GET", "/health/live")
        reply = connection.getresponse()
        reply.read()
        times.append(time.perf_counter() - started)
        if reply.status != 200:
            raise SystemExit(f"/health/live answered {reply.status}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--port", type=int, default=8101)
    args = parser.parse_args()
    done = threading.Event()
    with tempfile.TemporaryDirectory() as folder, serve_attend(args.port, SIZE.shape[-1], SIZE.num_heads) as server:
        wire, _ = payloads(SIZE, Path(folder))
        figures = []

        def load() -> None:
            figures.append(wrk(f"{server.url}/attend", wire["json"], SIZE.connections[0], args.seconds))
            done.set()

        thread = threading.Thread(target=load)
        thread.start()
        times = check_until(done, server.url)
        thread.join()
    p50, p99, largest = np.percentile(times, (50, 99, 100)) * 1e3
    row = {"checks": len(times), "p50 ms": float(p50), "p99 ms": float(p99), "largest ms": float(largest)}
    print_table([{**row, "bodies/s": figures[0].rate, "bad": figures[0].bad}])


if __name__ == "__main__":
    main()
